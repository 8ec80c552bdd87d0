"""DDP goes on in the order in which another one adds gradients up, and keeps its hooks."""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.support.ranks import RankPool
from torchrec_2dsp._compat.ddp import gradient_order, start_in_order


def hooked(rank: int, world_size: int, kind: str) -> tuple[list[bool], list[bool], int]:
    """Gradients of a DDP that goes on at step 4, as it is and in the order of the other one."""
    calls: list[int] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(1)
        return allreduce_hook(cast(Any, state), bucket)

    def make() -> DistributedDataParallel:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5), nn.Linear(5, 1))
        ddp = DistributedDataParallel(
            layers, static_graph=kind != "dynamic", bucket_cap_mb=1e-4, gradient_as_bucket_view=True
        )
        if kind == "hook":
            ddp.register_comm_hook(None, hook)
        if kind == "builtin":
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        return ddp

    def gradients(ddp: DistributedDataParallel, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + rank)
        ddp.zero_grad()
        ddp(torch.randn(6, 7, generator=generator)).square().mean().backward()
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
        assert not all(plain)
        # Two buckets in each step.
        assert num_calls == (8 if kind == "hook" else 0)
