"""Cuts of layers into stages, against all cuts that there are, and the times they are made by."""

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import torchrec_2dsp as tdsp
from torchrec_2dsp.dense.pipelined.layer_stack import measure_layers
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import DenseMesh
from torchrec_2dsp.plan.dense_plan import check_cuts, cut_layers, even_cuts


def slowest(cuts: tuple[int, ...], seconds: list[float], sizes: list[float], rate: float) -> float:
    """What the slowest stage takes."""
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
    # Sums of the same numbers in another order.
    assert slowest(cuts, seconds, sizes, rate) == pytest.approx(best, rel=1e-9, abs=1e-9)


def test_even_cuts_differ_by_one_layer() -> None:
    assert even_cuts(8, 4) == (2, 4, 6)
    assert even_cuts(3, 3) == (1, 2)
    assert even_cuts(5, 1) == ()


class Square(nn.Module):
    """A squared error."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square().sum(dim=1)


def test_a_wide_layer_is_measured_to_take_longer() -> None:
    """It has 2,000 times the arithmetic of the others."""
    layers = [nn.Linear(16, 16), nn.Linear(16, 1024), nn.Linear(1024, 512), nn.Linear(512, 8)]
    stack = tdsp.LayerStack(layers, Square())
    before = {name: value.clone() for name, value in stack.state_dict().items()}
    times = measure_layers(stack, torch.rand(64, 16), [torch.rand(64, 8)])
    assert [layer.output_bytes for layer in times] == [4 * 64 * dim for dim in (16, 1024, 512, 8)]
    assert max(times, key=lambda layer: layer.seconds) is times[2]
    assert all(layer.backward_seconds > 0 for layer in times)
    assert all(param.grad is None for param in stack.parameters())
    for name, value in stack.state_dict().items():
        assert torch.equal(value, before[name])


def test_what_cannot_be_is_said() -> None:
    errors: list[tuple[Any, str]] = [
        (lambda: check_cuts([2], 4, 3), "cuts=[2] make 2 stages, not num_stages=3; give the first"),
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
