"""`JointBatch`: a module that runs on the batches of several ranks at once.

    rank 0: rows 0 to 5   --gather-->  rows 0 to 9   --module-->  rows 0 to 9  --> rows 0 to 5
    rank 1: rows 6 to 9   ---------->  rows 0 to 9   ---------->  rows 0 to 9  --> rows 6 to 9

Each rank gives its own rows and gets its own ones back, so the rest of the model, the tables and
the loss know nothing of the others. The ranks that gather hold parts of the module's layers.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from torchrec_2dsp.errors import UnsupportedError


class JointBatch:
    """Gathers what a module is given over the ranks of a group, and takes this rank's rows back.

    Gradients of the module's parameters are the mean over the group's ranks of what each rank's
    loss would give; those of its inputs are what this rank's loss gives.
    """

    def __init__(self, name: str, module: nn.Module, group: dist.ProcessGroup) -> None:
        """
        Args:
            name: of the module, for errors.
            module: called with tensors whose first dimension is the batch, `KeyedTensor`s or
                `JaggedTensor`s; it gives tensors whose first dimension is the batch.
            group: the ranks that run it together.
        """
        self._name, self._group = name, group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._sizes: list[list[int]] = []
        # Before hooks that are there, which see what the module sees.
        module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        module.register_forward_hook(self._after)

    def _before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather all arguments.

        Collectives:
            An all-gather of sizes, waited for, then one of each tensor.
        """
        # TorchRec's tables may not have waited for their outputs yet.
        given = _mapped((args, kwargs), lambda lazy: lazy.wait(), is_leaf=_is_lazy)
        leaves = list(_leaves(given))
        if not leaves:
            raise UnsupportedError(f"{self._name!r} is called without tensors, so it has no batch")
        parts = [tensor for leaf in leaves for tensor in _tensors_of(leaf)]
        own = torch.tensor([part.shape[0] for part in parts], device=parts[0].device)
        sizes = own.new_empty(self._num_ranks * own.numel())
        dist.all_gather_into_tensor(sizes, own, group=self._group)
        by_part = sizes.view(self._num_ranks, -1).t().tolist()
        # Of a jagged tensor the lengths count samples, which come after the values.
        self._sizes.append(by_part[1] if isinstance(leaves[0], JaggedTensor) else by_part[0])
        gathered = iter(
            [
                cast(torch.Tensor, _Gathered.apply(part, of_part, self._rank, self._group))
                for part, of_part in zip(parts, by_part, strict=True)
            ]
        )
        return _mapped(given, lambda leaf: _with_tensors(leaf, gathered))

    def _after(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Take this rank's rows; in the backward, gather their gradients."""
        sizes = self._sizes.pop()

        def own_rows(rows: Any) -> torch.Tensor:
            if not isinstance(rows, torch.Tensor) or rows.shape[:1] != (sum(sizes),):
                shape = f" {tuple(rows.shape)}" if isinstance(rows, torch.Tensor) else ""
                raise UnsupportedError(
                    f"{self._name!r} gives a {type(rows).__name__}{shape} for {sum(sizes)} "
                    "samples; give tensors whose first dimension is the batch, or lists or dicts "
                    "of them"
                )
            return cast(torch.Tensor, _OwnRows.apply(rows, sizes, self._rank, self._group))

        return _mapped(output, own_rows, is_leaf=_is_result)


class _Gathered(torch.autograd.Function):
    """The rows of all ranks. Each rank has the whole gradient, of the mean of their losses."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.rank = sizes, rank
        return _gather(rows, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        own = grads[0].split(ctx.sizes)[ctx.rank]
        return own * len(ctx.sizes), None, None, None


class _OwnRows(torch.autograd.Function):
    """The rows of this rank, of whose loss the group's mean has a share."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return rows.split(sizes)[rank].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _gather(grads[0], ctx.sizes, ctx.group) / len(ctx.sizes), None, None, None


def _gather(rows: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The rows of all ranks, one rank after the other."""
    largest = max(sizes)
    own = rows.contiguous()
    if own.shape[0] < largest:
        padding = own.new_zeros(largest - own.shape[0], *own.shape[1:])
        own = torch.cat([own, padding])
    gathered = own.new_empty(len(sizes) * largest, *own.shape[1:])
    dist.all_gather_into_tensor(gathered, own, group=group)
    if min(sizes) == largest:
        return gathered
    parts = gathered.split(largest)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _is_leaf(given: Any) -> bool:
    return isinstance(given, KeyedTensor | JaggedTensor) or (
        isinstance(given, torch.Tensor) and given.dim() > 0
    )


def _leaves(given: Any) -> Iterator[Any]:
    """The tensors, keyed and jagged tensors in lists, tuples and dicts."""
    if _is_leaf(given):
        yield given
    elif isinstance(given, list | tuple | dict):
        for part in given.values() if isinstance(given, dict) else given:
            yield from _leaves(part)


def _is_lazy(given: Any) -> bool:
    return isinstance(given, LazyAwaitable)


def _is_result(given: Any) -> bool:
    return isinstance(given, torch.Tensor | KeyedTensor | JaggedTensor)


def _mapped(
    given: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = _is_leaf
) -> Any:
    """Lists, tuples and dicts like those given, with other leaves."""
    if is_leaf(given):
        return function(given)
    if isinstance(given, dict):
        return {name: _mapped(part, function, is_leaf) for name, part in given.items()}
    if isinstance(given, list | tuple):
        parts = [_mapped(part, function, is_leaf) for part in given]
        return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)
    return given


def _tensors_of(leaf: Any) -> list[torch.Tensor]:
    """The tensors of a leaf, which have a row for each sample, or for each value."""
    if isinstance(leaf, torch.Tensor):
        return [leaf]
    if isinstance(leaf, KeyedTensor):
        return [leaf.values()]
    weights = leaf.weights_or_none()
    return [leaf.values(), leaf.lengths(), *([] if weights is None else [weights])]


def _with_tensors(leaf: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The leaf with other tensors in place of `_tensors_of`."""
    if isinstance(leaf, torch.Tensor):
        return next(tensors)
    if isinstance(leaf, KeyedTensor):
        return KeyedTensor(leaf.keys(), leaf.length_per_key(), next(tensors))
    values, lengths = next(tensors), next(tensors)
    weights = None if leaf.weights_or_none() is None else next(tensors)
    return JaggedTensor(values, weights=weights, lengths=lengths)
