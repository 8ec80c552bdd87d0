"""Hyper-parameters of optimizers: what a train state keeps of their parameter groups."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.checkpoint.parts import wrapped_optimizers

HyperParameters = dict[str, list[dict[str, Any]]]
"""For each parameter, all options of its parameter groups, in the optimizer's order."""

_CLASS = "__class__"
"""The option that names the class of torch's optimizer; tables' fused ones differ by plan."""


def hyper_parameters(
    optimizer: KeyedOptimizer, but: KeyedOptimizer | None = None
) -> HyperParameters:
    """Return the hyper-parameters of this rank's parameters.

    Args:
        optimizer: the optimizer whose groups are read.
        but: an optimizer that it may contain, whose groups are left out.
    """
    classes = _classes(optimizer)
    by_key: HyperParameters = defaultdict(list)
    for keys, group in _groups(optimizer, but):
        options = {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for key in keys:
            by_key[key].append({**options, _CLASS: classes.get(id(group), "")})
    return dict(by_key)


def check_hyper_parameters(
    saved: Mapping[str, Any], optimizer: KeyedOptimizer, but: KeyedOptimizer | None = None
) -> None:
    """Raise unless hyper-parameters are saved for each of this rank's parameter groups."""
    classes = _classes(optimizer)
    for keys, group, options in _saved_groups(saved, optimizer, but):
        for key, of_key in zip(keys, options, strict=True):
            if of_key != options[0]:
                raise CheckpointError(
                    f"{keys[0]!r} and {key!r} are in one group of the optimizer, but had different "
                    "hyper-parameters when they were saved; group the parameters as they were"
                )
        saved_class, own_class = options[0].get(_CLASS), classes.get(id(group))
        if saved_class and own_class and saved_class != own_class:
            raise CheckpointError(
                f"{keys[0]!r} was trained by {saved_class}, and is by {own_class} now; pass the "
                "optimizer that was saved, or load the weights alone, without train_state"
            )


def restore_hyper_parameters(
    saved: Mapping[str, Any], optimizer: KeyedOptimizer, but: KeyedOptimizer | None = None
) -> None:
    """Write saved hyper-parameters into the optimizer's groups."""
    for _, group, (options, *_) in _saved_groups(saved, optimizer, but):
        for name, value in options.items():
            if isinstance(group.get(name), torch.Tensor):
                with torch.no_grad():
                    group[name].copy_(torch.as_tensor(value))
            elif name != _CLASS:
                group[name] = value


def _saved_groups(
    saved: Mapping[str, Any], optimizer: KeyedOptimizer, but: KeyedOptimizer | None
) -> Iterator[tuple[list[str], dict[str, Any], list[dict[str, Any]]]]:
    """Yield each group with its parameters' names, and their saved options in it.

    An optimizer may have several groups of a parameter, as TorchRec's SemisyncOptimizer has. Older
    states hold the last one's options alone: such groups stay as they were built.
    """
    groups = list(_groups(optimizer, but))
    counts = Counter(key for keys, _ in groups for key in keys)
    numbers = Counter[str]()
    for keys, group in groups:
        options = []
        for key in keys:
            if key not in saved:
                raise CheckpointError(
                    f"the train state has no hyper-parameters of {key!r}; pass the optimizer that "
                    "was saved"
                )
            of_key = saved[key]
            if isinstance(of_key, Mapping):
                of_key = [of_key if counts[key] == 1 else {}] * counts[key]
            if len(of_key) != counts[key]:
                raise CheckpointError(
                    f"the train state has hyper-parameters of {len(of_key)} groups with {key!r}, "
                    f"and the optimizer has {counts[key]}; pass the optimizer that was saved"
                )
            options.append(of_key[numbers[key]])
            numbers[key] += 1
        yield keys, group, options


def _groups(
    optimizer: KeyedOptimizer, but: KeyedOptimizer | None
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield each group that has parameters, with their names."""
    excluded = {id(group) for group in but.param_groups} if but is not None else set()
    names = {id(param): key for key, param in optimizer.params.items()}
    groups: Any = optimizer.param_groups
    for group in groups:
        keys = [names[id(param)] for param in group["params"] if id(param) in names]
        if id(group) not in excluded and keys:
            yield keys, group


def _classes(optimizer: Optimizer) -> dict[int, str]:
    """Return the class of torch's optimizer that updates each group, by the group's id."""
    wrapped = wrapped_optimizers(optimizer)
    if not wrapped and not isinstance(optimizer, KeyedOptimizer):
        return {id(group): type(optimizer).__name__ for group in optimizer.param_groups}
    return dict(chain.from_iterable(_classes(part).items() for part in wrapped))
