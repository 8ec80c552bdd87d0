"""Without a plan `ModelParallel2D` plans by itself, and trains as stock TorchRec does."""

import logging
from typing import Any, cast

import pytest
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import torchrec_2dsp as tdsp
from tests.support.models import SEQUENCE_TABLES, ModelSpec, build, make_batch
from tests.support.oracle import local_loss
from tests.support.parity import TOLERANCE
from tests.support.rank_device import rank_device
from tests.support.ranks import RankPool

STEPS = 3


def losses_of(parallel: DistributedModelParallel, spec: ModelSpec, rank: int) -> list[float]:
    """The losses of a few steps from the same weights, tables by the fused default optimizer."""
    weights = build(spec, seed=0).state_dict()
    parallel.load_state_dict(cast(Any, weights))
    losses = []
    for step in range(STEPS):
        loss = local_loss(parallel(make_batch(spec, seed=10 * step + rank)))
        loss.backward()
        if isinstance(parallel, tdsp.ModelParallel2D):
            parallel.sync()
        losses.append(loss.item())
    return losses


def train_both(rank: int, world_size: int, spec: ModelSpec) -> tuple[list[float], list[float], str]:
    """Losses of ours and of stock, both without a plan, and what was logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("torchrec_2dsp.parallel.model_parallel2d")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        ours = tdsp.ModelParallel2D(build(spec, seed=1))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert ours.mesh == tdsp.Mesh2D(1, world_size)
    stock = DistributedModelParallel(build(spec, seed=2), device=rank_device())
    return losses_of(ours, spec, rank), losses_of(stock, spec, rank), "\n".join(lines)


@pytest.mark.parametrize(
    "spec",
    [ModelSpec(), ModelSpec(tables=SEQUENCE_TABLES, sequence=True)],
    ids=["bags", "sequences"],
)
def test_without_a_plan_it_trains_as_stock_does(ranks4: RankPool, spec: ModelSpec) -> None:
    results = ranks4.run(train_both, spec)
    for ours, stock, _ in results:
        assert len(set(ours)) == STEPS
        assert ours == pytest.approx(stock, abs=TOLERANCE)
    logged = [text for _, _, text in results]
    assert "no plan was given" in logged[0]
    assert "Mesh2D(1x4" in logged[0]
    assert not any(logged[1:])


def error_of_what_does_not_fit(rank: int, world_size: int) -> str:
    table = EmbeddingBagConfig(
        num_embeddings=10**12, embedding_dim=128, name="huge", feature_names=["f"]
    )
    model = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    try:
        tdsp.ModelParallel2D(model)
    except tdsp.errors.PlanError as error:
        return str(error)
    return "it fits"


def test_what_does_not_fit_is_one_error_on_all_ranks(ranks4: RankPool) -> None:
    (error,) = set(ranks4.run(error_of_what_does_not_fit))
    assert error.startswith("no plan fits a sharding group of Mesh2D(1x4")
