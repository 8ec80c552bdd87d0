"""The wrappers' settings, from a config and from a plan."""

from typing import Any

import pytest
from pydantic import TypeAdapter
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

import torchrec_2dsp as tdsp
from torchrec_2dsp.mesh import DenseMesh
from torchrec_2dsp.plan.dense_plan import DenseKind, DensePlan
from torchrec_2dsp.programs.config.dense import (
    DensePartConfig,
    PipelinedConfig,
    TensorParallelConfig,
)
from torchrec_2dsp.programs.models import dense
from torchrec_2dsp.programs.models.dense import Layered

LAYERED = Layered(
    stack=tdsp.LayerStack([nn.Linear(4, 4), nn.Linear(4, 4)], nn.MSELoss(reduction="none")),
    tensor_plan={"stack.layers.0": ColwiseParallel()},
)
MESH = DenseMesh.for_world(8, tp=2)
PIPELINES = DenseMesh.for_world(8, pp=2)


@pytest.fixture(params=[False, True], ids=["config", "plan"])
def asked(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Record the settings of the last wrapper that a program builds."""
    settings: dict[str, Any] = {}
    for name in ("FullyShardedDense", "TensorParallelDense", "PipelinedDense"):
        monkeypatch.setattr(dense, name, lambda *_, **options: settings.update(options))
    settings["is_planned"] = request.param
    return settings


def make(asked: dict[str, Any], kind: str, mesh: DenseMesh, **options: Any) -> None:
    """Build a wrapper from a config, or from a plan."""
    if asked["is_planned"]:
        cuts = (1,) * (mesh.pp - 1)
        plan = DensePlan(kind=DenseKind(kind), mesh=mesh, cuts=cuts, **options)
        dense.wrapper_of(plan, LAYERED)
    else:
        # At its default, a config may have the keys of other kinds.
        tree = {"kind": kind, "tp": mesh.tp} | options
        dense.dense_wrapper(TypeAdapter(DensePartConfig).validate_python(tree), LAYERED)


def test_copies_are_those_of_the_config(asked: dict[str, Any]) -> None:
    make(asked, "tensor_parallel", MESH, num_copies=4)
    assert (asked["tp"], asked["num_copies"]) == (2, 4)
    make(asked, "fully_sharded", DenseMesh.for_world(8), num_copies=2)
    assert asked["num_copies"] == 2


@pytest.mark.parametrize("fully_shard", [False, True])
def test_pipelines_share_layers_if_the_config_says_so(
    asked: dict[str, Any], fully_shard: bool
) -> None:
    make(asked, "pipelined", PIPELINES, fully_shard=fully_shard)
    assert asked["fully_shard"] is fully_shard


def test_contestants_say_how_layers_are_shared() -> None:
    split = TensorParallelConfig(tp=2, num_copies=4)
    assert split.text == "layers split over 2 ranks, in 4 copies"
    assert PipelinedConfig(fully_shard=True).text == (
        "2 stages, 1F1B, 8 micro-batches, contiguous, sharded"
    )
