"""Compiled models train like others; their tables stay outside the graphs."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch._dynamo.utils import counters
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.distributed.train_pipeline import TrainPipelinePT2
from torchrec.distributed.train_pipeline.train_pipelines import TorchCompileConfig

import torchrec_2dsp as tdsp
from tests.support.dense_training import whole
from tests.support.devices import rank_device
from tests.support.loops import LossModel, largest_gap
from tests.support.models import HOT_ROWS, make_batch
from tests.support.parity import TOLERANCE, TWO, Cell, make_optimizer, shard
from tests.support.ranks import RankPool

STEPS = 4
ROWS = Cell(TWO, exchange="row")
BACKEND = "aot_eager"
SET_BY_PT2 = (
    "capture_scalar_outputs",
    "capture_dynamic_output_shape_ops",
    "force_unspec_int_unbacked_size_like_on_torchrec_kjt",
    "skip_torchrec",
)
"""The compiler's settings for the whole process that this pipeline changes."""


class PlainLoop:
    """A loop with an evaluation on each batch, in a pipeline's form."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._model, self._optimizer = model, optimizer

    def progress(self, source: Any) -> torch.Tensor:
        batch = next(source)
        self._optimizer.zero_grad()
        loss, scores = self._model(batch)
        loss.backward()
        self._optimizer.step()
        with torch.no_grad():
            self._model.eval()(batch)
        self._model.train()
        return scores


PIPELINES: dict[str, tuple[Cell, Callable[..., Any]]] = {
    "plain loop": (replace(ROWS, hot_rows=HOT_ROWS), PlainLoop),
    "stock wrapper": (replace(ROWS, stock_wrapper=True), PlainLoop),
    "fully sharded": (ROWS, PlainLoop),
    "row prefetch": (replace(ROWS, in_world=("t0",)), tdsp.TrainPipelineRowPrefetch),
    # It compiles the model itself.
    "PT2": (
        ROWS,
        partial(TrainPipelinePT2, compile_configs=TorchCompileConfig(backend=BACKEND)),
    ),
}


def dense_wrapper(name: str) -> Any:
    if name == "fully sharded":
        return tdsp.FullyShardedDense()
    # Below the first bucket's usual size, as `parallelize` makes them for a small dense part.
    return None if name == "stock wrapper" else DefaultDataParallelWrapper(cast(Any, 2**-14))


def train(
    rank: int, cell: Cell, kind: Callable[..., Any], wrapper: Any, compiles: bool
) -> tuple[Any, Any]:
    """Return each step's scores, and all weights."""
    torch.manual_seed(0)
    model = shard(cell, model=LossModel(cell.spec), data_parallel_wrapper=wrapper)
    if compiles:
        model.compile(backend=BACKEND)
    pipeline = kind(model, make_optimizer(model), rank_device())
    source = (make_batch(cell.spec, 10 * step + rank) for step in range(STEPS))
    scores = [pipeline.progress(source) for _ in range(STEPS)]
    # Replicas change each other's rows until the state is read.
    model.state_dict()
    weights = {name: whole(value) for name, value in model.named_parameters()}
    return torch.stack(scores), weights


def train_both(rank: int, world_size: int, name: str) -> tuple[float, float, int]:
    """Return the gaps in scores and weights to a plain loop, and the number of graphs."""
    cell, kind = PIPELINES[name]
    torch._dynamo.reset()
    counters.clear()
    settings = {key: getattr(torch._dynamo.config, key) for key in SET_BY_PT2}
    with warnings.catch_warnings(), torch._dynamo.config.patch(settings):
        # The compiler's own.
        warnings.simplefilter("ignore")
        scores, weights = train(rank, cell, kind, dense_wrapper(name), compiles=name != "PT2")
    num_graphs = counters["stats"]["unique_graphs"]
    expected, expected_weights = train(rank, cell, PlainLoop, dense_wrapper(name), compiles=False)
    return (
        (scores - expected).abs().max().item(),
        largest_gap(weights, expected_weights),
        num_graphs,
    )


# A case compiles for some seconds on each rank.
@pytest.mark.dealt
@pytest.mark.parametrize("name", PIPELINES)
def test_a_compiled_model_trains_as_others_do(ranks4: RankPool, name: str) -> None:
    for score_gap, weight_gap, num_graphs in ranks4.run(train_both, name):
        assert score_gap <= TOLERANCE
        assert weight_gap <= TOLERANCE
        assert num_graphs > 0
