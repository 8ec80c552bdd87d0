"""Learning rates and the other hyper-parameters of optimizers, by the names of their parameters."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_2dsp.errors import CheckpointError

HyperParameters = dict[str, dict[str, Any]]
"""For each parameter, all options of its parameter group."""


def hyper_parameters(
    optimizer: KeyedOptimizer, but: KeyedOptimizer | None = None
) -> HyperParameters:
    """The hyper-parameters of this rank's parameters.

    Args:
        optimizer: the optimizer whose groups are read.
        but: an optimizer that it may contain, whose groups are left out.
    """
    return {
        key: {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for keys, group in _groups(optimizer, but)
        for key in keys
    }


def check_hyper_parameters(
    saved: Mapping[str, Mapping[str, Any]],
    optimizer: KeyedOptimizer,
    but: KeyedOptimizer | None = None,
) -> None:
    """Raise unless hyper-parameters are saved for each of this rank's parameter groups."""
    for keys, _ in _groups(optimizer, but):
        for key in keys:
            if key not in saved:
                raise CheckpointError(
                    f"the train state has no hyper-parameters of {key!r}; pass the optimizer that "
                    "was saved"
                )
            if saved[key] != saved[keys[0]]:
                raise CheckpointError(
                    f"{keys[0]!r} and {key!r} are in one group of the optimizer, but had different "
                    "hyper-parameters when they were saved; group the parameters as they were"
                )


def restore_hyper_parameters(
    saved: Mapping[str, Mapping[str, Any]],
    optimizer: KeyedOptimizer,
    but: KeyedOptimizer | None = None,
) -> None:
    """Write saved hyper-parameters into the optimizer's groups."""
    for keys, group in _groups(optimizer, but):
        for name, value in saved[keys[0]].items():
            if isinstance(group.get(name), torch.Tensor):
                with torch.no_grad():
                    group[name].copy_(torch.as_tensor(value))
            else:
                group[name] = value


def _groups(
    optimizer: KeyedOptimizer, but: KeyedOptimizer | None
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Each group with the names of its parameters; groups without parameters are left out."""
    excluded = {id(group) for group in but.param_groups} if but is not None else set()
    names = {id(param): key for key, param in optimizer.params.items()}
    groups: Any = optimizer.param_groups
    for group in groups:
        keys = [names[id(param)] for param in group["params"] if id(param) in names]
        if id(group) not in excluded and keys:
            yield keys, group
