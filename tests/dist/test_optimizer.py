"""Fused optimizers under the sharders: every way to set one, and schedulers' view of it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import torchrec_2dsp as tdsp
from tests.support.devices import KERNEL_ROUNDING, on_gpus, rank_device
from tests.support.loop_oracles import Emulation
from tests.support.loops import (
    Stream,
    Tensors,
    entries,
    largest_gap,
    make_stream,
    plain_loop,
    shard,
    snapshot,
)
from tests.support.models import HOT_ROWS, SEQUENCES, build, tables_of
from tests.support.parity import (
    EPS,
    LR,
    TWO,
    Cell,
    compare,
    local_shards,
    make_optimizer,
    make_oracle,
)
from tests.support.ranks import RankPool, error_of
from tests.support.trips import make_stock, stock
from torchrec_2dsp._compat.ddp import gradient_order, start_in_order
from torchrec_2dsp._compat.fbgemm import EmbOptimType
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer
from torchrec_2dsp.shard.parted import sharded_tables

AVERAGED = Cell(TWO, sync=tdsp.WeightSync())
EXACT = Cell(TWO)
SEQUENCE = replace(AVERAGED, spec=SEQUENCES)
STEPS = 4

ROUNDING = 1e-6
"""The emulation adds and scales in another order: some float32 roundings below 1."""


KINDS = (tdsp.EmbeddingBagCollectionSharder2D, tdsp.EmbeddingCollectionSharder2D)


def sharder_of(cell: Cell, optimizer: Any = None, **options: Any) -> Any:
    return KINDS[cell.spec.sequence](optimizer, **options)


def moment_scaled(**options: Any) -> tdsp.MomentScaledRowWiseAdaGrad:
    return tdsp.MomentScaledRowWiseAdaGrad(**{"lr": LR, "eps": EPS, **options})


def train_scaled(rank: int, world_size: int, cell: Cell, scale: float) -> float:
    """Train with `MomentScaledRowWiseAdaGrad` on the sharder; return the gap to the emulation."""
    parallel = shard(cell, sharder_of(cell, moment_scaled(moment_scale=scale)))
    emulation = emulate(cell, scale)
    stream = make_stream(cell, STEPS)
    plain_loop(parallel, make_optimizer(parallel), [step[rank] for step in stream])
    for batches in stream:
        emulation.step(batches)
    return compare(parallel, emulation.groups[0]).worst


def emulate(cell: Cell, scale: Any = None) -> Emulation:
    """Train the cell as `MomentScaledRowWiseAdaGrad` defines it; exact sync is one group."""
    if isinstance(cell.sync, tdsp.GradientSync):
        return Emulation(replace(cell, mesh=tdsp.Mesh2D(1, 4)), 1.0)
    return Emulation(cell, scale or float(cell.mesh.num_groups))


@pytest.mark.dealt_file
def test_any_moment_scale_is_the_algorithms(ranks4: RankPool) -> None:
    """Random cases cover the number of groups as the scale, hot rows and exact moments."""
    assert max(ranks4.run(train_scaled, AVERAGED, 3.7)) < ROUNDING


Way = Callable[[Cell], tuple[nn.Module, Any]]
"""A model and its sharder, which together name an optimizer."""


def by_sharder(optimizer: Any = None, **options: Any) -> Way:
    return lambda cell: (build(cell.spec), sharder_of(cell, optimizer, **options))


def in_backward(optimizer: Any, **options: Any) -> Way:
    def way(cell: Cell) -> tuple[nn.Module, Any]:
        model = build(cell.spec)
        apply_optimizer_in_backward(optimizer, tables_of(model).parameters(), options)
        return model, sharder_of(cell)

    return way


OUR_CLASS = MomentScaledRowWiseAdaGradOptimizer
ROW_WISE, SGD = EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_SGD
RATES = {"learning_rate": LR, "eps": EPS}
WAYS = {
    "moment scaled, default eps": [
        by_sharder(tdsp.MomentScaledRowWiseAdaGrad(lr=LR, moment_scale=3.0)),
        in_backward(OUR_CLASS, lr=LR, moment_scale=3.0),
    ],
    "moment scaled, from the mesh": [
        by_sharder(moment_scaled(moment_scale=2.0)),
        by_sharder(moment_scaled()),
        in_backward(OUR_CLASS, lr=LR, eps=EPS),
    ],
    "row-wise AdaGrad": [
        by_sharder(ROW_WISE, fused_params=RATES),
        by_sharder(fused_params={"optimizer": ROW_WISE, **RATES}),
        by_sharder(moment_scaled(moment_scale=1.0)),
        in_backward(RowWiseAdagrad, lr=LR, eps=EPS),
    ],
    "SGD": [
        by_sharder(SGD, fused_params={"learning_rate": LR}),
        in_backward(torch.optim.SGD, lr=LR),
    ],
}
"""Ways to say the same."""


def all_ways(rank: int, world_size: int, cell: Cell) -> dict[str, list[float]]:
    """Return each way's largest difference from the first one."""
    stream = make_stream(cell, 2)
    gaps = {}
    for name, same in WAYS.items():
        trained = [train_way(rank, cell, way, stream) for way in same]
        gaps[name] = [largest_gap(other, trained[0]) for other in trained[1:]]
    return gaps


def train_way(rank: int, cell: Cell, way: Way, stream: Stream) -> Tensors:
    model, sharder = way(cell)
    params = list(tables_of(model).parameters())
    before = attributes(params)
    parallel = shard(cell, sharder, model)
    assert attributes(params) == before
    plain_loop(parallel, make_optimizer(parallel), [step[rank] for step in stream])
    return snapshot(parallel)


def attributes(params: list[nn.Parameter]) -> list[tuple[Any, Any]]:
    """Copy the attributes that apply_optimizer_in_backward left on the parameters."""
    return [
        (
            list(getattr(param, "_optimizer_classes", [])),
            [dict(kwargs) for kwargs in getattr(param, "_optimizer_kwargs", [])],
        )
        for param in params
    ]


@pytest.mark.dealt
@pytest.mark.parametrize("cell", [AVERAGED, SEQUENCE], ids=str)
def test_every_way_is_the_same_bit_for_bit(ranks4: RankPool, cell: Cell) -> None:
    for gaps in ranks4.run(all_ways, cell):
        for name, same in WAYS.items():
            assert len(gaps[name]) == len(same) - 1
            assert max(gaps[name]) <= KERNEL_ROUNDING, gaps


def scheduled(rank: int, world_size: int, cell: Cell) -> tuple[list[float], float]:
    """Return the rates that a scheduler sees before it sets the next one, and the gap."""
    parallel = shard(cell, sharder_of(cell, moment_scaled()))
    fused, optimizer = parallel.fused_optimizer, make_optimizer(parallel)
    emulation, stream, seen = emulate(cell), make_stream(cell, STEPS), []

    def next_rate(step: int) -> None:
        seen.extend({group["lr"] for group in fused.param_groups})
        for group in optimizer.param_groups:
            group["lr"] = LR / (1 + step)  # type: ignore[index]

    plain_loop(parallel, optimizer, [step[rank] for step in stream], before_step=next_rate)
    for step, batches in enumerate(stream):
        emulation.set(lr=LR / (1 + step))
        emulation.step(batches)
    return seen, compare(parallel, emulation.groups[0]).worst


@pytest.mark.dealt_file
@pytest.mark.parametrize(
    "cell",
    [
        AVERAGED,
        EXACT,
        replace(EXACT, hot_rows=HOT_ROWS),
        # Table-wise: a rank without a hot table's shard learns the rate from the others.
        replace(AVERAGED, hot_rows=HOT_ROWS, sharding="table_wise"),
        SEQUENCE,
    ],
    ids=str,
)
def test_schedulers_see_and_set_the_users_units(ranks4: RankPool, cell: Cell) -> None:
    for seen, gap in ranks4.run(scheduled, cell):
        # Without a scale the kernel itself has the rate, in float32.
        if seen:  # A rank may hold no table.
            assert seen == pytest.approx([LR, LR, LR / 2, LR / 3], rel=1e-7)
        assert gap < ROUNDING


def new_hyper_parameters(rank: int, world_size: int, cell: Cell) -> float:
    parallel = shard(cell, sharder_of(cell, moment_scaled()))
    optimizer, emulation = make_optimizer(parallel), emulate(cell)
    for eps, batches in zip((EPS, 0.5, 0.1), make_stream(cell, 3), strict=True):
        parallel.fused_optimizer.update_hyper_parameters({"eps": eps})
        emulation.set(eps=eps)
        plain_loop(parallel, optimizer, [batches[rank]])
        emulation.step(batches)
    return compare(parallel, emulation.groups[0]).worst


@pytest.mark.dealt_file
def test_a_running_kernel_takes_the_users_eps(ranks4: RankPool) -> None:
    for cell in (AVERAGED, replace(EXACT, hot_rows=HOT_ROWS), replace(AVERAGED, hot_rows=HOT_ROWS)):
        assert max(ranks4.run(new_hyper_parameters, cell)) < ROUNDING


def with_a_set_step(rank: int, world_size: int, cell: Cell, folder: Path) -> tuple[float, str]:
    """Resume from a checkpoint without a train state; return the gap, and a refusal's text."""
    batches = [step[rank] for step in make_stream(cell, 4)]
    parallel, resumed = shard(cell), shard(cell)
    optimizer = make_optimizer(parallel)
    plain_loop(parallel, optimizer, batches[:3])
    tdsp.save_checkpoint(folder, parallel, optimizer)
    plain_loop(parallel, optimizer, batches[3:])
    optimizer = make_optimizer(resumed)
    tdsp.load_checkpoint(folder, resumed, optimizer)
    resumed.fused_optimizer.set_optimizer_step(3)
    plain_loop(resumed, optimizer, batches[3:])
    decay = partial(resumed.fused_optimizer.update_hyper_parameters, {"weight_decay": 0.1})
    return largest_gap(snapshot(parallel), snapshot(resumed)), error_of(decay)


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_a_step_that_is_set_counts(ranks2: RankPool, tmp_path: Path, optimizer: str) -> None:
    cell = Cell(tdsp.Mesh2D(1, 2), "row_wise", optimizer=optimizer)
    for gap, refused in ranks2.run(with_a_set_step, cell, tmp_path / "3"):
        assert gap == 0.0
        # Row-wise AdaGrad's updates were arranged for no decay.
        assert ("weight_decay=0.1 can't be set while these tables" in refused) == (
            optimizer != "adam"
        )


def rates_after_an_update(rank: int, world_size: int, cell: Cell) -> list[float]:
    parallel = shard(cell, sharder_of(cell, moment_scaled()))
    parallel.fused_optimizer.update_hyper_parameters({"lr": 0.3})
    batches = [step[rank] for step in make_stream(cell, 2)]
    plain_loop(parallel, make_optimizer(parallel), batches)
    kernels = [kernel for part in sharded_tables(parallel) for kernel in part.kernels()]
    rates = [kernel.user_learning_rate for kernel in kernels]
    for group in parallel.fused_optimizer.param_groups:
        group["lr"] = 0.2  # type: ignore[index]
    parallel.eval()(batches[0])
    return rates + [kernel.user_learning_rate for kernel in kernels]


def test_an_updated_rate_stays_and_one_that_is_set_reaches_a_backward_in_eval_mode(
    ranks4: RankPool,
) -> None:
    for rates in ranks4.run(rates_after_an_update, AVERAGED):
        num_kernels = len(rates) // 2
        assert rates == pytest.approx([0.3] * num_kernels + [0.2] * num_kernels)
        assert rates


def into_stock(rank: int, world_size: int, cell: Cell, folder: str) -> list[float]:
    """Train, save and load into stock TorchRec; return this rank's gaps in tables and moments."""
    parallel = shard(cell, sharder_of(cell, moment_scaled()))
    emulation, stream = emulate(cell), make_stream(cell, STEPS)
    plain_loop(parallel, make_optimizer(parallel), [step[rank] for step in stream])
    for batches in stream:
        emulation.step(batches)
    alone = make_stock(stock("table_wise", spec=cell.spec))
    ours, theirs = entries(parallel), entries(alone)
    # Table-wise, a stock TorchRec rank shows only its own tables' state.
    assert {name: ours[name].size() for name in theirs} == {
        name: value.size() for name, value in theirs.items()
    }
    checkpoint.save(ours, checkpoint_id=folder)
    checkpoint.load(theirs, checkpoint_id=folder)
    expected = emulation.groups[0]
    moments = {name: value for name, value in theirs.items() if "/" in name}
    return [compare(alone, expected).weight] + [
        (local.cpu() - expected.moments[name.split("/")[1].split(".")[0]][:, 0]).abs().max().item()
        for name, value in moments.items()
        for local, _ in local_shards(value)
    ]


@pytest.mark.dealt
@pytest.mark.parametrize("cell", [AVERAGED, replace(EXACT, hot_rows=HOT_ROWS)], ids=str)
def test_stock_row_wise_adagrad_loads_the_state(
    ranks4: RankPool, cell: Cell, tmp_path: Path
) -> None:
    answers = ranks4.run(into_stock, cell, str(tmp_path))
    assert sum(len(gaps) - 1 for gaps in answers) == len(cell.spec.tables)
    assert max(map(max, answers)) < ROUNDING


def hooked(rank: int, world_size: int, kind: str) -> tuple[list[bool], list[bool], int]:
    """Compare a DDP's gradients after a resume at step 4, in default and in the earlier order."""
    calls: list[int] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(1)
        return allreduce_hook(cast(Any, state), bucket)

    def make() -> DistributedDataParallel:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5), nn.Linear(5, 1))
        ddp = DistributedDataParallel(
            layers.to(rank_device()),
            static_graph=kind != "dynamic",
            bucket_cap_mb=1e-4,
            gradient_as_bucket_view=True,
        )
        if kind == "hook":
            ddp.register_comm_hook(None, hook)
        if kind == "builtin":
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        return ddp

    def gradients(ddp: DistributedDataParallel, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        ddp.zero_grad()
        ddp(torch.randn(6, 7, generator=generator).to(rank_device())).square().mean().backward()
        return torch.cat([cast(Any, param.grad).flatten() for param in ddp.parameters()])

    through = make()
    expected = [gradients(through, step) for step in range(8)]
    order = gradient_order(through)
    assert order is not None
    assert order[0].startswith("3.")
    plain, ordered = make(), make()
    gradients(ordered, 50)
    assert gradient_order(ordered) is None
    assert not start_in_order(ordered, order[1:])
    assert start_in_order(ordered, order)
    assert gradient_order(ordered) == order
    as_new = [torch.equal(gradients(plain, step), expected[step]) for step in range(4, 8)]
    calls.clear()
    going_on = [torch.equal(gradients(ordered, step), expected[step]) for step in range(4, 8)]
    return as_new, going_on, len(calls)


@pytest.mark.parametrize("kind", ["static", "dynamic", "hook", "builtin"])
def test_ddp_goes_on_in_its_order_and_keeps_its_hook(ranks4: RankPool, kind: str) -> None:
    for plain, ordered, num_calls in ranks4.run(hooked, kind):
        assert ordered == [True] * 4
        # NCCL's tree adds up all of a bucket's elements in one order, wherever they are.
        assert on_gpus() or not all(plain)
        # Two buckets in each step.
        assert num_calls == (8 if kind == "hook" else 0)


def with_rates_of_their_own(rank: int, world_size: int, cell: Cell) -> float:
    """Train tables with different rates, which a schedule halves midway."""
    model, oracle = build(cell.spec), make_oracle(cell)
    for number, (name, table) in enumerate(tables_of(model).items(), 1):
        oracle.rates[name] = LR * number
        options = {"lr": LR * number, **({} if cell.optimizer == "sgd" else {"eps": EPS})}
        apply_optimizer_in_backward(CLASSES[cell.optimizer], table.parameters(), options)
    parallel = shard(cell, sharder_of(cell), model)
    optimizer = make_optimizer(parallel)
    scheduler = torch.optim.lr_scheduler.StepLR(cast(Any, parallel.fused_optimizer), 2, gamma=0.5)
    for step, batches in enumerate(make_stream(cell, STEPS), 1):
        plain_loop(parallel, optimizer, [batches[rank]])
        oracle.step(batches)
        scheduler.step()
        if step == 2:
            oracle.rates = {name: rate / 2 for name, rate in oracle.rates.items()}
    return compare(parallel, oracle).worst


CLASSES = {"sgd": torch.optim.SGD, "rowwise_adagrad": RowWiseAdagrad}


@pytest.mark.dealt_file
@pytest.mark.parametrize("optimizer", CLASSES)
def test_each_table_has_a_rate_of_its_own(ranks4: RankPool, optimizer: str) -> None:
    ways = [{}, {"exchange": "row"}, {"hot_rows": HOT_ROWS}, {"sharding": "table_wise"}]
    ways += [{"sharding": "column_wise"}, {"sharding": "data_parallel"}, {"spec": SEQUENCES}]
    for way in ways:
        cell = replace(EXACT, optimizer=optimizer, **cast(Any, way))
        assert max(ranks4.run(with_rates_of_their_own, cell)) < ROUNDING, cell
