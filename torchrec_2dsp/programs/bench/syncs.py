"""`bench-sync`: time syncs of a table shard's copies, without a model around it.

```text
copy on each replica peer: change random rows --> sync --> compare all copies
                                                  ^ timed, in turns with other syncs
```
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import count, cycle, product
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import torch
import torch.distributed as dist
from pydantic import Field, model_validator

from torchrec_2dsp._compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
    optimizer_states,
)
from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import MeshGroups, world_group
from torchrec_2dsp.errors import ConfigError, SyncError
from torchrec_2dsp.mesh import Mesh2D, RankLayout
from torchrec_2dsp.plan.sync import GradientSync, SyncConfig, SyncedRows, WeightSync
from torchrec_2dsp.programs.bench.machine import describe_setting
from torchrec_2dsp.programs.bench.page import listed, setting_facts
from torchrec_2dsp.programs.bench.process import Place
from torchrec_2dsp.programs.bench.results import BenchSetting
from torchrec_2dsp.programs.config.section import JsonFile, Section
from torchrec_2dsp.programs.config.sections import ReplicationConfig
from torchrec_2dsp.programs.link_speeds import measure_link_speeds
from torchrec_2dsp.replicas.capture import RowCapture
from torchrec_2dsp.replicas.gradient_sync import GradientSyncAction
from torchrec_2dsp.replicas.row_average import RowAverage
from torchrec_2dsp.replicas.whole_shard import ShardAverage
from torchrec_2dsp.report.charts import MARKERS, Axis, Line, LineChart, draw_lines
from torchrec_2dsp.report.table import Table
from torchrec_2dsp.shard.kernels import TableShard
from torchrec_2dsp.shard.replica_sync import synced_shard


class SyncBenchConfig(Section):
    """The config for `bench-sync`."""

    title: str = "Sync"
    network: str = ""
    """The network as the report describes it."""

    num_groups: tuple[int, ...] = (2,)
    """Copies per shard; each count must divide the ranks."""

    layout: RankLayout = RankLayout.CONTIGUOUS
    """The replicas' placement: "contiguous" puts them on different hosts, "strided" on one."""

    shard_mib: tuple[float, ...] = (64.0,)
    """Weight sizes for a rank's shard."""

    dim: int = Field(default=64, ge=4, multiple_of=4)
    """The table's columns."""

    touched_shares: tuple[float, ...] = (0.001, 0.01, 0.1, 1.0)
    """Shares of rows that each copy changes, drawn independently per copy."""

    repeats: int = Field(default=5, ge=1)
    """Timed runs per sync."""

    seed: int = Field(default=0, ge=0)
    """The seed for the changed rows and the syncs' order."""

    syncs: dict[str, ReplicationConfig] = Field(min_length=1)
    """The syncs that are compared, by name."""

    reference: str
    """The contestant that the others are compared with."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reference not in self.syncs:
            raise ValueError(
                f"reference={self.reference!r} isn't a sync; use one of {', '.join(self.syncs)}"
            )
        for name in ("num_groups", "shard_mib", "touched_shares"):
            values = getattr(self, name)
            if not values or min(values) <= 0:
                raise ValueError(f"{name}={list(values)} needs at least one value, all above 0")
        if min(self.num_groups) < 2:
            raise ValueError(f"num_groups={list(self.num_groups)}: one group has nothing to sync")
        if max(self.touched_shares) > 1:
            raise ValueError(f"touched_shares={list(self.touched_shares)} goes beyond 1, all rows")
        return self

    def num_rows(self, shard_mib: float) -> int:
        """Return how many rows a shard of fp32 weights has."""
        return max(1, int(shard_mib * 2**20) // (4 * self.dim))


SYNC_BENCH_FORMAT = 1


class SyncTimes(Section):
    """One shard's sync, timed repeatedly."""

    num_groups: int
    shard_mib: float
    touched_share: float
    """The share of rows that each copy has changed."""

    sync: str
    seconds: tuple[float, ...]
    """The slowest rank's seconds, repeat by repeat."""

    tracking_s: tuple[float, ...]
    """The slowest rank's seconds for noting the changed rows."""

    sent_bytes: float
    """Bytes to other ranks, mean over ranks and repeats."""

    @property
    def median_s(self) -> float:
        """The median time over the repeats."""
        return statistics.median(self.seconds)

    @property
    def case(self) -> tuple[int, float, float]:
        """The shard and the share of changed rows, within which syncs are compared."""
        return (self.num_groups, self.shard_mib, self.touched_share)


class SyncBenchResult(JsonFile):
    """A `bench-sync` result."""

    what_it_is: ClassVar[str] = "the JSON of bench-sync"
    format: int = SYNC_BENCH_FORMAT
    setting: BenchSetting
    reference: str
    """The contestant that the others are compared with."""

    times: tuple[SyncTimes, ...]
    """Case by case, then in the config's order."""

    def find(self, case: tuple[int, float, float], sync: str) -> SyncTimes:
        """Return the times of one sync in one case."""
        return next(times for times in self.times if (times.case, times.sync) == (case, sync))


class TimedSync(NamedTuple):
    """One sync's timing on this rank."""

    seconds: float
    """Seconds from a barrier until the sync ends."""
    tracking_s: float
    """Seconds for noting the changed rows, before."""
    num_bytes: int
    """Bytes that this rank sent."""


class Copies:
    """This rank's copy: a fused kernel with one table and row-wise AdaGrad."""

    def __init__(self, groups: MeshGroups, num_rows: int, dim: int) -> None:
        self._groups = groups
        self.num_rows = num_rows
        """The shard's rows."""
        self._dim = dim
        self._tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(num_rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.01,
        )
        (weight,), (state,) = self._tbe.split_embedding_weights(), optimizer_states(self._tbe)
        self._shard = TableShard("table", 0, 0, {"weight": weight, **state})
        for tensor in self._shard.tensors.values():
            tensor.zero_()

    def timed_sync(self, sync: SyncConfig, rows: torch.Tensor, seed: int) -> TimedSync:
        """Change ``rows`` and make the copies equal; a `GradientSync` makes its own changes.

        Collectives:
            A barrier, and those of the sync.
        """
        if isinstance(sync, GradientSync):
            return self._merge(sync, rows, seed)
        return self._average(sync, rows, seed)

    def check_equal(self) -> None:
        """Raise `SyncError` if the copies differ in sampled rows.

        Collectives:
            One all-gather over the replica peers.
        """
        rows = torch.randperm(self.num_rows, generator=_generator(self.num_rows))[:10_000]
        tensors = self._shard.tensors.values()
        own_rows = torch.cat([tensor[rows].reshape(-1) for tensor in tensors])
        peers = [torch.empty_like(own_rows) for _ in range(self._groups.mesh.num_groups)]
        dist.all_gather(peers, own_rows, group=self._groups.replica_peers)
        if not all(torch.equal(peer, own_rows) for peer in peers):
            raise SyncError("copies differ after a sync; what it took is worth nothing")

    def _average(self, sync: WeightSync, rows: torch.Tensor, seed: int) -> TimedSync:
        peers = self._groups.replica_peers
        shard = synced_shard(self._shard, lambda name: True, dist.get_world_size(peers), sync)
        if sync.rows is SyncedRows.TOUCHED:
            average = RowAverage([shard], self._groups.replica_rows.everyone, self._groups.alarm)
        else:
            average = ShardAverage([shard], peers)
        start = time.perf_counter()
        average.before_update([shard], lambda: [rows])
        tracking_s = time.perf_counter() - start
        generator = _generator(seed)
        for tensor in self._shard.tensors.values():
            changes = torch.rand((rows.numel(), *tensor.shape[1:]), generator=generator)
            tensor.index_add_(0, rows, changes)
        dist.barrier(self._groups.world)
        start = time.perf_counter()
        report = average.run()
        return TimedSync(time.perf_counter() - start, tracking_s, report.num_bytes)

    def _merge(self, sync: GradientSync, rows: torch.Tensor, seed: int) -> TimedSync:
        """Time the backward's sums and the update, but not the lookup before."""
        peers = self._groups.replica_rows
        capture = RowCapture(self._tbe, ["table"], peers=peers, codec=sync.transport.codec)
        action = GradientSyncAction([capture], self._groups.alarm, is_layered=peers.is_layered)
        offsets = torch.arange(rows.numel() + 1)
        grads = torch.rand((rows.numel(), self._dim), generator=_generator(seed))
        output = capture.lookup(lambda: self._tbe(rows, offsets), None)
        dist.barrier(self._groups.world)
        start = time.perf_counter()
        action.backward_seen()
        output.backward(grads)
        with torch.no_grad():
            report = action.apply(everything=True)
        return TimedSync(time.perf_counter() - start, 0.0, report.num_bytes)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


Case = tuple[int, float, float]


def run_sync_bench(
    config: SyncBenchConfig, progress: Callable[[str], object] = lambda line: None
) -> SyncBenchResult:
    """Measure all cases; call it on every rank, and each gets the same result.

    Collectives:
        The syncs', barriers, and all-reduces for the times on the world.
    """
    world = world_group()
    started = datetime.now(UTC)
    world_size = dist.get_world_size(world)
    with agreeing(world) as facts:
        for num_groups in config.num_groups:
            if world_size % num_groups:
                raise ConfigError(
                    f"num_groups={num_groups} does not divide the {world_size} ranks; start as "
                    "many ranks as a multiple of it"
                )
        facts["the config"] = config.model_dump_json()
    place = Place(dist.get_rank(world), world_size, get_local_size(world_size))
    speeds = measure_link_speeds(local_world_size=place.local_world_size)
    num_cases = len(config.num_groups) * len(config.shard_mib) * len(config.touched_shares)
    numbers = count(1)
    times: list[SyncTimes] = []
    for num_groups, shard_mib in product(config.num_groups, config.shard_mib):
        mesh = Mesh2D(num_groups, world_size // num_groups, config.layout)
        groups = MeshGroups.for_mesh(mesh, "cpu")
        copies = Copies(groups, config.num_rows(shard_mib), config.dim)
        for share in config.touched_shares:
            progress(
                f"{next(numbers)} of {num_cases}: {num_groups} copies of {shard_mib:g} MiB, "
                f"{100 * share:g} % changed"
            )
            times += _measure(config, (num_groups, shard_mib, share), copies)
        del copies  # The next shard needs its memory.
    return SyncBenchResult(
        setting=describe_setting(
            config,
            title=config.title,
            network=config.network,
            place=place,
            speeds=speeds,
            started=started,
        ),
        reference=config.reference,
        times=tuple(times),
    )


def _measure(config: SyncBenchConfig, case: Case, copies: Copies) -> list[SyncTimes]:
    """Time all syncs in a case: one warm-up round, then the repeats, each in another order."""
    timed: dict[str, list[TimedSync]] = {name: [] for name in config.syncs}
    for repeat in range(-1, config.repeats):
        order = list(config.syncs)
        random.Random(f"{config.seed} {case} {repeat}").shuffle(order)
        for name in order:
            seed = random.Random(f"{config.seed} {case} {repeat} {dist.get_rank()}").getrandbits(31)
            num_rows = max(1, round(case[2] * copies.num_rows))
            rows = torch.randperm(copies.num_rows, generator=_generator(seed))[:num_rows]
            timing = copies.timed_sync(config.syncs[name].sync_config, rows, seed)
            copies.check_equal()
            if repeat >= 0:
                timed[name].append(timing)
    return [_gathered(case, name, repeats) for name, repeats in timed.items()]


def _gathered(case: Case, name: str, timed: Sequence[TimedSync]) -> SyncTimes:
    slowest = torch.tensor(
        [[timing.seconds, timing.tracking_s] for timing in timed], dtype=torch.float64
    )
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    sent = torch.tensor([timing.num_bytes for timing in timed], dtype=torch.float64).mean()
    dist.all_reduce(sent)
    seconds, tracking_s = slowest.t().tolist()
    return SyncTimes(
        num_groups=case[0],
        shard_mib=case[1],
        touched_share=case[2],
        sync=name,
        seconds=tuple(seconds),
        tracking_s=tuple(tracking_s),
        sent_bytes=float(sent) / dist.get_world_size(),
    )


_HEADINGS = (
    *("changed rows", "sync", "min ms", "median ms", "max ms"),
    *("x reference", "MB", "x bytes", "noting ms"),
)


def sync_report(result: SyncBenchResult, *, plot: str, data: str) -> str:
    """Write a page on one result, with links to its plot and its JSON."""
    facts = setting_facts(result.setting) | {"Data": f"[{data}]({data})"}
    parts = [
        f"# {result.setting.title}",
        listed(facts),
        f"![Time by share of changed rows]({plot})",
        _HOW_TO_READ.format(reference=result.reference),
    ]
    for title, times in shards_of(result).items():
        parts += [f"## {title}", table_of_shard(result, times).markdown()]
    return "\n\n".join(parts) + "\n"


_HOW_TO_READ = (
    "Each copy changes its own random rows of one shard with row-wise AdaGrad; then all copies are "
    "made equal, and compared. A time is that of the slowest rank. MB are what a rank sends to "
    "others. *x reference* and *x bytes* are how many times less time and bytes than *{reference}* "
    "it takes. *Noting* is what a backward takes before, to keep the rows that it changes. A "
    "gradient sync's time includes adding up gradients, and the update, which a weight sync "
    "follows."
)


def shards_of(result: SyncBenchResult) -> dict[str, list[SyncTimes]]:
    """Return each shard's times, by its copies and size in words."""
    shards: dict[str, list[SyncTimes]] = {}
    for times in result.times:
        title = f"{times.num_groups} copies of {times.shard_mib:g} MiB"
        shards.setdefault(title, []).append(times)
    return shards


def table_of_shard(result: SyncBenchResult, times_of_shard: Sequence[SyncTimes]) -> Table:
    """Compare one shard's syncs, by the share of rows that had changed."""
    rows = []
    for times in times_of_shard:
        reference = result.find(times.case, result.reference)
        rows.append(
            (
                f"{times.touched_share:.4g}",
                times.sync,
                *(f"{1e3 * value:.1f}" for value in (min(times.seconds), times.median_s)),
                f"{1e3 * max(times.seconds):.1f}",
                f"{reference.median_s / times.median_s:.2f}",
                f"{times.sent_bytes / 1e6:.3f}",
                f"{reference.sent_bytes / times.sent_bytes:.1f}" if times.sent_bytes else "-",
                f"{1e3 * statistics.median(times.tracking_s):.1f}"
                if any(times.tracking_s)
                else "-",
            )
        )
    return Table(_HEADINGS, rows, words={"sync"})


def sync_plot(result: SyncBenchResult, path: str | Path) -> None:
    """Write an SVG with times by share of changed rows, a panel for each shard."""
    names = list(dict.fromkeys(times.sync for times in result.times))
    charts = [
        LineChart(
            [
                _line(name, marker, times_of_shard)
                for name, marker in zip(names, cycle(MARKERS), strict=False)
            ],
            x=Axis(title="changed rows per copy, %", is_log=True),
            y=Axis(title="time of a sync, ms", is_log=True),
            title=title,
            width_inches=3.2,
        )
        for title, times_of_shard in shards_of(result).items()
    ]
    draw_lines(charts, path)


def _line(name: str, marker: str, times_of_shard: Sequence[SyncTimes]) -> Line:
    """Draw one sync, from the fastest to the slowest time for each share."""
    times_of_sync = [times for times in times_of_shard if times.sync == name]
    return Line(
        name=name,
        x=[100 * times.touched_share for times in times_of_sync],
        y=[1e3 * times.median_s for times in times_of_sync],
        low=[1e3 * min(times.seconds) for times in times_of_sync],
        high=[1e3 * max(times.seconds) for times in times_of_sync],
        marker=marker,
    )
