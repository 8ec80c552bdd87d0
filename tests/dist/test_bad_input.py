"""Bad input raises the same typed error on every rank within seconds."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig, ModelTrackerConfigs
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType

import torchrec_2dsp as tdsp
from tests.support.models import SEQUENCES, BagModel, ModelSpec, TableSpec, build, tables_of
from tests.support.parity import ONE, TWO, Cell, group_plan, make_sharder, plan_as_torchrec, shard
from tests.support.ranks import RankPool, error_of
from torchrec_2dsp._compat.fbgemm import EmbOptimType
from torchrec_2dsp.mesh import RankLayout
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer
from torchrec_2dsp.shard import sharders

MAX_SECONDS = 5.0
CELL = Cell(TWO)
FIRST, *OTHERS = ModelSpec().tables
SHARED_FEATURE = ModelSpec((TableSpec("t0", 40, 8, ("f0",)), TableSpec("t1", 24, 8, ("f0",))))
ONE_TABLE = ModelSpec((TableSpec("t0", 7, 4, ("f0",)),))
WEIGHTED_MEANS = ModelSpec(pooling="mean", weighted=True)
sharder_of = tdsp.EmbeddingBagCollectionSharder2D


def planned(cell: Cell = CELL) -> tdsp.Plan2D:
    return group_plan(cell, build(cell.spec), make_sharder(cell))


def construct(
    cell: Cell = CELL,
    *,
    model: Any = None,
    sharder: Any = None,
    change: Callable[[tdsp.Plan2D], Any] = lambda plan: plan,
    **options: Any,
) -> Any:
    """Shard the cell's model, or ``model``, by its or another sharder and a changed plan."""
    return tdsp.ModelParallel2D(
        build(cell.spec) if model is None else model,
        plan=change(planned(cell)),
        sharders=[make_sharder(cell) if sharder is None else sharder],
        **options,
    )


def pinned(table: str, hot_rows: list[int], cell: Cell = CELL) -> tdsp.Plan2D:
    return tdsp.pin(planned(cell), table, hot_rows=hot_rows)


def without_t1(plan: Any) -> tdsp.Plan2D:
    del plan.plan["ebc"]["t1"]
    return plan


def with_cached_kernel(plan: Any) -> tdsp.Plan2D:
    tables = plan.plan["ebc"]
    tables["t0"] = replace(tables["t0"], compute_kernel="fused_uvm_caching")
    return plan


def with_a_half_output(plan: Any) -> tdsp.Plan2D:
    tables = plan.plan["ebc"]
    tables["t0"] = replace(tables["t0"], output_dtype=DataType.FP16)
    return plan


def with_config(**fields: Any) -> BagModel:
    """Build the cell's model; its first table's config has other ``fields``."""
    model = BagModel(CELL.spec)
    for name, value in fields.items():
        setattr(model.ebc.embedding_bag_configs()[0], name, value)
    return model


def with_triton_on_some(rank: int) -> None:
    """Shard where Triton runs only on rank 0, as if only its host had a compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharders, "runs_triton", lambda device: rank == 0)
        construct()


def with_first_table(**changes: Any) -> Any:
    """Build the cell's model with another first table."""
    return build(ModelSpec((replace(FIRST, **changes), *OTHERS)))


def scaled_by_sharder() -> None:
    """Shard tables with scaled moments."""
    construct(sharder=sharder_of(tdsp.MomentScaledRowWiseAdaGrad(lr=0.1, moment_scale=2.0)))


def scaled_in_backward(rank: int) -> None:
    model, options = build(CELL.spec), {"lr": 0.1, "moment_scale": 2.0}
    rule = MomentScaledRowWiseAdaGradOptimizer
    _apply_optimizer_in_backward(rule, tables_of(model).parameters(), options)
    construct(model=model, sharder=sharder_of())


def on_different_hosts(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2" if rank == 1 else "4")
        construct()


def with_a_parameter_that_no_kernel_has(rank: int) -> None:
    sharder = make_sharder(CELL)
    sharder.fused_params["no_such_parameter"] = 1
    construct(Cell(TWO, "table_wise"), sharder=sharder)


def by_torchrec_alone(rank: int) -> None:
    sharders: Any = [EmbeddingBagCollectionSharder()]
    DistributedModelParallel(build(CELL.spec), plan=planned(), sharders=sharders)


def tracked(cell: Cell) -> None:
    """Start TorchRec's tracker for looked up ids."""
    shard(cell).init_torchrec_delta_tracker(DeltaTrackerConfig())


def without_rows(rank: int) -> None:
    model: Any = build(CELL.spec)
    model.ebc.embedding_bag_configs()[0].num_embeddings = 0
    plan_as_torchrec(CELL, model, make_sharder(CELL))


NO_SCALE = "moment_scale=2.0 with GradientSync, whose moments are exact; leave it at FROM_MESH or"
MOMENTS_POLICY = tdsp.WeightSync(moments_policy=tdsp.every(4))
SHORT = tdsp.WeightSync(transport=tdsp.Transport.BF16)
FP16 = ModelSpec(data_type=DataType.FP16)
AT_RANDOM = {"stochastic_rounding": True}
WITH_HOT_ROWS = Cell(ONE, hot_rows=(("t0", (0, 1)),))
Case = tuple[str, Callable[[int], object]]
"""A part of the error's text, and the rank's action."""

CONFIG_ERRORS: dict[str, Case] = {
    "a stock plan": (
        "plan is a ShardingPlan; pass Planner2D's",
        lambda rank: construct(change=lambda plan: ShardingPlan(plan.plan)),
    ),
    "different plans": (
        "the plan differs between ranks: rank 0",
        lambda rank: construct(change=lambda plan: tdsp.pin(plan, "t0", hot_rows=[rank // 2])),
    ),
    "different meshes": (
        "the plan differs between ranks: rank 0",
        lambda rank: construct(
            Cell(tdsp.Mesh2D(2, 2, RankLayout.STRIDED if rank else RankLayout.CONTIGUOUS))
        ),
    ),
    "GPUs of which only some compile kernels": (
        "whether Triton runs differs between ranks: rank 0 has True, rank 1 has False",
        with_triton_on_some,
    ),
    "different optimizers": (
        "the sharders differs between ranks",
        lambda rank: construct(
            sharder=make_sharder(replace(CELL, optimizer="sgd" if rank == 2 else "adagrad"))
        ),
    ),
    "different pooling": (
        "8 FP32, SUM of ['f0'], rank 1 has 40 x 8 ",
        lambda rank: construct(model=build(ModelSpec(pooling="mean" if rank == 1 else "sum"))),
    ),
    "different data types": (
        "x 8 FP32, SUM of ['f0'], rank 1 has 40",
        lambda rank: construct(model=build(FP16 if rank == 1 else CELL.spec)),
    ),
    "different features": (
        "SUM of ['f9']; give all ranks the same",
        lambda rank: construct(
            model=with_first_table(features=("f9",) if rank == 1 else FIRST.features)
        ),
    ),
    "different hosts": ("LOCAL_WORLD_SIZE differs between ranks", on_different_hosts),
    "different init seeds": (
        "init_seed differs between ranks: rank 0",
        lambda rank: construct(sharder=sharder_of(init_seed=rank)),
    ),
    "a text for a plan on one rank": (
        "plan is a str; pass Planner2D's",
        lambda rank: construct(change=lambda plan: "plan.json" if rank == 3 else plan),
    ),
    "no plan on one rank": (
        "whether there is a plan differs between ranks",
        lambda rank: construct(change=lambda plan: None if rank == 3 else plan),
    ),
    "a stock sharder": (
        "its sharder is EmbeddingBagCollectionSharder",
        lambda rank: construct(sharder=EmbeddingBagCollectionSharder()),
    ),
    "a kernel that fails": ("no_such_parameter", with_a_parameter_that_no_kernel_has),
    "a scale of exact moments": (NO_SCALE, lambda rank: scaled_by_sharder()),
    "a scale of exact moments in backward": (NO_SCALE, scaled_in_backward),
    "a policy for moments of SGD": (
        "that moments_policy=every(4) could sync;",
        lambda rank: construct(Cell(TWO, optimizer="sgd", sync=MOMENTS_POLICY)),
    ),
}
CONFIG_ERRORS |= {
    "a seed of no rounding": (
        "rounding_seed=3 does nothing without stochastic_rounding=True",
        lambda rank: construct(sharder=sharder_of(fused_params={"rounding_seed": 3})),
    ),
    "a bound without clipping": (
        "max_gradient=0.5 does nothing without gradient_clipping=True",
        lambda rank: construct(sharder=sharder_of(fused_params={"max_gradient": 0.5})),
    ),
    "a seed that is no number": (
        "rounding_seed='x' is no seed",
        lambda rank: construct(sharder=sharder_of(fused_params=AT_RANDOM | {"rounding_seed": "x"})),
    ),
    "seeds that differ": (
        "the sharders differs between ranks",
        lambda rank: construct(
            sharder=sharder_of(fused_params=AT_RANDOM | {"rounding_seed": rank // 2})
        ),
    ),
    "arguments in the order of another wrapper": (
        "by keyword: only module, device, plan and sharders have a place, in this order, and",
        lambda rank: cast(Any, tdsp.ModelParallel2D)(
            build(CELL.spec), None, torch.device("cpu"), planned()
        ),
    ),
    "an environment in the device's place": (
        "DistributedModelParallel's env isn't among them",
        lambda rank: tdsp.ModelParallel2D(
            build(CELL.spec), cast(Any, ShardingEnv.from_local(4, rank)), plan=planned()
        ),
    ),
}
PLAN_ERRORS: dict[str, Case] = {
    "a plan of another model": (
        "names module 'ebc', which the model doesn't have",
        lambda rank: construct(model=build(SEQUENCES)),
    ),
    "a missing table": (
        "doesn't fit its tables: missing t1",
        lambda rank: construct(change=without_t1),
    ),
    "a table of another size": (
        "table 't0' has 41 rows of 8 columns, and 40 of 8 in its plan",
        lambda rank: construct(model=with_first_table(num_rows=41)),
    ),
    "an unknown pinned table": (
        "the plan has no table 't9'; it has t0, t1, t2",
        lambda rank: pinned("t9", [0]),
    ),
    "a hot row out of range": (
        "hot row 40 of table 'ebc.t0' is out of range",
        lambda rank: construct(change=lambda plan: tdsp.pin(plan, "t0", hot_rows=[0, 40])),
    ),
    "hot rows of a data-parallel table": (
        "is data parallel, so every rank holds all its rows already",
        lambda rank: pinned("t0", [0], Cell(TWO, "data_parallel")),
    ),
    "an odd dim": (
        "table 't0' of module 'ebc' has embedding_dim=6; FBGEMM's kernels",
        lambda rank: planned(Cell(TWO, spec=ModelSpec((TableSpec("t0", 9, 6, ("f0",)),)))),
    ),
    "an odd dim with a plan by hand": (
        "need a multiple of 4, such as 8",
        lambda rank: construct(model=with_first_table(dim=6)),
    ),
    "a table without rows": ("table 't0' of module 'ebc' has 0 rows; give it at", without_rows),
}
UNSUPPORTED: dict[str, Case] = {
    "submodule_configs": (
        "doesn't take submodule_configs",
        lambda rank: construct(submodule_configs=[]),
    ),
    "sharding_strategy": (
        "doesn't take sharding_strategy",
        lambda rank: construct(sharding_strategy="fully_sharded"),
    ),
    "a tracker of raw ids": (
        "doesn't take model_tracker_configs: they track raw ids in TorchRec's own managed",
        lambda rank: construct(model_tracker_configs=ModelTrackerConfigs()),
    ),
    "a tracker beside hot rows": (
        "would miss ids of table 't0', because it has hot rows",
        lambda rank: tracked(WITH_HOT_ROWS),
    ),
    "a tracker beside hot rows, in TorchRec's wrapper": (
        "would miss ids of table 't0', because it has hot rows",
        lambda rank: tracked(replace(WITH_HOT_ROWS, stock_wrapper=True)),
    ),
    "a tracker of row exchange": (
        "would miss ids of table 't0', because it has exchange='row'",
        lambda rank: tracked(Cell(ONE, exchange="row")),
    ),
    "a tracker of tables in parts": (
        "would miss ids of module 'ebc', because its tables differ in copies, or some are frozen",
        lambda rank: tracked(Cell(TWO, in_world=("t0",))),
    ),
    "hot rows of a shared feature": (
        "looks up several tables",
        lambda rank: construct(
            Cell(TWO, spec=SHARED_FEATURE), change=lambda plan: tdsp.pin(plan, "t0", hot_rows=[0])
        ),
    ),
    "a cached kernel": (
        "compute_kernel='fused_uvm_caching'",
        lambda rank: construct(change=with_cached_kernel),
    ),
    "output types that differ": (
        "have output_dtype FP16 and FP32, but are sharded alike; give them one",
        lambda rank: construct(change=with_a_half_output),
    ),
    "an optimizer without a CPU kernel": (
        "no CPU kernel for EmbOptimType.LARS_SGD",
        lambda rank: construct(sharder=sharder_of(EmbOptimType.LARS_SGD)),
    ),
    "partial moments of a single row": (
        "has a shard of one row beside",
        lambda rank: construct(
            Cell(tdsp.Mesh2D(1, 4), spec=ONE_TABLE),
            sharder=sharder_of(EmbOptimType.PARTIAL_ROWWISE_ADAM),
        ),
    ),
    "an optimizer that needs more than gradients": (
        "from row gradients",
        lambda rank: construct(sharder=sharder_of(EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD)),
    ),
    "an average of touched rows where others change": (
        "EMAINPLACE_ROWWISE_ADAGRAD changes rows that no batch touched, which WeightSync wouldn't",
        lambda rank: construct(
            Cell(TWO, sync=tdsp.WeightSync(policy=tdsp.every(4))),
            sharder=sharder_of(EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD),
        ),
    ),
    "a lookup in two calls": (
        "ShardedEmbeddingBagCollection2D has no compute() and output_dist() of its own; call",
        lambda rank: construct().module.ebc.compute(None, None),
    ),
    "equal ids found on a CPU": (
        "use_index_dedup=True is for CUDA",
        lambda rank: construct(
            Cell(tdsp.Mesh2D(1, 4), spec=SEQUENCES),
            sharder=tdsp.EmbeddingCollectionSharder2D(EmbOptimType.EXACT_SGD, use_index_dedup=True),
        ),
    ),
    "tables in bf16 with an optimizer that has no rule": (
        "because rules on tensors update it; use FP32 or FP16, or use one of EmbOptimType.ADAM",
        lambda rank: construct(
            Cell(tdsp.Mesh2D(1, 4), spec=FP16),
            sharder=sharder_of(EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD),
            model=build(replace(FP16, data_type=DataType.BF16)),
        ),
    ),
    "tables in integers": (
        "table 't0' of module 'ebc' has data_type=<DataType.INT8: 'INT8'>, which can't be trained",
        lambda rank: construct(model=build(replace(FP16, data_type=DataType.INT8))),
    ),
    "a table that makes rows as ids come": (
        "table 't0' of module 'ebc' has use_virtual_table=True, for key-value kernels",
        lambda rank: construct(model=with_config(use_virtual_table=True)),
    ),
    "a table that was pruned for inference": (
        "table 't0' of module 'ebc' has num_embeddings_post_pruning=20, which is for inference",
        lambda rank: construct(model=with_config(num_embeddings_post_pruning=20)),
    ),
    "stochastic rounding by an optimizer without a rule": (
        "stochastic_rounding of table 't0' isn't possible with EmbOptimType.EMAINPLACE_ROWWISE",
        lambda rank: construct(
            Cell(tdsp.Mesh2D(1, 4), spec=FP16),
            sharder=sharder_of(EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD, fused_params=AT_RANDOM),
        ),
    ),
    "rows in 8 bits of a table in 16": (
        "is stored_as='int8', which isn't possible with data_type=",
        lambda rank: construct(Cell(TWO, spec=FP16, stored_as="int8")),
    ),
    "averages of rows in 8 bits": (
        "is stored_as='int8', which isn't possible with WeightSync",
        lambda rank: construct(Cell(TWO, stored_as="int8", sync=tdsp.WeightSync())),
    ),
    "rows in 8 bits by an optimizer without a rule": (
        "which isn't possible with EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD; change one",
        lambda rank: construct(
            Cell(tdsp.Mesh2D(1, 4), stored_as="int8"),
            sharder=sharder_of(EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD),
        ),
    ),
    "a short transport of short tables": (
        "table 't0' has torch.float16 values, which transport='bf16' wouldn't make smaller",
        lambda rank: construct(Cell(TWO, spec=FP16, sync=SHORT)),
    ),
    "nonempty bags of sequences": (
        "has exchange='nonempty', which is for",
        lambda rank: construct(Cell(TWO, exchange="nonempty", spec=SEQUENCES)),
    ),
    "weighted means": (
        "table 't0' averages weighted bags",
        lambda rank: planned(Cell(TWO, spec=WEIGHTED_MEANS)),
    ),
    "weighted means with a plan of sums": (
        "averages weighted bags",
        lambda rank: construct(model=build(WEIGHTED_MEANS)),
    ),
}
OTHER_ERRORS: dict[str, dict[str, Case]] = {
    "MeshError": {
        "a mesh of another world": (
            "has 8 ranks but the world has 4",
            lambda rank: construct(
                change=lambda plan: tdsp.Plan2D.from_stock(plan, tdsp.Mesh2D(4, 2))
            ),
        )
    },
    "ValueError": {"a stock wrapper and sharder": ("2d_row_wise", by_torchrec_alone)},
}
CASES = {
    name: (kind, *case)
    for kind, cases in (
        ("ConfigError", CONFIG_ERRORS),
        ("PlanError", PLAN_ERRORS),
        ("UnsupportedError", UNSUPPORTED),
        *OTHER_ERRORS.items(),
    )
    for name, case in cases.items()
}


def raised(rank: int, world_size: int, name: str) -> tuple[str, float]:
    """Return a case's error on this rank, and the seconds that it took."""
    start, (_, _, act) = time.monotonic(), CASES[name]
    return error_of(lambda: act(rank)), time.monotonic() - start


@pytest.mark.parametrize("name", CASES)
def test_every_rank_raises_the_same_error_within_seconds(ranks4: RankPool, name: str) -> None:
    kind, part, _ = CASES[name]
    texts, seconds = zip(*ranks4.run(raised, name, timeout_s=30), strict=True)
    assert len(set(texts)) == 1, texts
    assert texts[0].startswith(f"{kind}: "), texts
    assert part in texts[0]
    assert max(seconds) < MAX_SECONDS


def test_a_mesh_needs_a_process_group() -> None:
    with pytest.raises(tdsp.errors.MeshError, match=r"call torch\.distributed\.init_process_group"):
        tdsp.ModelParallel2D(build(ModelSpec()), plan=None, sharders=[])
