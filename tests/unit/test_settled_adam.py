"""`SettledAdam`: torch's rule until it settles, then a linear one."""

from typing import Any

import pytest
import torch

import torchrec_2dsp as tdsp
from torchrec_2dsp.errors import ConfigError

SETTLE_AFTER = 5
OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95)}


def gradients(num_steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 3, generator=generator) for _ in range(num_steps)]


def trained(kind: Any, options: dict[str, Any], grads: list[torch.Tensor]) -> torch.Tensor:
    param = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = kind([param], **options)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_first_steps_are_those_of_torch(weight_decay: float) -> None:
    options, grads = {**OPTIONS, "weight_decay": weight_decay}, gradients(SETTLE_AFTER)
    actual = trained(tdsp.SettledAdam, {**options, "settle_after": SETTLE_AFTER}, grads)
    # torch adds and divides in another order.
    wanted = trained(torch.optim.Adam, options, grads)
    torch.testing.assert_close(actual, wanted, rtol=1e-6, atol=1e-6)


def test_a_settled_rule_is_linear_in_the_gradients() -> None:
    """The weights' changes by a sum of gradients are the sums of their changes."""
    first = gradients(SETTLE_AFTER)
    late = [gradients(SETTLE_AFTER + 8)[SETTLE_AFTER:], gradients(50)[42:]]
    late.append([left + right for left, right in zip(*late, strict=True)])
    zeros = [torch.zeros(4, 3)] * 8

    def changes(kind: Any, options: dict[str, Any]) -> list[torch.Tensor]:
        still = trained(kind, options, first + zeros)
        return [trained(kind, options, first + grads) - still for grads in late]

    left, right, both = changes(tdsp.SettledAdam, {**OPTIONS, "settle_after": SETTLE_AFTER})
    torch.testing.assert_close(left + right, both, rtol=1e-5, atol=1e-6)
    left, right, both = changes(torch.optim.Adam, OPTIONS)
    assert (left + right - both).abs().max() > 1e-3, "torch's own rule isn't linear"


def test_elements_without_early_gradients_take_no_huge_steps() -> None:
    """Such as the weights behind a ReLU that was off until the moment had settled."""
    early, late = gradients(SETTLE_AFTER), gradients(SETTLE_AFTER + 1)[-1:]
    for grad in early:
        grad[0] = 0.0
    options = {**OPTIONS, "settle_after": SETTLE_AFTER}
    steps = trained(tdsp.SettledAdam, options, early + late) - trained(
        tdsp.SettledAdam, options, early
    )
    assert steps[0].abs().max() > 0.0
    # A tenth of the parameter's usual root, so about ten times the usual step; not millions.
    assert steps[0].abs().max() < 20 * steps[1:].abs().max()


def test_a_state_dict_goes_on_where_it_was_taken() -> None:
    options, grads = {**OPTIONS, "settle_after": SETTLE_AFTER}, gradients(12)
    wanted = trained(tdsp.SettledAdam, options, grads)
    param = torch.nn.Parameter(torch.ones(4, 3))
    first = tdsp.SettledAdam([param], **options)
    for grad in grads[:7]:
        param.grad = grad.clone()
        first.step()
    second = tdsp.SettledAdam([param], **{**options, "settle_after": 1})
    second.load_state_dict(first.state_dict())
    for grad in grads[7:]:
        param.grad = grad.clone()
        second.step()
    assert torch.equal(param.detach(), wanted)


@pytest.mark.parametrize("settle_after", [0, -1, 2.5, True])
def test_steps_have_to_be_a_count(settle_after: Any) -> None:
    with pytest.raises(ConfigError, match=r"SettledAdam\(settle_after=.*\) is no number of steps"):
        tdsp.SettledAdam([torch.ones(1)], settle_after=settle_after)


def test_rates_that_can_not_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="none of them may be below 0"):
        tdsp.SettledAdam([torch.ones(1)], lr=-1.0, settle_after=1)
    with pytest.raises(ConfigError, match="use two of 0 or more, below 1"):
        tdsp.SettledAdam([torch.ones(1)], settle_after=1, betas=(1.0, 0.5))
