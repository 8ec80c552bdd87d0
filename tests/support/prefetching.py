"""Train a parity matrix cell by `TrainPipelineRowPrefetch` and by TorchRec's pipeline."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.devices import rank_device
from tests.support.loops import LossModel, Tensors, largest_gap, make_stream, shard, snapshot
from tests.support.models import SequenceModel
from tests.support.parity import Cell, make_optimizer, make_sharder
from torchrec_2dsp.comms.row_wire import TravellingRows
from torchrec_2dsp.shard.row_exchange.journey import Halves, RowJourney

STEPS = 6


class SequenceLossModel(SequenceModel):
    """A model that pipelines can trace."""

    def forward(self, features: KeyedJaggedTensor) -> Any:
        sequences = self.ec(features)
        values = torch.cat([sequences[name].values().view(-1) for name in self.features]).tanh()
        loss = values.pow(2).sum()
        return loss, loss.detach()


class Counts(NamedTuple):
    """This rank's traffic in all steps together."""

    early: int = 0
    """Rows that came early."""
    late: int = 0
    """Rows that came late, in batches with early rows."""
    lagging: int = 0
    """Gradients that left after the next batch's rows had come."""
    told: int = 0
    """Rows for which this rank, as their owner, reported in which half they are."""


@dataclass(frozen=True)
class Trained:
    """One loop's result on a cell."""

    tensors: Tensors
    losses: list[float]
    counts: Counts


def sharded(cell: Cell, qcomms: CommType | None = None) -> DistributedModelParallel:
    torch.manual_seed(0)
    model = (SequenceLossModel if cell.spec.sequence else LossModel)(cell.spec)
    return shard(cell, make_sharder(cell, qcomms), model)


@contextmanager
def counting_rows() -> Iterator[list[Counts]]:
    """Record each row journey's traffic."""
    seen: list[Counts] = []
    fetch, finish, tell = RowJourney.fetch, RowJourney.finish, Halves.__init__

    def count_rows(self: RowJourney) -> Any:
        early, late = (sum(half.num_wanted) for half in self._rows.wait())
        seen.append(Counts(early=early, late=late))
        return fetch(self)

    def count_gradients(self: RowJourney) -> None:
        if self._lagging is not None and isinstance(self._lagging_grads, TravellingRows):
            seen.append(Counts(lagging=sum(self._lagging.wait()[1].num_wanted)))
        finish(self)

    def count_told(self: Halves, is_second: torch.Tensor, *others: Any) -> None:
        seen.append(Counts(told=is_second.numel()))
        tell(self, is_second, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowJourney, "fetch", count_rows)
        patch.setattr(RowJourney, "finish", count_gradients)
        patch.setattr(Halves, "__init__", count_told)
        yield seen


def run(
    parallel: DistributedModelParallel,
    batches: Sequence[KeyedJaggedTensor],
    kind: type[TrainPipelineSparseDist] = tdsp.TrainPipelineRowPrefetch,
    between: Any = None,
) -> Trained:
    """Train all batches; ``between(step, parallel, pipeline)`` is called after each step."""
    pipeline: Any = kind(parallel, make_optimizer(parallel), rank_device())
    stream, losses = iter(batches), []
    with counting_rows() as seen:
        for step in range(len(batches)):
            losses.append(float(pipeline.progress(stream).sum()))
            if between is not None:
                between(step, parallel, pipeline)
        with pytest.raises(StopIteration):
            pipeline.progress(stream)
        tensors = snapshot(parallel)
    return Trained(tensors, losses, Counts(*map(sum, zip(Counts(), *seen, strict=True))))


def compare(
    rank: int, world_size: int, cell: Cell, between: Any = None, qcomms: CommType | None = None
) -> tuple[float, Counts]:
    """Train by both pipelines; return the largest gap between them, and the traffic."""
    batches = [step[rank] for step in make_stream(cell, STEPS)]
    expected = run(sharded(cell, qcomms), batches, TrainPipelineSparseDist, between)
    actual = run(sharded(cell, qcomms), batches, between=between)
    assert expected.counts == Counts()
    losses = zip(actual.losses, expected.losses, strict=True)
    gap = max(largest_gap(actual.tensors, expected.tensors), *(abs(a - b) for a, b in losses))
    return gap, actual.counts
