"""Bad input raises the same typed error on every rank within seconds."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType

import torchrec_2dsp as tdsp
from tests.support.cells import plan_as_torchrec
from tests.support.models import SEQUENCES, Model, ModelSpec, TableSpec, build, tables_of
from tests.support.parity import TWO, Cell, group_plan, local_world_size, make_sharder
from tests.support.ranks import RankPool
from torchrec_2dsp._compat.fbgemm import EmbOptimType
from torchrec_2dsp.mesh import RankLayout
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer

MAX_SECONDS = 5.0
CELL = Cell(TWO)
WEIGHTED_MEANS = ModelSpec(pooling="mean", weighted=True)


def raised(rank: int, world_size: int, case: str) -> tuple[str, str, float]:
    """Return the error of a case on this rank, and its seconds."""
    start = time.monotonic()
    try:
        CASES[case][0](rank)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


def planned(cell: Cell = CELL) -> tuple[Model, Any, tdsp.Plan2D]:
    model = build(cell.spec)
    sharder = make_sharder(cell)
    return model, sharder, group_plan(cell, model, sharder, local_world_size())


def construct(model: Model, sharder: Any, plan: Any, **options: Any) -> None:
    tdsp.ModelParallel2D(model, plan=plan, sharders=[sharder], **options)


def mesh_of_another_world(rank: int) -> None:
    model, sharder, plan = planned()
    construct(model, sharder, tdsp.Plan2D.from_stock(plan, tdsp.Mesh2D(4, 2)))


def stock_plan(rank: int) -> None:
    model, sharder, plan = planned()
    construct(model, sharder, ShardingPlan(plan.plan))


def plan_of_another_model(rank: int) -> None:
    _, sharder, plan = planned()
    construct(build(SEQUENCES), sharder, plan)


def plan_with_missing_table(rank: int) -> None:
    model, sharder, plan = planned()
    del plan.plan["ebc"]["t1"]  # type: ignore[attr-defined]
    construct(model, sharder, plan)


def ranks_with_different_plans(rank: int) -> None:
    model, sharder, plan = planned()
    construct(model, sharder, tdsp.pin(plan, "t0", hot_rows=[rank // 2]))


def ranks_with_different_meshes(rank: int) -> None:
    layout = RankLayout.STRIDED if rank else RankLayout.CONTIGUOUS
    model, sharder, plan = planned(replace(CELL, mesh=tdsp.Mesh2D(2, 2, layout)))
    construct(model, sharder, plan)


def ranks_with_different_optimizers(rank: int) -> None:
    model, _, plan = planned()
    sharder = make_sharder(replace(CELL, optimizer="sgd" if rank == 2 else "adagrad"))
    construct(model, sharder, plan)


def ranks_with_different_pooling(rank: int) -> None:
    _, sharder, plan = planned()
    construct(build(ModelSpec(pooling="mean" if rank == 1 else "sum")), sharder, plan)


def ranks_with_different_data_types(rank: int) -> None:
    _, sharder, plan = planned()
    data_type = DataType.FP16 if rank == 1 else DataType.FP32
    construct(build(ModelSpec(data_type=data_type)), sharder, plan)


def ranks_with_different_features(rank: int) -> None:
    _, sharder, plan = planned()
    first, *others = ModelSpec().tables
    features = ("f9",) if rank == 1 else first.features
    construct(build(ModelSpec(tables=(replace(first, features=features), *others))), sharder, plan)


def ranks_with_different_hosts(rank: int) -> None:
    model, sharder, plan = planned()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2" if rank == 1 else "4")
        construct(model, sharder, plan)


def one_rank_with_a_bad_plan(rank: int) -> None:
    model, sharder, plan = planned()
    construct(model, sharder, "plan.json" if rank == 3 else plan)


def one_rank_without_a_plan(rank: int) -> None:
    model, sharder, plan = planned()
    construct(model, sharder, None if rank == 3 else plan)


def stock_sharder(rank: int) -> None:
    model, _, plan = planned()
    construct(model, EmbeddingBagCollectionSharder(), plan)


def stock_wrapper_and_sharder(rank: int) -> None:
    model, _, plan = planned()
    DistributedModelParallel(model, plan=plan, sharders=[EmbeddingBagCollectionSharder()])  # type: ignore[list-item]


def submodule_configs(rank: int) -> None:
    model, sharder, plan = planned()
    construct(model, sharder, plan, submodule_configs=[])


def sharding_strategy(rank: int) -> None:
    model, sharder, plan = planned()
    construct(model, sharder, plan, sharding_strategy="fully_sharded")


def unknown_pinned_table(rank: int) -> None:
    _, _, plan = planned()
    tdsp.pin(plan, "t9", hot_rows=[0])


def hot_row_out_of_range(rank: int) -> None:
    _, _, plan = planned()
    tdsp.pin(plan, "t0", hot_rows=[0, 40])


def hot_rows_of_a_data_parallel_table(rank: int) -> None:
    _, _, plan = planned(Cell(TWO, "data_parallel"))
    tdsp.pin(plan, "t0", hot_rows=[0])


def hot_rows_of_a_shared_feature(rank: int) -> None:
    tables = (TableSpec("t0", 40, 8, ("f0",)), TableSpec("t1", 24, 8, ("f0",)))
    model = build(ModelSpec())
    sharder = make_sharder(CELL)
    cell = Cell(TWO, spec=ModelSpec(tables=tables))
    model = build(cell.spec)
    plan = group_plan(cell, model, sharder, local_world_size())
    construct(model, sharder, tdsp.pin(plan, "t0", hot_rows=[0]))


def cached_kernel(rank: int) -> None:
    model, sharder, plan = planned()
    table = plan.plan["ebc"]["t0"]  # type: ignore[index]
    plan.plan["ebc"]["t0"] = replace(table, compute_kernel="fused_uvm_caching")  # type: ignore[index]
    construct(model, sharder, plan)


def optimizer_without_cpu_kernel(rank: int) -> None:
    model, _, plan = planned()
    construct(model, tdsp.EmbeddingBagCollectionSharder2D(EmbOptimType.LARS_SGD), plan)


def partial_moments_of_a_single_row(rank: int) -> None:
    model, _, plan = planned(
        Cell(tdsp.Mesh2D(1, 4), spec=ModelSpec((TableSpec("t0", 7, 4, ("f0",)),)))
    )
    optimizer = EmbOptimType.PARTIAL_ROWWISE_ADAM
    construct(model, tdsp.EmbeddingBagCollectionSharder2D(optimizer), plan)


def optimizer_that_needs_more_than_gradients(rank: int) -> None:
    model, _, plan = planned()
    optimizer = EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD
    construct(model, tdsp.EmbeddingBagCollectionSharder2D(optimizer), plan)


def one_rank_whose_kernel_fails(rank: int) -> None:
    model, sharder, plan = planned(Cell(TWO, "table_wise"))
    sharder.fused_params["no_such_parameter"] = 1
    construct(model, sharder, plan)


def stochastic_rounding(rank: int) -> None:
    model, _, plan = planned()
    sharder = tdsp.EmbeddingBagCollectionSharder2D(fused_params={"stochastic_rounding": True})
    construct(model, sharder, plan)


def odd_dim(rank: int) -> None:
    planned(Cell(TWO, spec=ModelSpec((TableSpec("t0", 9, 6, ("f0",)),))))


def odd_dim_with_a_plan_by_hand(rank: int) -> None:
    _, sharder, plan = planned()
    tables = (replace(ModelSpec().tables[0], dim=6), *ModelSpec().tables[1:])
    construct(build(ModelSpec(tables)), sharder, plan)


def table_without_rows(rank: int) -> None:
    model = build(CELL.spec)
    model.ebc.embedding_bag_configs()[0].num_embeddings = 0  # type: ignore[union-attr]
    plan_as_torchrec(CELL, model, make_sharder(CELL))


def ranks_with_different_init_seeds(rank: int) -> None:
    model, _, plan = planned()
    construct(model, tdsp.EmbeddingBagCollectionSharder2D(init_seed=rank), plan)


def scaled(scale: Any, sync: Any) -> None:
    """Shard tables with scaled moments."""
    model, _, plan = planned(replace(CELL, sync=sync))
    rule = tdsp.MomentScaledRowWiseAdaGrad(lr=0.1, moment_scale=scale)
    construct(model, tdsp.EmbeddingBagCollectionSharder2D(rule), plan)


def scale_of_exact_moments(rank: int) -> None:
    scaled(2.0, tdsp.GradientSync())


def scales_of_exact_moments(rank: int) -> None:
    scaled(dict.fromkeys(("t0", "t1", "t2"), 2.0), tdsp.GradientSync())


def scales_of_some_tables(rank: int) -> None:
    scaled({"t0": 2.0}, tdsp.WeightSync())


def scale_of_exact_moments_in_backward(rank: int) -> None:
    model, _, plan = planned()
    options = {"lr": 0.1, "moment_scale": 2.0}
    rule = MomentScaledRowWiseAdaGradOptimizer
    _apply_optimizer_in_backward(rule, tables_of(model).parameters(), options)
    construct(model, tdsp.EmbeddingBagCollectionSharder2D(), plan)


def policy_for_moments_of_sgd(rank: int) -> None:
    sync = tdsp.WeightSync(moments_policy=tdsp.every(4))
    construct(*planned(Cell(TWO, optimizer="sgd", sync=sync)))


def short_transport_of_short_tables(rank: int) -> None:
    sync = tdsp.WeightSync(transport=tdsp.Transport.BF16)
    construct(*planned(Cell(TWO, spec=ModelSpec(data_type=DataType.FP16), sync=sync)))


def nonempty_bags_of_sequences(rank: int) -> None:
    construct(*planned(Cell(TWO, exchange="nonempty", spec=SEQUENCES)))


def weighted_means(rank: int) -> None:
    planned(replace(CELL, spec=WEIGHTED_MEANS))


def weighted_means_with_a_plan_of_sums(rank: int) -> None:
    _, sharder, plan = planned()
    construct(build(WEIGHTED_MEANS), sharder, plan)


NO_SCALE = "moment_scale=2.0 with GradientSync, whose moments are exact; leave it at FROM_MESH or"
CASES: dict[str, tuple[Callable[[int], None], str, str]] = {
    case.__name__: (case, error, text)
    for case, error, text in (
        (mesh_of_another_world, "MeshError", "has 8 ranks but the world has 4"),
        (stock_plan, "ConfigError", "plan is a ShardingPlan; pass Planner2D's"),
        (plan_of_another_model, "PlanError", "names module 'ebc', which the model doesn't have"),
        (plan_with_missing_table, "PlanError", "doesn't fit its tables: missing t1"),
        (ranks_with_different_plans, "ConfigError", "the plan differs between ranks: rank 0"),
        (ranks_with_different_meshes, "ConfigError", "the plan differs between ranks: rank 0"),
        (ranks_with_different_optimizers, "ConfigError", "the sharders differs between ranks"),
        (ranks_with_different_pooling, "ConfigError", "8 FP32, SUM of ['f0'], rank 1 has 40 x 8 "),
        (ranks_with_different_data_types, "ConfigError", "x 8 FP32, SUM of ['f0'], rank 1 has 40"),
        (ranks_with_different_features, "ConfigError", "SUM of ['f9']; give all ranks the same"),
        (ranks_with_different_hosts, "ConfigError", "LOCAL_WORLD_SIZE differs between ranks"),
        (one_rank_with_a_bad_plan, "ConfigError", "plan is a str; pass Planner2D's"),
        (one_rank_without_a_plan, "ConfigError", "whether there is a plan differs between ranks"),
        (stock_sharder, "ConfigError", "its sharder is EmbeddingBagCollectionSharder"),
        (stock_wrapper_and_sharder, "ValueError", "2d_row_wise"),
        (submodule_configs, "UnsupportedError", "doesn't take submodule_configs"),
        (sharding_strategy, "UnsupportedError", "doesn't take sharding_strategy"),
        (unknown_pinned_table, "PlanError", "the plan has no table 't9'; it has t0, t1, t2"),
        (hot_row_out_of_range, "PlanError", "hot row 40 of table 'ebc.t0' is out of range"),
        (hot_rows_of_a_data_parallel_table, "PlanError", "data parallel: every rank holds all"),
        (hot_rows_of_a_shared_feature, "UnsupportedError", "looks up several tables"),
        (cached_kernel, "UnsupportedError", "compute_kernel='fused_uvm_caching'"),
        (
            optimizer_without_cpu_kernel,
            "UnsupportedError",
            "no CPU kernel for EmbOptimType.LARS_SGD",
        ),
        (partial_moments_of_a_single_row, "UnsupportedError", "has a shard of one row beside"),
        (optimizer_that_needs_more_than_gradients, "UnsupportedError", "from row gradients"),
        (one_rank_whose_kernel_fails, "ConfigError", "no_such_parameter"),
        (stochastic_rounding, "UnsupportedError", "asks for stochastic_rounding"),
        (odd_dim, "PlanError", "table 't0' of module 'ebc' has embedding_dim=6; FBGEMM's kernels"),
        (odd_dim_with_a_plan_by_hand, "PlanError", "need a multiple of 4, such as 8"),
        (ranks_with_different_init_seeds, "ConfigError", "init_seed differs between ranks: rank 0"),
        (scale_of_exact_moments, "ConfigError", NO_SCALE),
        (scales_of_exact_moments, "ConfigError", NO_SCALE),
        (scale_of_exact_moments_in_backward, "ConfigError", NO_SCALE),
        (scales_of_some_tables, "ConfigError", "moment_scale has nothing for table 't1'"),
        (
            policy_for_moments_of_sgd,
            "ConfigError",
            "that moments_policy=every(4) could sync;",
        ),
        (
            short_transport_of_short_tables,
            "UnsupportedError",
            "table 't0' has torch.float16 values, which transport='bf16' wouldn't make smaller",
        ),
        (
            nonempty_bags_of_sequences,
            "UnsupportedError",
            "has exchange='nonempty', which is for",
        ),
        (weighted_means, "UnsupportedError", "table 't0' averages weighted bags"),
        (weighted_means_with_a_plan_of_sums, "UnsupportedError", "averages weighted bags"),
        (table_without_rows, "PlanError", "table 't0' of module 'ebc' has 0 rows; give it at"),
    )
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_raises_the_same_error_within_seconds(ranks4: RankPool, case: str) -> None:
    _, expected, text = CASES[case]
    results = ranks4.run(raised, case, timeout_s=30)
    kinds, texts, seconds = zip(*results, strict=True)
    assert set(kinds) == {expected}, results
    assert len(set(texts)) == 1, texts
    assert text in texts[0]
    assert max(seconds) < MAX_SECONDS


def test_a_mesh_needs_a_process_group() -> None:
    with pytest.raises(tdsp.errors.MeshError, match=r"call torch\.distributed\.init_process_group"):
        construct(build(ModelSpec()), None, None)
