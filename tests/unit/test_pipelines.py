"""Pipelines without ranks: cuts into stages, compared with all cuts, and schedules."""

import copy
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any, cast

import pytest
import torch
from hypothesis import given, strategies as st
from pydantic import TypeAdapter
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

import torchrec_2dsp as tdsp
from torchrec_2dsp.dense.pipelined.layer_stack import measure_layers
from torchrec_2dsp.dense.pipelined.schedule import SCHEDULES, Schedule, Work, WorkKind
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import DenseMesh
from torchrec_2dsp.plan.dense_plan import DenseKind, DensePlan, check_cuts, cut_layers, even_cuts
from torchrec_2dsp.programs.config.dense import (
    DensePartConfig,
    PipelinedConfig,
    TensorParallelConfig,
)
from torchrec_2dsp.programs.models import dense
from torchrec_2dsp.programs.models.dense import Layered


def slowest(cuts: tuple[int, ...], seconds: list[float], sizes: list[float], rate: float) -> float:
    """Return the slowest stage's time."""
    stages = []
    for first, last in pairwise((0, *cuts, len(seconds))):
        sent = sizes[last - 1] if last < len(seconds) else 0.0
        returned = sizes[first - 1] if first else 0.0
        stages.append(sum(seconds[first:last]) + rate * (sent + returned))
    return max(stages)


NUMBERS = st.floats(0, 10, allow_nan=False)


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.1, 1.0]),
)
def test_no_other_cuts_have_a_faster_slowest_stage(
    layers: list[tuple[float, float]], num_stages: int, rate: float
) -> None:
    seconds, sizes = [layer[0] for layer in layers], [layer[1] for layer in layers]
    if num_stages > len(layers):
        with pytest.raises(ConfigError, match="can't be cut into"):
            cut_layers(seconds, sizes, num_stages, rate)
        return
    cuts = cut_layers(seconds, sizes, num_stages, rate)
    assert check_cuts(cuts, len(layers), num_stages) == cuts
    best = min(
        slowest(other, seconds, sizes, rate)
        for other in combinations(range(1, len(layers)), num_stages - 1)
    )
    # Sums over the same numbers in another order.
    assert slowest(cuts, seconds, sizes, rate) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_even_cuts_differ_by_one_layer() -> None:
    assert even_cuts(8, 4) == (2, 4, 6)
    assert even_cuts(7, 3) == (3, 5)
    assert even_cuts(3, 3) == (1, 2)
    assert even_cuts(5, 1) == ()


class Square(nn.Module):
    """A squared error."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().sum(dim=1)


def test_a_wide_layer_is_measured_to_take_longer() -> None:
    """It has 2,000 times as much arithmetic as the others."""
    layers = [nn.Linear(16, 16), nn.Linear(16, 1024), nn.Linear(1024, 512), nn.Linear(512, 8)]
    stack = tdsp.LayerStack(layers, Square())
    before = {name: value.clone() for name, value in stack.state_dict().items()}
    times = measure_layers(stack, torch.rand(64, 16), [torch.rand(64, 8)])
    assert [layer.output_bytes for layer in times] == [4 * 64 * dim for dim in (16, 1024, 512, 8)]
    assert max(times, key=lambda layer: layer.backward_seconds) is times[2]
    assert all(layer.backward_seconds > 0 for layer in times)
    assert all(param.grad is None for param in stack.parameters())
    for name, value in stack.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_measurement_changes_no_statistics_and_draws_no_numbers() -> None:
    stack = tdsp.LayerStack([nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)], Square())
    before = {name: value.clone() for name, value in stack.state_dict().items()}
    inputs, generator = torch.rand(8, 4), torch.get_rng_state()
    measure_layers(stack, inputs, [inputs])
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in stack.state_dict().items())


def test_impossible_cuts_are_refused() -> None:
    errors: list[tuple[Any, str]] = [
        (lambda: check_cuts([2], 4, 3), "cuts=[2] make 2 stages, not num_stages=3; give the first"),
        (lambda: check_cuts({"stack": (1, 2)}, 4, 2), "cuts=['stack'] are no numbers of layers;"),  # type: ignore[arg-type]
        (lambda: check_cuts([2, 2], 4, 3), "cuts=[2, 2] leave a stage without layers; give"),
        (lambda: check_cuts([0, 2], 4, 3), "cuts=[0, 2] leave a stage without layers; give"),
        (lambda: even_cuts(3, 4), "a LayerStack of 3 layers can't be cut into num_stages=4; use 3"),
        (lambda: cut_layers([1.0], [], 1), "there are 1 layers' seconds, but 0 layers' activation"),
        (lambda: cut_layers([-1.0], [1], 1), "-1.0 is no time and no size"),
    ]
    for action, text in errors:
        with pytest.raises(ConfigError) as raised:
            action()
        assert str(raised.value).startswith(text)


@pytest.mark.parametrize(
    ("dp", "tp", "pp"), [(1, 1, 1), (2, 1, 3), (2, 2, 2), (1, 4, 2), (3, 2, 1)]
)
def test_pipelines_groups_and_copies_share_out_all_ranks(dp: int, tp: int, pp: int) -> None:
    mesh = DenseMesh.for_world(dp * tp * pp, tp=tp, pp=pp)
    assert mesh == DenseMesh(dp, tp, pp)
    everyone = list(range(mesh.world_size))
    for sets, size in ((mesh.groups(), tp), (mesh.pipelines(), tp * pp), (mesh.copies(), dp)):
        assert sorted(rank for ranks in sets for rank in ranks) == everyone
        assert {len(ranks) for ranks in sets} == {size}
    for pipeline in mesh.pipelines():
        for copies in mesh.copies():
            assert len(set(pipeline) & set(copies)) == 1
        for group in mesh.groups():
            assert set(group) <= set(pipeline) or not set(group) & set(pipeline)


KINDS = [
    (name, count)
    for name, allowed in SCHEDULES.items()
    for count in ((allowed,) if allowed else (1, 2, 3))
]


def schedules_of(name: str, stages_per_rank: int) -> list[Schedule]:
    """Return all small schedules that exist."""
    schedules = []
    for num_ranks in (1, 2, 3, 4):
        for num_micro_batches in (1, 2, 3, 4, 6, 8, 12):
            with suppress(ConfigError):
                schedules.append(
                    Schedule(name, num_ranks * stages_per_rank, num_micro_batches, stages_per_rank)
                )
    return schedules


def needs(work: Work, num_stages: int) -> set[tuple[str, int, int]]:
    """Return all inputs of a piece of work."""
    stage, number = work.stage, work.micro_batch
    if work.kind is WorkKind.FORWARD:
        return {("activation", stage, number)} if stage else set()
    if work.kind is WorkKind.WEIGHT_GRADIENT:
        return {("weights due", stage, number)}
    gradient = {("gradient", stage, number)} if stage < num_stages - 1 else set()
    return {("graph", stage, number)} | gradient


def gives(work: Work) -> set[tuple[str, int, int]]:
    """Return all outputs of a piece of work."""
    stage, number = work.stage, work.micro_batch
    if work.kind is WorkKind.FORWARD:
        return {("graph", stage, number), ("activation", stage + 1, number)}
    if work.kind is WorkKind.WEIGHT_GRADIENT:
        return set()
    due = {("weights due", stage, number)} if work.kind is WorkKind.INPUT_GRADIENT else set()
    return {("gradient", stage - 1, number)} | due


@pytest.mark.parametrize(("name", "stages_per_rank"), KINDS)
def test_no_rank_waits_forever(name: str, stages_per_rank: int) -> None:
    schedules = schedules_of(name, stages_per_rank)
    assert len(schedules) > 5
    for schedule in schedules:
        there: set[tuple[str, int, int]] = set()
        places = [0] * schedule.num_ranks
        has_moved = True
        while has_moved:
            has_moved = False
            for rank, order in enumerate(schedule.work):
                while places[rank] < len(order):
                    if not needs(order[places[rank]], schedule.num_stages) <= there:
                        break
                    there |= gives(order[places[rank]])
                    places[rank] += 1
                    has_moved = True
        assert places == [len(order) for order in schedule.work], schedule


@pytest.mark.parametrize(("name", "stages_per_rank"), KINDS)
def test_each_piece_of_work_is_done_once(name: str, stages_per_rank: int) -> None:
    for schedule in schedules_of(name, stages_per_rank):
        for rank, order in enumerate(schedule.work):
            assert len(set(order)) == len(order)
            for stage in schedule.stages_of(rank):
                for number in range(schedule.num_micro_batches):
                    kinds = {
                        work.kind.value
                        for work in order
                        if (work.stage, work.micro_batch) == (stage, number)
                    }
                    assert kinds in ({"F", "B"}, {"F", "I", "W"}), (schedule, stage, number)
            assert {work.stage for work in order} == set(schedule.stages_of(rank))


def test_1f1b_keeps_as_many_micro_batches_as_stages_follow() -> None:
    schedule = Schedule("1F1B", num_stages=4, num_micro_batches=8)
    for rank, order in enumerate(schedule.work):
        alive = most = 0
        for work in order:
            alive += 1 if work.kind is WorkKind.FORWARD else -1
            most = max(most, alive)
        assert most == 4 - rank


def test_impossible_schedules_are_refused() -> None:
    for arguments, text in (
        (
            ("Rail", 2, 2),
            "schedule='Rail' is unknown; use one of 'GPipe', '1F1B', 'Interleaved1F1B'",
        ),
        (("1F1B", 0, 2), "num_stages=0 is no count; use 1 or more"),
        (("1F1B", 4, 2, 2), "1F1B doesn't run 2 stages on a rank; use stages_per_rank=1"),
        (("Interleaved1F1B", 5, 2, 2), "num_stages=5 isn't a multiple of stages_per_rank=2"),
        (
            ("DualPipeV", 4, 2, 2),
            "DualPipeV can't run 4 stages, 2 on each rank, with num_micro_batches=2; use one of 4",
        ),
    ):
        with pytest.raises(ConfigError) as raised:
            Schedule(*arguments)  # type: ignore[arg-type]
        assert str(raised.value).startswith(text)


LAYERED = Layered(
    stack=tdsp.LayerStack([nn.Linear(4, 4), nn.Linear(4, 4)], nn.MSELoss(reduction="none")),
    name="stack",
    units=(),
    tensor_plan={"stack.layers.0": ColwiseParallel()},
    sample=lambda num_samples: (torch.rand(num_samples, 4), [torch.rand(num_samples, 4)]),
)


@pytest.fixture(params=[False, True], ids=["config", "plan"])
def asked(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Record the settings of the last wrapper that a program builds."""
    settings: dict[str, Any] = {}
    for name in (
        *("FullyShardedDense", "TensorParallelDense", "PipelinedDense"),
        "DefaultDataParallelWrapper",
    ):
        monkeypatch.setattr(dense, name, lambda *_, **options: settings.update(options))
    settings["is_planned"] = request.param
    return settings


def make(
    asked: dict[str, Any], kind: str, mesh: DenseMesh, *, static_graph: bool = True, **options: Any
) -> None:
    """Build a wrapper from a config, or from a plan."""
    if asked["is_planned"]:
        cuts = (1,) * (mesh.pp - 1)
        plan = DensePlan(kind=DenseKind(kind), mesh=mesh, cuts=cuts, **options)
        dense.wrapper_of(plan, LAYERED, static_graph=static_graph)
    else:
        tree = {"kind": kind} | ({"tp": mesh.tp} if mesh.tp > 1 else {}) | options
        config = TypeAdapter(DensePartConfig).validate_python(tree)
        dense.dense_wrapper(config, LAYERED, static_graph=static_graph)


def test_layers_are_measured_on_the_device_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the meta device standing for a GPU, all layers and exchanged numbers are on it."""
    layered = replace(LAYERED, stack=copy.deepcopy(LAYERED.stack))
    summed: list[str] = []

    def all_reduce(seconds: torch.Tensor, group: object) -> None:
        summed.append(seconds.device.type)

    monkeypatch.setattr(dense, "group_device", lambda group: torch.device("meta"))
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda seconds: torch.ones(seconds.shape))
    work = layered.work(8, cast(Any, None), state_per_weight=0.0)
    assert summed == [param.device.type for param in layered.stack.parameters()][:1] == ["meta"]
    assert [layer.parameter_bytes for layer in work.layers] == [80, 80]


@pytest.mark.parametrize(
    ("kind", "mesh", "options"),
    [
        ("ddp", DenseMesh.for_world(8), {"static_graph": False}),  # Of accumulated batches.
        ("tensor_parallel", DenseMesh.for_world(8, tp=2), {"num_copies": 4}),
        ("fully_sharded", DenseMesh.for_world(8), {"num_copies": 2}),
        ("pipelined", DenseMesh.for_world(8, pp=2), {"fully_shard": False}),
        ("pipelined", DenseMesh.for_world(8, pp=2), {"fully_shard": True}),
    ],
)
def test_wrappers_are_built_as_config_or_plan_say(
    asked: dict[str, Any], kind: str, mesh: DenseMesh, options: dict[str, Any]
) -> None:
    make(asked, kind, mesh, **options)
    assert options.items() <= asked.items()
    assert asked.get("tp", 1) == mesh.tp


def test_contestants_say_how_layers_are_shared() -> None:
    split = TensorParallelConfig(tp=2, num_copies=4)
    assert split.text == "layers split over 2 ranks, in 4 copies"
    assert PipelinedConfig(fully_shard=True).text == (
        "2 stages, 1F1B, 8 micro-batches, contiguous, sharded"
    )
