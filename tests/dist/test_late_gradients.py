"""The hook of late gradients by itself: nobody waits for it, and buckets may change."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import RankPool
from tests.support.slices import patient
from torchrec_2dsp._compat.c10d import store_of_world
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.dense.delayed_dense import LateGradients


@dataclass
class Bucket:
    """A bucket of DDP's, as far as hooks look at it."""

    params: list[nn.Parameter]
    flat: torch.Tensor

    def parameters(self) -> list[nn.Parameter]:
        return self.params

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        sizes = [param.numel() for param in self.params]
        parts = zip(self.params, self.flat.split(sizes), strict=True)
        return [part.view_as(param) for param, part in parts]


def reduced(late: LateGradients, params: list[nn.Parameter], *gradients: float) -> list[float]:
    flat = [
        torch.full((param.numel(),), value) for param, value in zip(params, gradients, strict=True)
    ]
    bucket: Any = Bucket(params, torch.cat(flat))
    return cast(torch.Tensor, late.reduce(None, bucket).wait()).tolist()


def run_ahead(rank: int, world_size: int) -> list[list[float]]:
    param = nn.Parameter(torch.zeros(2))
    late = LateGradients(1, {id(param): "weight"}, world_group(), torch.device("cpu"))
    store, means = store_of_world(), []
    for step in range(4):
        late.begin_step()
        if rank == 1 and step == 3:
            # Rank 0 comes back from its hook while this one hasn't begun.
            store.wait(["rank 0 has gone on"], timedelta(seconds=patient(20)))
        means.append(reduced(late, [param], 10.0 * step + rank))
        if rank == 0 and step == 3:
            store.set("rank 0 has gone on", "")
    assert late.drain()["weight"].tolist() == [30.5, 30.5]
    assert late.drain() == {}
    return means


def test_nobody_waits_for_the_gradients_of_the_step(ranks2: RankPool) -> None:
    for means in ranks2.run(run_ahead):
        assert means == [[0.5, 0.5], [0.0, 0.0], [10.5, 10.5], [20.5, 20.5]]


def change_buckets(rank: int, world_size: int) -> list[list[float]]:
    first, second, third = (nn.Parameter(torch.zeros(size)) for size in (1, 2, 1))
    names = {id(param): name for param, name in ((first, "a"), (second, "b"), (third, "c"))}
    late = LateGradients(0, names, world_group(), torch.device("cpu"))
    late.begin_step()
    means = [reduced(late, [first, second], 1.0, 2.0), reduced(late, [third], 3.0)]
    late.begin_step()
    means += [reduced(late, [third, first], 4.0, 5.0), reduced(late, [second], 6.0)]
    state = late.state_dict()
    dist.barrier()
    late.load_state_dict(state)
    late.begin_step()
    return [*means, reduced(late, [second, first, third], 0.0, 0.0, 0.0)]


def test_gradients_find_their_parameters_in_other_buckets(ranks2: RankPool) -> None:
    for means in ranks2.run(change_buckets):
        assert means == [[0, 0, 0], [0], [3, 1], [2, 2], [6, 6, 5, 4]]


def load_elsewhere(rank: int, world_size: int) -> bool:
    late = LateGradients(1, {}, world_group(), torch.device("meta"))
    late.load_state_dict({"step": 3, "in_flight": {"weight": torch.ones(2)}})
    return late.state_dict()["in_flight"]["weight"].is_meta


def test_loaded_means_go_to_the_device_of_the_parameters(ranks2: RankPool) -> None:
    assert ranks2.run(load_elsewhere) == [True, True]
