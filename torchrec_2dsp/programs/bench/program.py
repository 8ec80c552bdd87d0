"""Run a benchmark: contestants in their own processes, one at a time, block by block."""

import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol

import torch
from torchrec.distributed.types import ShardingPlan

from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.cost.calibration import Calibration, processor_name
from torchrec_2dsp.cost.model import CostModel
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.workload import DenseWork, has_small_buckets, small_bucket_bytes
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.plan2d import Plan2D
from torchrec_2dsp.programs.bench.config import BenchConfig, CeilingContestant, PlannedContestant
from torchrec_2dsp.programs.bench.contestants import (
    measure_dense,
    scheduled,
    sharding_of,
    tables_work,
    workload_of,
)
from torchrec_2dsp.programs.bench.judge import judged
from torchrec_2dsp.programs.bench.machine import (
    ComputeProbe,
    describe_setting,
    foreign_load,
    keep_libraries_in_memory,
    load,
    sent_bytes,
)
from torchrec_2dsp.programs.bench.process import (
    ContestantProcess,
    Control,
    How,
    Place,
    failure_line,
    failure_report,
    join_contestant,
)
from torchrec_2dsp.programs.bench.results import (
    BenchResult,
    ContestantBlock,
    ContestantResult,
    Outcome,
)
from torchrec_2dsp.programs.bench.tracing import traced_figures
from torchrec_2dsp.programs.bench.worker import (
    LEAD_IN_STEPS,
    MeasuredPlace,
    Worker,
)
from torchrec_2dsp.programs.config.sections import ModelConfig
from torchrec_2dsp.programs.launch import keep_freed_memory
from torchrec_2dsp.programs.link_speeds import LinkSpeeds, measure_link_speeds


class BenchWatcher(Protocol):
    """An observer of a benchmark's progress; a subclass overrides the methods that it needs."""

    def speeds_measured(self, speeds: LinkSpeeds) -> None:
        """Handle the network's measured speeds."""

    def contestant_built(self, name: str, sharding: dict[str, int], dense_plan: str) -> None:
        """Handle a contestant that has trained its first steps, by a planned dense part if any."""

    def block_measured(self, name: str, block: ContestantBlock) -> None:
        """Handle a measured block."""

    def contestant_out(self, name: str, outcome: Outcome, reason: str) -> None:
        """Handle a contestant that drops out."""


class _Unwatched(BenchWatcher):
    """Observes nothing, as on ranks other than the first."""


def measured_place(config: BenchConfig, place: Place, control: Control) -> MeasuredPlace:
    """Measure links, and the model without tables, in a process that ends with it."""
    process = ContestantProcess(lambda: _Measurer(config, place))
    try:
        answer = process.ask("measure", deadline_s=config.schedule.deadline_s)
    finally:
        process.kill()
    failed = [reply for reply in control.exchange(answer) if reply.how is not How.ANSWERED]
    if failed:
        raise ConfigError(f"the network can't be measured: {failed[0].report}")
    return answer.value


@dataclass
class _Measurer:
    config: BenchConfig
    place: Place

    def measure(self) -> MeasuredPlace:
        join_contestant(self.config.schedule, len(self.config.contestants), self.place)
        speeds = measure_link_speeds(local_world_size=self.place.local_world_size)
        is_predicted = self.config.calibration and isinstance(self.config.model, ModelConfig)
        dense = measure_dense(self.config, world_group()) if is_predicted else None
        return MeasuredPlace(speeds, dense)


def predicted_steps(
    config: BenchConfig,
    plans: Mapping[str, ShardingPlan],
    dense: DenseWork | None,
    place: Place,
    ceilings: Mapping[str, float],
) -> tuple[dict[str, dict[str, float]], tuple[str, ...]]:
    """Predict the steps of contestants that train, in seconds by part; none without a calibration.

    Also return the ceilings whose steps gave the time outside the tables; without any, the model
    without its tables was timed.
    """
    if dense is None:
        return {}, ()
    tables = tables_work(config)
    costs = CostModel(Calibration.load(config.calibration), place.local_world_size)
    in_2d = {
        name: scheduled(
            plan
            if isinstance(plan, Plan2D)
            else Plan2D.from_stock(plan, Mesh2D(1, place.world_size)),
            config.planned_by(name),
        )
        for name, plan in plans.items()
    }

    in_small = has_small_buckets(config.schedule.device, place.world_size, place.local_world_size)

    def cost(plan: Plan2D, contestant: PlannedContestant, dense: DenseWork) -> StepCost:
        if in_small and contestant.kind == "parallelized" and contestant.dense.kind == "ddp":
            dense = replace(dense, bucket_bytes=small_bucket_bytes(dense.gradient_bytes))
        return costs.step_cost(plan, workload_of(contestant, tables, config.model.dim, dense))

    beside: dict[str, float] = {}
    for name, step_s in ceilings.items():
        # Keeping replicas equal is partly compute, too.
        if in_2d[name].mesh.num_groups == 1:
            of_tables = cost(in_2d[name], config.planned_by(name), DenseWork())
            rest_s = step_s - of_tables.lookup_s - of_tables.rows_s - of_tables.update_s
            if rest_s > 0:
                beside[name] = rest_s
    if beside:
        # As long as that, divided into forward and backward as before.
        scale = statistics.median(beside.values()) / (dense.forward_s + dense.backward_s)
        dense = replace(
            dense, forward_s=scale * dense.forward_s, backward_s=scale * dense.backward_s
        )
    steps = {
        name: dict(vars(cost(plan, config.planned[name], dense)))
        for name, plan in in_2d.items()
        if name in config.planned
    }
    return steps, tuple(beside)


def calibration_warning(config: BenchConfig, local_world_size: int) -> str:
    """Name the differences from the calibrated machines; empty without any."""
    if not config.calibration:
        return ""
    device = config.schedule.device
    differences = Calibration.load(config.calibration).differences(
        local_world_size=local_world_size,
        device=device,
        # Asking for a GPU's name would initialise it in this process, which forks.
        processor=processor_name(torch.device(device)) if device == "cpu" else "",
    )
    if not differences:
        return ""
    return f"{config.calibration} is of other machines: {'; '.join(differences)}"


_PATIENCE = 3.0
"""The number of deadlines for which ranks wait for each other."""


def run_bench(config: BenchConfig, watcher: BenchWatcher | None = None) -> BenchResult:
    """Measure all contestants in a config on the ranks that torchrun started.

    This process forks, so it must not have initialised `torch.distributed` or a GPU.

    Args:
        config: equal on all ranks.
        watcher: notified about the progress.

    Returns:
        The result, equal on all ranks.
    """
    place = Place(
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])),
    )
    config.check_world(place.world_size, place.local_world_size)
    if config.calibration:
        # Fail now rather than after measuring.
        Calibration.load(config.calibration).check_covers(
            world_size=place.world_size, local_world_size=place.local_world_size
        )
    interface = config.network.interface
    if interface and interface not in (present := sent_bytes()):
        raise ConfigError(
            f"network.interface={interface!r} is not here; use one of {', '.join(present)}, "
            "or leave it out"
        )
    return _Bench(config, place, watcher or _Unwatched()).run()


@dataclass
class _Runner:
    """A contestant's process on this rank, and its state, equal on all ranks."""

    name: str
    process: ContestantProcess
    outcome: Outcome = Outcome.MEASURED
    reason: str = ""
    step_s: float = 0.0
    blocks: list[ContestantBlock] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    plan: ShardingPlan | None = None


class _Bench:
    def __init__(self, config: BenchConfig, place: Place, watcher: BenchWatcher) -> None:
        self._config = config
        self._schedule = config.schedule
        self._place = place
        self._watcher = watcher
        self._control = Control(_PATIENCE * config.schedule.deadline_s)
        self._probe = ComputeProbe()
        self._runners: list[_Runner] = []

    def run(self) -> BenchResult:
        started = datetime.now(UTC)
        keep_libraries_in_memory()
        keep_freed_memory()
        try:
            place = measured_place(self._config, self._place, self._control)
            self._watcher.speeds_measured(place.speeds)
            for name in self._config.contestants:
                self._start(name, place)
            self._measure()
            for runner in self._alive():
                self._trace(runner)
                # Traces take memory, which the next one needs.
                runner.process.kill()
        finally:
            for runner in self._runners:
                runner.process.kill()
        steps, dense_from = self._predict(place)
        results = [self._result(runner, steps.get(runner.name)) for runner in self._runners]
        return judged(
            BenchResult(
                setting=describe_setting(self._config, self._place, place.speeds, started),
                reference=self._config.reference,
                contestants=tuple(results),
                dense_from=dense_from,
            ),
            self._config,
        )

    def _alive(self) -> list[_Runner]:
        return [runner for runner in self._runners if runner.outcome is Outcome.MEASURED]

    def _start(self, name: str, place: MeasuredPlace) -> None:
        process = ContestantProcess(lambda: Worker(self._config, name, self._place, place))
        runner = _Runner(name, process)
        self._runners.append(runner)
        if (built := self._ask(runner, "build")) is None:
            return
        if (warm := self._ask(runner, "warm_up")) is None:
            return
        plan, dense_plan = built[0]
        sharding = sharding_of(plan)
        runner.figures |= {"sharding": sharding, "dense_plan": dense_plan}
        runner.plan = plan
        runner.step_s = max(warm)
        self._watcher.contestant_built(name, sharding, dense_plan)

    def _measure(self) -> None:
        shuffler = random.Random(self._schedule.seed)
        for number in range(self._schedule.rounds):
            # A new order in each round: a contestant's predecessor must not matter.
            order = self._alive()
            shuffler.shuffle(order)
            for runner in order:
                self._block(runner, number)

    def _block(self, runner: _Runner, number: int) -> None:
        num_steps = round(self._schedule.block_s / runner.step_s)
        num_steps = min(max(num_steps, 1), self._schedule.max_block_steps)
        probes_s = self._control.exchange(self._probe.run())
        before = self._control.exchange(self._counters(runner))
        start = time.monotonic()  # Real seconds, however slowly time passes for ranks.
        answers = self._ask(runner, "block", num_steps)
        seconds = time.monotonic() - start
        after = self._control.exchange(self._counters(runner))
        if answers is None:
            return
        # A ceiling's ranks don't wait for each other, so no single rank's time is the step's.
        waits = not isinstance(self._config.contestants[runner.name], CeilingContestant)
        runner.step_s = max(answers) if waits else sum(answers) / len(answers)
        block = ContestantBlock(
            round=number,
            num_steps=num_steps,
            step_s=runner.step_s,
            link_bytes=self._bytes_per_step(before, after, num_steps),
            foreign_load=foreign_load(
                [counters[0] for counters in before], [counters[0] for counters in after], seconds
            ),
            probe_s=sum(probes_s) / len(probes_s),
        )
        runner.blocks.append(block)
        self._watcher.block_measured(runner.name, block)

    def _counters(self, runner: _Runner) -> Any:
        interface = self._config.network.interface
        is_first = self._place.rank % self._place.local_world_size == 0
        alive = runner.outcome is Outcome.MEASURED
        pids = [os.getpid(), runner.process.pid] if alive else [os.getpid()]
        return load(pids), sent_bytes() if interface and is_first else {}

    def _bytes_per_step(
        self, before: Sequence[Any], after: Sequence[Any], num_steps: int
    ) -> float | None:
        """Sum the bytes that all hosts sent on the counted interface, per rank and step."""
        pairs = [(a[1], b[1]) for a, b in zip(before, after, strict=True) if a[1] and b[1]]
        if not pairs:
            return None
        name, steps = self._config.network.interface, LEAD_IN_STEPS + num_steps
        sent = sum(end.get(name, 0) - start.get(name, 0) for start, end in pairs)
        return sent / (steps * self._place.world_size)

    def _trace(self, runner: _Runner) -> None:
        if (losses := self._ask(runner, "losses")) is None:
            return
        if traced := self._ask(runner, "trace"):
            figures = traced_figures(traced, self._schedule.traced_steps)
            runner.figures |= {"losses": losses[0], **figures}

    def _ask(self, runner: _Runner, method: str, *arguments: Any) -> list[Any] | None:
        """Return every rank's answer; none if the contestant is out, on all ranks alike."""
        flag = f"{runner.name}_failed"
        answer = runner.process.ask(
            method,
            *arguments,
            deadline_s=self._schedule.deadline_s,
            give_up=lambda: self._control.flag(flag),
        )
        if answer.how is not How.ANSWERED:
            self._control.raise_flag(flag)
        answers = self._control.exchange(answer)
        if all(answer.how is How.ANSWERED for answer in answers):
            # No other rank needs it any more, and the next contestant needs the cores. On a GPU it
            # may not rest: NCCL mistakes a long silence on its own threads for a failure.
            if self._schedule.device == "cpu":
                runner.process.pause()
            return [answer.value for answer in answers]
        runner.process.kill()
        late = all(answer.how in (How.LATE, How.STOPPED, How.ANSWERED) for answer in answers)
        runner.outcome = Outcome.HUNG if late else Outcome.CRASHED
        runner.reason = failure_line(method, answers)
        report = failure_report(method, answers)
        self._watcher.contestant_out(runner.name, runner.outcome, report)
        return None

    def _predict(self, place: MeasuredPlace) -> tuple[dict[str, dict[str, float]], tuple[str, ...]]:
        """Predict steps after measuring: it takes memory that processes would copy."""
        plans = {runner.name: runner.plan for runner in self._alive() if runner.plan is not None}
        ceilings = {
            runner.name: statistics.median(block.step_s for block in runner.blocks)
            for runner in self._alive()
            if isinstance(self._config.contestants[runner.name], CeilingContestant)
        }
        return predicted_steps(self._config, plans, place.dense, self._place, ceilings)

    def _result(self, runner: _Runner, predicted: dict[str, float] | None) -> ContestantResult:
        contestant = self._config.contestants[runner.name]
        return ContestantResult(
            name=runner.name,
            description=contestant.describe(),
            kind=contestant.kind,
            outcome=runner.outcome,
            reason=runner.reason,
            predicted=predicted,
            blocks=tuple(runner.blocks),
            **runner.figures,
        )
