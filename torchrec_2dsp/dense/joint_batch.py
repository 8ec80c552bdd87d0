"""`JointBatch`: runs a split part on several ranks' batches at once.

    rank 0: rows 0 to 5   --gather-->  rows 0 to 9   --part-->  rows 0 to 9  --> rows 0 to 5
    rank 1: rows 6 to 9   ---------->  rows 0 to 9   -------->  rows 0 to 9  --> rows 6 to 9

Each rank gives its own rows and gets its own back, so the rest of the model, the tables and the
loss are independent of the others.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import ExitStack
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_2dsp.comms.collectives import as_bytes
from torchrec_2dsp.dense.dense_parts import (
    check_called_alike,
    differentiable_once,
    draw_seed,
    drawing_from,
    in_words,
    state_in_words,
)
from torchrec_2dsp.errors import UnsupportedError


class JointBatch:
    """Gathers a module's inputs over a group's ranks, and takes this rank's rows back.

    Parameter gradients are the mean, over the group's ranks, of the gradients of each rank's loss;
    input gradients are those of this rank's loss. In training, random numbers inside the module,
    such as dropout's, are the same on all of them.
    """

    def __init__(self, name: str, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._name, self._group = name, group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._calls: list[tuple[list[int], ExitStack]] = []
        """The ranks' numbers of samples, and the context that ends with the module's call."""
        # Before existing hooks, which see what the module sees.
        module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        module.register_forward_hook(self._after, always_call=True)

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather all arguments.

        Raises:
            TwoDError: on all ranks, if calls differ, or an argument can't be joined.

        Collectives:
            An all-gather of sizes and a seed, waited for, or two if there are many tensors; then
            one all-gather per tensor.
        """
        # TorchRec's tables may not have waited for their outputs yet.
        args, kwargs = _mapped(
            (args, kwargs), lambda lazy: lazy.wait(), lambda given: isinstance(given, LazyAwaitable)
        )
        device, trains = next(module.parameters()).device, torch.is_grad_enabled()
        leaves, call = self._described({**dict(enumerate(args)), **kwargs}, device)
        parts = [tensor for leaf in leaves for tensor in _tensors_of(leaf)]
        sizes = [part.shape[0] for part in parts]
        # Its length doesn't depend on the arguments.
        digest, seed = crc32(str(call).encode()), draw_seed() if trains else 0
        message = [digest, seed, *sizes, *[0] * _NUM_SIZES][: 2 + _NUM_SIZES]
        digests, seeds, *by_part = self._of_ranks(message, device)
        if len({*digests}) > 1 or isinstance(call, UnsupportedError):
            calls = [call] * self._num_ranks
            dist.all_gather_object(calls, call, group=self._group)
            check_called_alike(repr(self._name), calls, self._group, "tensor-parallel group")
        by_part += self._of_ranks(sizes[_NUM_SIZES:], device)
        by_part = by_part[: len(parts)]
        gathered = [
            cast(torch.Tensor, _Gathered.apply(part, of_part, self._rank, self._group))
            for part, of_part in zip(parts, by_part, strict=True)
        ]
        # A jagged tensor's lengths count samples, and come after its values.
        samples = by_part[isinstance(leaves[0], JaggedTensor)]
        are_plain = [isinstance(leaf, torch.Tensor) for leaf in leaves for _ in _tensors_of(leaf)]
        for part, whole, of_part, is_plain in zip(parts, gathered, by_part, are_plain, strict=True):
            if is_plain and of_part != samples and _is_equal_on_ranks(whole, of_part):
                raise UnsupportedError(
                    f"{self._name!r} is given a {_kind_of(part)} that is equal on all ranks, for "
                    f"{samples[self._rank]} samples, but arguments are joined over ranks; make "
                    "what isn't a batch a buffer of the module"
                )
        context = ExitStack()
        if trains:
            context.enter_context(drawing_from(seeds[0], device))
        self._calls.append((samples, context))
        tensors = iter(gathered)
        return _mapped((args, kwargs), lambda leaf: _with_tensors(leaf, tensors))

    def _described(
        self, given: Mapping[Any, Any], device: torch.device
    ) -> tuple[list[Any], str | UnsupportedError]:
        """Return the leaves to join, and a text of what must be equal on all ranks, or an error."""
        leaves, words = [], []
        for name, leaf in leaves_of(given):
            if _is_leaf(leaf):
                leaves.append(leaf)
                words.append(f"{name}: {_leaf_in_words(leaf)}")
            elif _is_unknown(leaf):
                return [], UnsupportedError(
                    f"{self._name!r} is given a {_kind_of(leaf)}, which can't be joined with "
                    "other ranks'; give tensors whose first dimension is the batch, KeyedTensors, "
                    "JaggedTensors, or lists, dicts or dataclasses of them"
                )
        if not leaves:
            return [], UnsupportedError(
                f"{self._name!r} is called without tensors, so it has no batch"
            )
        return leaves, f"{', '.join(words)} {state_in_words(device.type)}"

    def _of_ranks(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Gather equally many numbers from each rank, by place."""
        if not numbers:
            return []
        own = torch.tensor(numbers, device=device)
        of_ranks = own.new_empty(self._num_ranks * own.numel())
        dist.all_gather_single(of_ranks, own, group=self._group)
        return of_ranks.view(self._num_ranks, -1).t().tolist()

    def _after(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Take this rank's rows; in the backward, gather their gradients."""
        if not self._calls:
            # The call failed before the module's forward.
            return None
        sizes, call = self._calls.pop()
        call.close()

        def own_rows(rows: Any) -> torch.Tensor:
            if not isinstance(rows, torch.Tensor) or rows.shape[:1] != (sum(sizes),):
                raise UnsupportedError(
                    f"{self._name!r} gives a {_kind_of(rows)} for {sum(sizes)} samples; give "
                    "tensors whose first dimension is the batch, or lists, dicts or dataclasses of "
                    "them"
                )
            return cast(torch.Tensor, _OwnRows.apply(rows, sizes, self._rank, self._group))

        return _mapped(output, own_rows, is_leaf=_is_result)


_NUM_SIZES = 30
"""The number of sizes in the first message."""

_JOINED = "a module that TensorParallelDense has split"


class _Gathered(torch.autograd.Function):
    """All ranks' rows. Each rank has the whole gradient of the mean of their losses."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.rank = sizes, rank
        return _gather(rows, sizes, group)

    @staticmethod
    @differentiable_once(_JOINED)
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        own = grads[0].split(ctx.sizes)[ctx.rank]
        return own * len(ctx.sizes), None, None, None


class _OwnRows(torch.autograd.Function):
    """This rank's rows, whose loss is a share of the group's mean."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return rows.split(sizes)[rank].clone()

    @staticmethod
    @differentiable_once(_JOINED)
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _gather(grads[0], ctx.sizes, ctx.group) / len(ctx.sizes), None, None, None


def _gather(rows: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Gather all ranks' rows, one rank after another."""
    largest = max(sizes)
    own = rows.contiguous()
    if own.shape[0] < largest:
        padding = own.new_zeros(largest - own.shape[0], *own.shape[1:])
        own = torch.cat([own, padding])
    gathered = own.new_empty(len(sizes) * largest, *own.shape[1:])
    dist.all_gather_single(as_bytes(gathered), as_bytes(own), group=group)
    if min(sizes) == largest:
        return gathered
    parts = gathered.split(largest)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _is_equal_on_ranks(whole: torch.Tensor, sizes: Sequence[int]) -> bool:
    if len(sizes) == 1 or len({*sizes}) > 1 or not whole.numel():
        return False
    by_rank = whole.detach().view(len(sizes), -1)
    return bool((by_rank == by_rank[0]).all())


def _is_leaf(given: Any) -> bool:
    return isinstance(given, KeyedTensor | JaggedTensor) or (
        isinstance(given, torch.Tensor) and given.dim() > 0
    )


def leaves_of(given: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield everything in lists, tuples, dicts and dataclasses, or given outside them, by name."""
    contents = None if _is_leaf(given) else _contents(given)
    if contents is None:
        yield name, given
        return
    for key, part in contents:
        yield from leaves_of(part, f"{name}.{key}" if name else str(key))


def _contents(given: Any) -> list[tuple[Any, Any]] | None:
    """Return a container's parts by key, place or field; `None` for anything else."""
    if isinstance(given, MutableMapping):
        return list(given.items())
    if isinstance(given, list | tuple):
        return list(enumerate(given))
    if is_dataclass(given) and not isinstance(given, type):
        names = [part.name for part in fields(given)]
        return [(name, getattr(given, name)) for name in names if hasattr(given, name)]
    return None


def _is_unknown(given: Any) -> bool:
    """Return whether an object that is no container holds values of a rank's samples."""
    if isinstance(given, torch.Tensor):
        return given.is_floating_point()
    if isinstance(given, Iterator | KeyedJaggedTensor):
        return True
    if isinstance(given, Mapping | Set | deque):
        held = list(given.values() if isinstance(given, Mapping) else given)
    elif callable(given) or not hasattr(given, "__dict__"):
        return False
    else:
        held = list(vars(given).values())
    return any(_is_leaf(part) or isinstance(part, torch.Tensor) for _, part in leaves_of(held))


def _kind_of(given: Any) -> str:
    shape = f" {tuple(given.shape)}" if isinstance(given, torch.Tensor) else ""
    return f"{type(given).__name__}{shape}"


def _is_result(given: Any) -> bool:
    if isinstance(given, torch.Tensor | KeyedTensor | JaggedTensor):
        return True
    return _contents(given) is None and _is_unknown(given)


def _mapped(
    given: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = _is_leaf
) -> Any:
    """Copy lists, tuples, dicts and dataclasses with mapped leaves; return anything else itself.

    A caller may get results through these objects.
    """
    if is_leaf(given):
        return function(given)
    contents = _contents(given)
    if contents is None:
        return given
    parts = {key: _mapped(part, function, is_leaf) for key, part in contents}
    if all(parts[key] is part for key, part in contents):
        return given
    if isinstance(given, list | tuple):
        values = parts.values()
        return type(given)(*values) if hasattr(given, "_fields") else type(given)(values)
    mapped = copy(given)
    for key, part in parts.items():
        if isinstance(mapped, MutableMapping):
            mapped[key] = part
        else:
            # As a frozen dataclass's own `__init__` does.
            object.__setattr__(mapped, key, part)
    return mapped


def _tensors_of(leaf: Any) -> list[torch.Tensor]:
    """Return a leaf's tensors, which have a row per sample, or per value."""
    if isinstance(leaf, torch.Tensor):
        return [leaf]
    if isinstance(leaf, KeyedTensor):
        return [leaf.values()]
    weights = leaf.weights_or_none()
    return [leaf.values(), leaf.lengths(), *([] if weights is None else [weights])]


def _leaf_in_words(leaf: Any) -> str:
    words = [in_words(tensor) for tensor in _tensors_of(leaf)]
    if isinstance(leaf, KeyedTensor):
        words.append(str(dict(zip(leaf.keys(), leaf.length_per_key(), strict=True))))
    joined = ", ".join(words)
    return joined if isinstance(leaf, torch.Tensor) else f"{type(leaf).__name__}({joined})"


def _with_tensors(leaf: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Rebuild a leaf with other tensors in place of `_tensors_of`'s."""
    if isinstance(leaf, torch.Tensor):
        return next(tensors)
    if isinstance(leaf, KeyedTensor):
        return KeyedTensor(leaf.keys(), leaf.length_per_key(), next(tensors))
    values, lengths = next(tensors), next(tensors)
    weights = None if leaf.weights_or_none() is None else next(tensors)
    return JaggedTensor(values, weights=weights, lengths=lengths)
