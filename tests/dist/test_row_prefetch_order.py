"""In which order a step sends and waits, so that links are busy while ranks compute."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import LossModel, local_loss, make_stream, shard
from tests.support.models import BagModel
from tests.support.parity import Cell, make_optimizer, make_sharder
from tests.support.prefetching import STEPS
from tests.support.rank_device import rank_device
from tests.support.ranks import RankPool
from torchrec_2dsp.shard.row_exchange.journey import RowJourney
from torchrec_2dsp.shard.row_exchange.requests import RowRequests

ROWS = Cell(tdsp.Mesh2D(1, 4), exchange="row")
SEEN = {
    (RowJourney, "send_late"): "late rows leave",
    (RowRequests, "forward"): "ids of a later batch leave",
    (RowJourney, "send_gradients"): "row gradients leave",
    (RowJourney, "receive_gradients"): "row gradients are waited for",
}


class ScaledModel(LossModel):
    """What is computed before the lookup has its gradient after it, as a bottom MLP has."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = self.scale * 2
        scores = BagModel.forward(self, features) * scale
        return local_loss(scores), scores.detach()


def events_of_a_step(rank: int, world_size: int) -> list[str]:
    torch.manual_seed(0)
    parallel = shard(ROWS, make_sharder(ROWS), ScaledModel(ROWS.spec))
    pipeline: Any = tdsp.TrainPipelineRowPrefetch(parallel, make_optimizer(parallel), rank_device())
    stream = iter([step[rank] for step in make_stream(ROWS, STEPS)])
    for _ in range(2):
        pipeline.progress(stream)
    events: list[str] = []
    (scale,) = (one for name, one in parallel.named_parameters() if name.endswith("scale"))
    scale.register_hook(lambda grad: events.append("dense gradients are there"))
    with pytest.MonkeyPatch.context() as patch:
        for (kind, name), what in SEEN.items():
            patch.setattr(kind, name, _noting(getattr(kind, name), what, events))
        pipeline.progress(stream)
    # With several kernels, each event comes once for each.
    return [event for event, _ in itertools.groupby(events)]


def _noting(method: Any, what: str, events: list[str]) -> Any:
    def noting(*arguments: Any, **named: Any) -> Any:
        events.append(what)
        return method(*arguments, **named)

    return noting


def test_late_rows_leave_first_and_row_gradients_are_waited_for_last(ranks4: RankPool) -> None:
    assert (
        ranks4.run(events_of_a_step)
        == [
            [
                "late rows leave",
                "ids of a later batch leave",
                "row gradients leave",
                "dense gradients are there",
                "row gradients are waited for",
            ]
        ]
        * 4
    )
