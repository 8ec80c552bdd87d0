"""Run one contestant on one rank, in its own process."""

import itertools
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.distributed.types import ShardingPlan

from torchrec_2dsp.comms.counting import count_collectives, count_encoded
from torchrec_2dsp.comms.full_duplex import full_duplex_backend
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.cost.workload import DenseWork
from torchrec_2dsp.dense.gradient_sums import GradientReport
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
from torchrec_2dsp.programs.bench.config import BenchConfig, CeilingContestant
from torchrec_2dsp.programs.bench.contestants import Trainer, build_trainer, rank_batches
from torchrec_2dsp.programs.bench.machine import give_back_memory, peak_bytes, resident_bytes
from torchrec_2dsp.programs.bench.process import Place, join_contestant
from torchrec_2dsp.programs.bench.replay import Mode, ReplayGroup, replay_backend
from torchrec_2dsp.programs.bench.results import DenseTraffic, EncodedTraffic
from torchrec_2dsp.programs.bench.tracing import (
    Traced,
    encoded_between,
    profiled,
    row_travel_between,
)
from torchrec_2dsp.programs.launch import quiet_upstream
from torchrec_2dsp.programs.link_speeds import LinkSpeeds
from torchrec_2dsp.programs.models.dense import dense_total, thresholded_gradients
from torchrec_2dsp.programs.traces import RankSplit
from torchrec_2dsp.replicas.sync_action import SyncReason, SyncReport

_AHEAD = 3
"""Batches that the pipeline takes ahead of a step."""


class Feed(Iterator[Batch]):
    """Batches made ahead, outside the timed steps."""

    def __init__(self, batches: Iterator[Batch], *, cycle: int) -> None:
        """Take these batches; after ``cycle`` of them, start over."""
        self.cycle = cycle
        """The number of distinct batches; 0 if all differ."""
        self._batches = itertools.cycle(islice(batches, cycle)) if cycle else batches
        self._ready: deque[Batch] = deque()

    def prepare(self, num_steps: int) -> None:
        """Make enough batches for these steps, prefetched batches included."""
        while len(self._ready) < num_steps + _AHEAD:
            self._ready.append(next(self._batches))

    def __next__(self) -> Batch:
        return self._ready.popleft() if self._ready else next(self._batches)


LEAD_IN_STEPS = 1
"""Untimed steps in a block: the caches still hold another contestant's data."""

_RECORDED_STEPS = 8
"""Steps whose collectives' outputs a ceiling keeps."""


_LATE_STEPS = 2
"""After this many steps, nothing from earlier steps is in flight, even if updates may be late."""


class MeasuredPlace(NamedTuple):
    """The measurements before the first contestant."""

    speeds: LinkSpeeds
    dense: DenseWork | None
    """The work of the model without its tables, if steps are to be predicted."""


class Worker:
    """Answers the benchmark's questions, which all ranks get in the same order.

    All methods have collectives: they make the contestant's world, plan, train and reduce losses.
    """

    def __init__(
        self, config: BenchConfig, name: str, place: Place, measured: MeasuredPlace
    ) -> None:
        self._config = config
        self._name = name
        self._place = place
        self._measured = measured
        self._is_ceiling = isinstance(config.contestants[name], CeilingContestant)
        self._planned = config.planned_by(name)
        batches = rank_batches(config, place.rank, place.world_size)
        self._feed = Feed(batches, cycle=_RECORDED_STEPS if self._is_ceiling else 0)
        self._losses: list[torch.Tensor] = []
        self._compute_s: list[float] = []
        self._start_bytes = 0

    def build(self) -> tuple[ShardingPlan, str]:
        """Plan and shard; return the plan, and the dense part's if it was planned."""
        quiet_upstream()
        give_back_memory()
        self._start_bytes = resident_bytes()
        backend = ""
        if self._is_ceiling:
            backend = replay_backend()
        elif self._planned.full_duplex:
            backend = full_duplex_backend()
        join_contestant(
            self._config.schedule,
            list(self._config.contestants).index(self._name),
            self._place,
            backend=backend,
            # The benchmark's own deadline comes first, and says where each rank was.
            patience=2.0,
        )
        mesh = self._config.mesh(self._name, self._place.world_size, self._place.local_world_size)
        speeds, dense = self._measured
        # Asked for first: all other methods need it.
        self._trainer: Trainer = build_trainer(self._config, self._planned, mesh, speeds, dense)
        self._trainer.model.train()
        return self._trainer.model.plan, self._trainer.dense_plan

    def warm_up(self) -> float:
        """Train the first steps; return the last one's seconds."""
        self._train(self._config.schedule.warmup_steps - 1)
        step_s = self._train(1)
        if self._is_ceiling:
            ReplayGroup.mode = Mode.RECORD
            self._train(self._feed.cycle)
            ReplayGroup.mode = Mode.REPLAY
            # Repeating the same gradients would drive the weights to values whose arithmetic
            # takes a different time.
            self._trainer.stop_learning()
            step_s = self._train(1)
        self._compute_s.clear()
        give_back_memory()
        return step_s

    def block(self, num_steps: int) -> float:
        """Train `LEAD_IN_STEPS`, then some timed steps; return the seconds per step."""
        self._feed.prepare(LEAD_IN_STEPS + num_steps)
        self._train(LEAD_IN_STEPS)
        step_s = self._train(num_steps)
        # One contestant computes at a time; the others keep no more memory than they need.
        give_back_memory()
        return step_s

    def _train(self, num_steps: int) -> float:
        self._feed.prepare(num_steps)
        dist.barrier(world_group())
        start = time.perf_counter()
        for _ in range(num_steps):
            self._step()
        if self._config.schedule.device == "cuda":
            # A GPU computes behind the calls.
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        # The next batch's ids may still be in flight, during another contestant's turn.
        dist.barrier(world_group())
        return seconds / num_steps

    def trace(self) -> Traced:
        """Train profiled steps."""
        num_steps = self._config.schedule.traced_steps
        peak = peak_bytes()
        compute_s = tuple(self._compute_s) if self._config.schedule.device == "cpu" else ()
        self._feed.prepare(_LATE_STEPS + 2 * num_steps)
        # The last block's messages have travelled during other contestants' turns.
        for _ in range(_LATE_STEPS):
            self._step()
        model = self._trainer.model
        before, dense_before = self._sync_total(), dense_total(model)
        with count_collectives() as seen, count_encoded() as rows:
            for _ in range(num_steps):
                self._step()
        after = self._sync_total()
        dense = self._dense_traffic(dense_total(model) - dense_before)
        # A ceiling sends nothing, though it encodes.
        encoded = (
            EncodedTraffic()
            if self._is_ceiling
            else encoded_between(rows, before, after, num_steps)
        )
        travel = row_travel_between(before, after, num_steps)
        dist.barrier(world_group())
        trace = profiled(self._step, num_steps, self._settle)
        split = RankSplit.of_trace(self._place.rank, trace)
        grown_bytes = peak - self._start_bytes
        return Traced(split, seen.records, encoded, dense, travel, compute_s, grown_bytes)

    def _settle(self) -> None:
        """Wait for all collectives that steps have left in flight."""
        model = self._trainer.model
        if isinstance(model, ModelParallel2D):
            for tables in model.sharded_tables():
                tables.sync_point.reach(SyncReason.READ)
        dist.barrier(world_group())

    def _sync_total(self) -> SyncReport:
        """Sum all sync reports; empty without replicas."""
        model = self._trainer.model
        return model.sync_total if isinstance(model, ModelParallel2D) else SyncReport()

    def _dense_traffic(self, sent: GradientReport) -> DenseTraffic | None:
        wrapper = thresholded_gradients(self._trainer.model)
        # A ceiling sends nothing, though it chooses.
        if wrapper is None or self._is_ceiling:
            return None
        num_steps = self._config.schedule.traced_steps
        return DenseTraffic(
            fp32_bytes=sent.dense_bytes / num_steps,
            sent_bytes=sent.num_bytes / num_steps,
            density=sent.density,
            residual_norm=wrapper.residual_norm(),
        )

    def losses(self) -> tuple[float, ...]:
        """Return the global batch's loss for each step so far; none for a ceiling."""
        if self._is_ceiling:
            return ()
        losses = torch.stack(self._losses).double()
        dist.all_reduce(losses, group=world_group())
        return tuple((losses.cpu() / self._place.world_size).tolist())

    def _step(self) -> None:
        start = time.thread_time()
        loss, _, _ = self._trainer.pipeline.progress(self._feed)
        self._losses.append(loss.detach())
        self._compute_s.append(time.thread_time() - start)
