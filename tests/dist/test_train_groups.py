"""A training run leaves no process groups or threads behind."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import torchrec_2dsp as tdsp
from tests.support.ranks import RankPool
from tests.support.slices import Deal
from tests.support.soak import Usage
from tests.support.train_runs import SEQUENCES, config_with
from torchrec_2dsp.comms.counting import count_collectives
from torchrec_2dsp.comms.groups import MeshGroups, WorldGroups, own_group, own_mesh
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train

PIPELINED = {"kind": "pipelined", "num_stages": 2, "num_micro_batches": 2}
RUNS: dict[str, dict[str, Any]] = {
    "exact": {"num_groups": 2},
    "rows": {"sharding_types": ["row_wise"], "exchange": "row", "prefetch_rows": True},
    "saved": {},
    "delayed": {"dense": {"kind": "delayed"}},
    "thresholded": {"dense": {"kind": "thresholded"}},
    "powersgd": {"dense": {"kind": "powersgd"}},
    "local": {"dense": {"kind": "local", "local_steps": 2}},
    "sharded": {"dense": {"kind": "fully_sharded"}},
    "copies": {"dense": {"kind": "fully_sharded", "num_copies": 2}},
    "split": {"dense": {"kind": "tensor_parallel", "tp": 2}},
    "split_copies": {"dense": {"kind": "tensor_parallel", "tp": 2, "num_copies": 2}},
    "pipelined": {"dense": PIPELINED},
    "pipelined_shares": {"dense": PIPELINED | {"fully_shard": True}},
    "pipelined_split": {"dense": PIPELINED | {"tp": 2}},
}


def config_of(name: str, folder: Path) -> TrainConfig:
    saves = {"folder": str(folder), "every": 1, "asynchronous": True} if name == "saved" else {}
    return config_with(
        SEQUENCES,
        data={"min_length": 8, "max_length": 8},
        model={"num_blocks": 2, "num_heads": 2},
        loop={"steps": 2, "global_batch_size": 8, "eval_steps": 1, "report_every": 2},
        checkpoint=saves,
        runs={name: RUNS[name]},
    )


def group_names() -> set[str]:
    return {str(name) for name in distributed_c10d._world.pg_names.values()}


def what_runs_leave(rank: int, world_size: int, folder: Path, names: list[str]) -> list[str]:
    """List what each run leaves behind; the first runs twice, with equal losses."""
    left: list[str] = []
    of_first: list[tuple[float, ...]] = []
    for number, name in enumerate([names[0], *names]):
        groups, usage = group_names(), Usage.now()
        (run,) = train(config_of(name, folder / str(number))).runs
        left += [f"{name}: group {group}" for group in group_names() - groups]
        # The first run starts threads that all share, such as autograd's.
        if number:
            after = Usage.now()._replace(resident_bytes=usage.resident_bytes)
            left += [] if after == usage else [f"{name}: {usage} and then {after}"]
        if name == names[0]:
            of_first.append(run.losses)
    assert of_first[0] == of_first[1]
    return left


def test_runs_leave_no_groups_and_threads(ranks4: RankPool, tmp_path: Path, dealt: Deal) -> None:
    assert ranks4.run(what_runs_leave, tmp_path, dealt(list(RUNS))) == [[]] * 4


@pytest.mark.dealt_file
def test_a_second_split_model_sends_nothing_to_the_groups_of_the_first(
    ranks4: RankPool, tmp_path: Path
) -> None:
    """DTensor caches results by mesh, and both runs' meshes are equal."""
    assert ranks4.run(what_runs_leave, tmp_path, ["split"]) == [[]] * 4


def release_some(rank: int, world_size: int) -> list[bool]:
    # Other tests have left some to these ranks.
    tdsp.release_groups()
    others = cast(dist.ProcessGroup, dist.new_group([0, 1]))
    groups = group_names()
    world, device = dist.group.WORLD, torch.device("cpu")
    assert world is not None
    mesh = MeshGroups.for_mesh(tdsp.Mesh2D(1, 2), "cpu")
    single = own_group(world, device, "single")
    ranks = own_mesh(torch.arange(2).view(1, 2), "cpu", ("copy", "share"))
    created = WorldGroups.current()
    was_there = [single in created, mesh.alarm.group in created, world not in created]
    was_there.append(ranks.get_group("share") is world)
    with count_collectives() as released:
        tdsp.release_groups()
    assert released.counts() == {"barrier": 1}
    again = MeshGroups.for_mesh(tdsp.Mesh2D(1, 2), "cpu")
    is_new = again is not mesh and mesh.alarm.group not in created
    tdsp.release_groups()
    total = torch.ones(1)
    for group in (others, world):
        dist.all_reduce(total, group=group)
    dist.destroy_process_group(others)
    return [*was_there, is_new, group_names() | {others.group_name} == groups, total.item() == 4]


def test_groups_of_the_package_are_released_and_no_others(ranks2: RankPool) -> None:
    assert ranks2.run(release_some) == [[True] * 7] * 2


def test_without_a_world_there_is_nothing_to_release() -> None:
    with pytest.raises(tdsp.errors.MeshError, match="not initialised"):
        tdsp.release_groups()
