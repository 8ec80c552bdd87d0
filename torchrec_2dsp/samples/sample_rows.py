"""`SampleRows`: batches taken apart into samples, and sent to other ranks by two all-to-alls.

The first message holds what is equally large for all samples: rows of tensors, and the lengths of
jagged ones. From the lengths each rank knows the size of the second message, which holds values.
"""

import copy
import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_2dsp.comms.collectives import start_all_to_all_ragged
from torchrec_2dsp.errors import InputError, UnsupportedError

_CONSTANTS = (type(None), bool, int, float, str, bytes, enum.Enum, torch.device, torch.dtype)


@dataclass(frozen=True)
class Jagged:
    """A jagged tensor's numbers, sample by sample."""

    keys: tuple[str, ...]
    """Feature names; empty for a `JaggedTensor`, which has one feature."""

    lengths: torch.Tensor
    """Samples x features."""

    contents: tuple[torch.Tensor, ...]
    """Values, and weights if there are any."""


@dataclass(frozen=True)
class SampleRows:
    """A batch's samples."""

    template: Any
    """The batch, for everything in it that isn't a sample."""

    num_samples: int
    fixed: tuple[torch.Tensor, ...]
    """Tensors with a row per sample."""

    jagged: tuple[Jagged, ...]
    """Tensors with any number of rows per sample."""

    @classmethod
    def of(cls, batch: Any) -> "SampleRows":
        """Take a batch apart.

        Raises:
            UnsupportedError: it contains something other than samples.
            InputError: tensors disagree on the number of samples.
        """
        leaves = list(_tensors(batch).values())
        for leaf in leaves:
            _check_leaf(leaf)
        fixed = tuple(_rows_of(leaf) for leaf in leaves if not isinstance(leaf, _JAGGED))
        jagged = tuple(_jagged_of(leaf) for leaf in leaves if isinstance(leaf, _JAGGED))
        sizes = [len(rows) for rows in fixed] + [len(part.lengths) for part in jagged]
        if not sizes:
            raise UnsupportedError(
                f"a batch of type {type(batch).__name__} has no tensors, so it has no samples"
            )
        if len(set(sizes)) > 1:
            raise InputError(
                f"the tensors of a batch have {', '.join(map(str, sizes))} samples; give each "
                "tensor a row for each sample"
            )
        for path, values in _leaves(batch).items():
            if not _is_tensor(values) and len(values) == sizes[0] > 0:
                raise UnsupportedError(
                    f"a batch holds a value for each of its {sizes[0]} samples in {path}, a "
                    f"{type(values).__name__}, which can't follow samples; make it a tensor"
                )
        return cls(batch, sizes[0], fixed, jagged)

    def none(self) -> "SampleRows":
        """Return this form of batch without samples."""
        jagged = tuple(
            Jagged(part.keys, part.lengths[:0], tuple(content[:0] for content in part.contents))
            for part in self.jagged
        )
        return SampleRows(self.template, 0, tuple(rows[:0] for rows in self.fixed), jagged)

    @property
    def form(self) -> str:
        """The text that must be equal on all ranks."""
        rows, parts, lines = iter(self.fixed), iter(self.jagged), []
        for path, leaf in _tensors(self.template).items():
            contents: Sequence[torch.Tensor]
            if isinstance(leaf, _JAGGED):
                part = next(parts)
                contents = part.contents
                what = f"{', '.join(part.keys) or 'values'}: {part.lengths.dtype} lengths of "
            else:
                contents, what = [next(rows)], ""
                if isinstance(leaf, KeyedTensor):
                    what = f"KeyedTensor with {leaf.keys()} of {leaf.length_per_key()} columns: "
            texts = [f"{content.dtype} of shape {tuple(content.shape[1:])}" for content in contents]
            lines.append(f"{path or 'batch'}: {what}{' and '.join(texts)}")
        return "\n".join(lines)

    def lengths(self, features: Sequence[str]) -> torch.Tensor:
        """Return each sample's number of elements in these features, or in all.

        Raises:
            InputError: there is no such feature.
        """
        total = torch.zeros(self.num_samples, dtype=torch.int64)
        missing = set(features)
        if not self.jagged:
            raise InputError("a batch without jagged tensors has no lengths; give lengths=function")
        for part in self.jagged:
            columns = [n for n, key in enumerate(part.keys) if key in missing] if features else None
            missing -= set(part.keys)
            total += (part.lengths if columns is None else part.lengths[:, columns]).sum(1)
        if missing:
            names = ", ".join(key for part in self.jagged for key in part.keys)
            raise InputError(
                f"the batch has no feature {min(missing)!r}; use some of {names or 'no names'}"
            )
        return total

    def put_together(self, fixed: Sequence[torch.Tensor], jagged: Sequence[Jagged]) -> Any:
        """Rebuild the batch with other samples."""
        rows, parts = iter(fixed), iter(jagged)

        def replaced(path: str, leaf: Any) -> Any:
            if not _is_tensor(leaf):
                return leaf
            if isinstance(leaf, _JAGGED):
                return _jagged_like(leaf, next(parts))
            new = next(rows)
            if isinstance(leaf, KeyedTensor):
                return KeyedTensor(leaf.keys(), leaf.length_per_key(), new)
            return new

        return _mapped(self.template, replaced)


_JAGGED = (KeyedJaggedTensor, JaggedTensor)


def take_segments(
    values: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Concatenate segments of a tensor.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.samples.sample_rows import take_segments
        >>> take_segments(torch.arange(6), torch.tensor([4, 0]), torch.tensor([2, 1]))
        tensor([4, 5, 0])
    """
    lengths = lengths.long()
    shift = starts - (lengths.cumsum(0) - lengths)
    places = torch.repeat_interleave(shift, lengths)
    return values[places + torch.arange(len(places))]


def starts_of(lengths: torch.Tensor) -> torch.Tensor:
    """Return the starts of segments with these lengths."""
    lengths = lengths.long()
    return lengths.cumsum(0) - lengths


def _is_tensor(given: Any) -> bool:
    if isinstance(given, torch.Tensor):
        return given.dim() > 0
    return isinstance(given, KeyedTensor | KeyedJaggedTensor | JaggedTensor)


def _leaves(given: Any) -> dict[str, Any]:
    """Return the tensors, and the lists without any, by path and in order."""
    leaves: dict[str, Any] = {}

    def note(path: str, leaf: Any) -> Any:
        leaves[path] = leaf
        return leaf

    _mapped(given, note)
    return leaves


def _tensors(given: Any) -> dict[str, Any]:
    return {path: leaf for path, leaf in _leaves(given).items() if _is_tensor(leaf)}


def _mapped(given: Any, function: Callable[[str, Any], Any], path: str = "") -> Any:
    """Copy nested containers with other leaves, by a function of a leaf and its path."""
    if _is_tensor(given):
        return function(path, given)
    if isinstance(given, (*_CONSTANTS, torch.Tensor)):
        return given
    if isinstance(given, dict):
        return {name: _mapped(part, function, f"{path}[{name!r}]") for name, part in given.items()}
    if isinstance(given, list | tuple):
        if not hasattr(given, "_fields") and not any(map(_tensors, given)):
            return function(path, given)
        parts = [_mapped(part, function, f"{path}[{n}]") for n, part in enumerate(given)]
        return type(given)(*parts) if hasattr(given, "_fields") else type(given)(parts)
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        names = [field.name for field in dataclasses.fields(given)]
        for name, value in getattr(given, "__dict__", {}).items():
            if name not in names and _leaves(value):
                raise UnsupportedError(
                    f"a batch of type {type(given).__name__} has {name!r} beside its fields, whose "
                    "samples would stay behind; make it a field"
                )
        copied = copy.copy(given)
        for name in names:
            # Also of frozen dataclasses, of which this is a copy that nobody has yet.
            part = _mapped(getattr(given, name), function, f"{path}.{name}")
            object.__setattr__(copied, name, part)
        return copied
    raise UnsupportedError(
        f"a batch holds a value of type {type(given).__name__}, whose samples can't be told apart; "
        "use tensors, keyed and jagged tensors in dataclasses, dicts, lists or tuples"
    )


def _check_leaf(leaf: Any) -> None:
    """Refuse a leaf whose samples can't travel."""
    tensors = [leaf if isinstance(leaf, torch.Tensor) else leaf.values()]
    if isinstance(leaf, _JAGGED) and leaf.weights_or_none() is not None:
        tensors.append(leaf.weights())
    if any(tensor.device.type != "cpu" for tensor in tensors):
        raise UnsupportedError(
            f"a batch is on {tensors[0].device} already; balance it on the CPU, before it is copied"
        )
    if any(tensor.requires_grad for tensor in tensors):
        raise UnsupportedError(
            "a batch holds a tensor that needs a gradient, which can't follow a sample to another "
            "rank; compute it after the batch was balanced"
        )


def _rows_of(leaf: Any) -> torch.Tensor:
    return leaf.values() if isinstance(leaf, KeyedTensor) else leaf


def _jagged_of(leaf: KeyedJaggedTensor | JaggedTensor) -> Jagged:
    """Split a keyed or jagged tensor by sample."""
    weights = leaf.weights_or_none()
    contents = (leaf.values(), *([] if weights is None else [weights]))
    if isinstance(leaf, JaggedTensor):
        return Jagged((), leaf.lengths().view(-1, 1), contents)
    if leaf.variable_stride_per_key() or leaf.inverse_indices_or_none() is not None:
        raise UnsupportedError(
            "a batch with a batch size for each feature, or with inverse_indices, can't be "
            "balanced: samples share bags; balance it before bags are made distinct"
        )
    num_keys = len(leaf.keys())
    by_key = leaf.lengths().view(num_keys, leaf.stride())
    starts = starts_of(by_key.reshape(-1)).view_as(by_key).t().reshape(-1)
    lengths = by_key.t().contiguous()
    flat = lengths.view(-1)
    return Jagged(
        tuple(leaf.keys()),
        lengths,
        tuple(take_segments(content, starts, flat) for content in contents),
    )


def _jagged_like(leaf: KeyedJaggedTensor | JaggedTensor, part: Jagged) -> Any:
    """Rebuild a keyed or jagged tensor with other samples."""
    if isinstance(leaf, JaggedTensor):
        values, *weights = part.contents
        lengths = part.lengths.view(-1)
        return JaggedTensor(values, weights=weights[0] if weights else None, lengths=lengths)
    starts = starts_of(part.lengths.reshape(-1)).view_as(part.lengths).t().reshape(-1)
    lengths = part.lengths.t().reshape(-1)
    values, *weights = [take_segments(content, starts, lengths) for content in part.contents]
    return KeyedJaggedTensor(
        keys=list(part.keys),
        values=values,
        weights=weights[0] if weights else None,
        lengths=lengths,
        stride=len(part.lengths),
    )


def row_bytes(rows: torch.Tensor) -> int:
    """Return a row's size in bytes."""
    return math.prod(rows.shape[1:]) * rows.element_size()


def send_samples(
    own: SampleRows,
    receivers: torch.Tensor,
    counts: Sequence[int],
    group: dist.ProcessGroup,
) -> tuple[Any, int]:
    """Send each sample to its rank; return this rank's new batch and the bytes it sent.

    Collectives:
        Two all-to-alls of bytes, waited for.
    """
    order = receivers.argsort(stable=True)
    num_ranks = dist.get_world_size(group)
    sent_counts = receivers.bincount(minlength=num_ranks).tolist()
    tables = [*own.fixed, *(part.lengths for part in own.jagged)]
    packed = torch.cat([_bytes_of(table) for table in tables], dim=1)[order]
    arrived = start_all_to_all_ragged(packed.split(sent_counts), counts, group).by_rank()
    columns = _unpacked(torch.cat(arrived), tables)
    fixed, lengths = columns[: len(own.fixed)], columns[len(own.fixed) :]
    messages = _messages(own.jagged, order, sent_counts)
    by_rank = [
        _content_bytes(part, part_lengths, counts)
        for part, part_lengths in zip(own.jagged, lengths, strict=True)
    ]
    # Each rank's message holds the contents of all jagged tensors, one after the other.
    sizes = [[size for part in by_rank for size in part[rank]] for rank in range(num_ranks)]
    received = start_all_to_all_ragged(messages, [sum(size) for size in sizes], group).by_rank()
    pieces = [message.split(size) for message, size in zip(received, sizes, strict=True)]
    contents = [content for part in own.jagged for content in part.contents]
    arrived_contents = iter(
        torch.cat(list(from_ranks)).view(content.dtype).view(-1, *content.shape[1:])
        for from_ranks, content in zip(zip(*pieces, strict=True), contents, strict=True)
    )
    jagged = [
        Jagged(part.keys, part_lengths, tuple(next(arrived_contents) for _ in part.contents))
        for part, part_lengths in zip(own.jagged, lengths, strict=True)
    ]
    own_rank = dist.get_rank(group)
    num_bytes = sum(
        message.numel() + count * packed.shape[1]
        for rank, (message, count) in enumerate(zip(messages, sent_counts, strict=True))
        if rank != own_rank
    )
    return own.put_together(fixed, jagged), num_bytes


def _bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """View a tensor as rows x bytes."""
    width = row_bytes(rows)
    return rows.contiguous().view(-1).view(torch.uint8).view(len(rows), width)


def _unpacked(packed: torch.Tensor, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Split bytes into the tensors whose rows were put side by side."""
    parts = packed.split([row_bytes(table) for table in tables], dim=1)
    return [
        # A copy begins where its type may begin.
        part.clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(table.dtype)
        .view(len(packed), *table.shape[1:])
        for part, table in zip(parts, tables, strict=True)
    ]


def _messages(
    parts: Sequence[Jagged], order: torch.Tensor, counts: Sequence[int]
) -> list[torch.Tensor]:
    """Return this rank's contents for each rank, as bytes."""
    pieces: list[list[torch.Tensor]] = [[torch.empty(0, dtype=torch.uint8)] for _ in counts]
    for part in parts:
        lengths = part.lengths.sum(1)
        starts, ordered = starts_of(lengths)[order], lengths[order]
        elements = [int(of_rank.sum()) for of_rank in ordered.split(list(counts))]
        for content in part.contents:
            in_order = take_segments(content, starts, ordered)
            for rank, rows in enumerate(in_order.split(elements)):
                pieces[rank].append(rows.contiguous().view(-1).view(torch.uint8))
    return [torch.cat(of_rank) for of_rank in pieces]


def _content_bytes(part: Jagged, lengths: torch.Tensor, counts: Sequence[int]) -> list[list[int]]:
    """Return the bytes of each jagged content from each rank."""
    elements = [int(of_rank.sum()) for of_rank in lengths.split(list(counts))]
    return [[number * row_bytes(content) for content in part.contents] for number in elements]
