"""`run_sync_bench`: time syncs against each other, in turns."""

import random
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from typing import Protocol

import torch
import torch.distributed as dist

from torchrec_2dsp._compat.torchrec import get_local_size
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.comms.mesh_groups import MeshGroups
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.programs.bench.setting import describe_setting
from torchrec_2dsp.programs.bench.syncs.config import SyncBenchConfig
from torchrec_2dsp.programs.bench.syncs.copies import Copies, TimedSync
from torchrec_2dsp.programs.bench.syncs.results import SyncBenchResult, SyncTimes
from torchrec_2dsp.programs.bench.worker import Place
from torchrec_2dsp.programs.calibrate.link_speed import measure_link_speeds

Case = tuple[int, float, float]


class SyncBenchWatcher(Protocol):
    """Someone who shows how far it is."""

    def case_started(self, case: Case, num_done: int, num_cases: int) -> None:
        """The next ``(groups, MiB, share)`` is being measured."""
        ...


def run_sync_bench(
    config: SyncBenchConfig, watchers: Sequence[SyncBenchWatcher] = ()
) -> SyncBenchResult:
    """Measure all cases. Call it on every rank; each gets the same result.

    Collectives:
        Those of the syncs, barriers, and all-reduces of the times on the world.
    """
    world = world_group()
    started = datetime.now(UTC)
    with agreeing(world) as facts:
        _check_world(config, dist.get_world_size(world))
        facts["the config"] = config.model_dump_json()
    world_size = dist.get_world_size(world)
    place = Place(dist.get_rank(world), world_size, get_local_size(world_size))
    speeds = measure_link_speeds(world, local_world_size=place.local_world_size)
    cases = list(product(config.num_groups, config.shard_mib, config.touched_shares))
    times: list[SyncTimes] = []
    copies: Copies | None = None
    built = (0, 0.0)
    for number, case in enumerate(cases):
        for watcher in watchers:
            watcher.case_started(case, number, len(cases))
        if case[:2] != built or copies is None:
            built, copies = case[:2], None  # The old shard's memory is needed for the new one.
            copies = _build(config, *case[:2])
        times += _measure(config, case, copies)
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


def _check_world(config: SyncBenchConfig, world_size: int) -> None:
    for num_groups in config.num_groups:
        if world_size % num_groups:
            raise ConfigError(
                f"num_groups={num_groups} does not divide the {world_size} ranks; start as many "
                "ranks as a multiple of it"
            )


def _build(config: SyncBenchConfig, num_groups: int, shard_mib: float) -> Copies:
    mesh = Mesh2D(num_groups, dist.get_world_size() // num_groups, config.layout)
    groups = MeshGroups.for_mesh(mesh, "cpu")
    return Copies(groups, config.num_rows(shard_mib), config.dim)


def _measure(config: SyncBenchConfig, case: Case, copies: Copies) -> list[SyncTimes]:
    """All syncs of a case: one round to warm up, then the repeats, each in another order."""
    timed: dict[str, list[TimedSync]] = {name: [] for name in config.syncs}
    for repeat in range(-1, config.repeats):
        order = list(config.syncs)
        random.Random(f"{config.seed} {case} {repeat}").shuffle(order)
        for name in order:
            seed = random.Random(f"{config.seed} {case} {repeat} {dist.get_rank()}").getrandbits(31)
            generator = torch.Generator().manual_seed(seed)
            count = max(1, round(case[2] * copies.num_rows))
            rows = torch.randperm(copies.num_rows, generator=generator)[:count]
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
