"""Count the collectives that this rank issues, and the bytes that row codecs save.

torch.distributed's Python calls, functional collectives (TorchRec's all-to-alls) and DDP's C++
reducer all end in a dispatcher operator, where they are counted. A group that bypasses the
dispatcher calls `note`. Replica syncs report their saved bytes in a `SyncReport`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from torchrec_2dsp._compat.c10d import (
    TorchDispatchMode,
    argument_names,
    group_named,
    operator_name,
    tensors_in,
)

_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_base": "all_gather_into_tensor",
    "reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
}
"""The Python API's names for dispatcher operators, where they differ."""

_NOT_COLLECTIVES = {"wait_tensor", "wrap_tensor_autograd"}
_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}


@dataclass(frozen=True)
class Collective:
    """One collective that this rank issued."""

    op: str
    """The name in `torch.distributed`, without ``async`` and in-place suffixes."""
    ranks: tuple[int, ...]
    """The group's world ranks."""
    group: str
    """The group's description: a mesh axis ends in ``shard`` or ``replicate``."""
    num_bytes: int
    """This rank's input size, its own part of an all-to-all included."""

    @property
    def sent_bytes(self) -> float:
        """The approximate bytes that an ideal algorithm sends from this rank to others.

        All parts of an all-to-all are assumed to have the same size.
        """
        num_others = len(self.ranks) - 1
        if self.op.startswith("all_reduce"):
            return 2.0 * self.num_bytes * num_others / len(self.ranks)
        if self.op.startswith(("all_to_all", "reduce_scatter")):
            return self.num_bytes * num_others / len(self.ranks)
        if self.op.startswith("all_gather"):
            return float(self.num_bytes * num_others)
        return float(self.num_bytes)


@dataclass
class Collectives:
    """The collectives seen by `count_collectives`, in order."""

    records: list[Collective] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Count the calls by operation."""
        return dict(Counter(record.op for record in self.records))

    def total_bytes(self) -> int:
        """Sum the input bytes over all collectives."""
        return sum(record.num_bytes for record in self.records)


@contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Count this rank's collectives inside the context, backward passes included."""
    seen = Collectives()
    _NOTEBOOKS.append(seen.records)
    try:
        with _Recorder(seen.records):
            yield seen
    finally:
        # By identity: two contexts may have equal counts.
        _NOTEBOOKS[:] = [other for other in _NOTEBOOKS if other is not seen.records]


def note(op: str, group: dist.ProcessGroup, num_bytes: int) -> None:
    """Count a collective that bypasses the dispatcher, inside `count_collectives`."""
    for records in _NOTEBOOKS:
        ranks = tuple(dist.get_process_group_ranks(group))
        records.append(Collective(op, ranks, group.group_desc, num_bytes))


_NOTEBOOKS: list[list[Collective]] = []
"""The records of all open `count_collectives` contexts."""


class _Recorder(TorchDispatchMode):
    def __init__(self, records: list[Collective]) -> None:
        super().__init__()
        self._records = records

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        op = operator_name(func).strip("_")
        if func.namespace in _NAMESPACES and op not in _NOT_COLLECTIVES:
            named = dict(zip(argument_names(func), args, strict=False)) | dict(kwargs)
            self._records.append(_record(op, named))
        return func(*args, **kwargs)


def _record(op: str, arguments: dict[str, Any]) -> Collective:
    group = _group(arguments)
    return Collective(
        op=_NAMES.get(op, op),
        ranks=tuple(dist.get_process_group_ranks(group)),
        group=group.group_desc,
        num_bytes=_input_bytes(op, arguments, group),
    )


def _group(arguments: dict[str, Any]) -> dist.ProcessGroup:
    if "group_name" in arguments:
        return group_named(arguments["group_name"])
    unbox: Callable[[Any], dist.ProcessGroup] = dist.ProcessGroup.unbox
    return unbox(arguments["process_group"])


def _input_bytes(op: str, arguments: dict[str, Any], group: dist.ProcessGroup) -> int:
    if op in ("barrier", "monitored_barrier") or op.startswith("recv"):
        return 0
    if op == "broadcast" and arguments.get("root_rank") not in (None, group.rank()):
        return 0
    inputs = [value for name, value in arguments.items() if name.startswith("input")]
    tensors = inputs or [value for name, value in arguments.items() if name.startswith("tensor")]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(tensors))


@dataclass
class EncodedBytes:
    """The bytes of rows, bags and their gradients before and after a codec.

    Each number counts once, however many ranks receive it, even if only this rank does.
    """

    before: int = 0
    """The numbers' bytes in float32."""
    after: int = 0
    """The encoded numbers' bytes, scales included."""


@contextmanager
def count_encoded() -> Iterator[EncodedBytes]:
    """Count what this rank encodes inside the context, backward passes included.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.codecs.rows import IntegerRows
        >>> from torchrec_2dsp.comms.counting import count_encoded
        >>> from torchrec_2dsp.comms.row_wire import StockCodec
        >>> codec = StockCodec(IntegerRows(bits=4), dim=64)
        >>> with count_encoded() as encoded:
        ...     sent = codec.encode(torch.zeros(3 * 64))
        >>> encoded
        EncodedBytes(before=768, after=102)
    """
    counted = EncodedBytes()
    _OPEN.append(counted)
    try:
        yield counted
    finally:
        # By identity: two contexts may have equal counts.
        _OPEN[:] = [other for other in _OPEN if other is not counted]


def note_encoded(before: int, after: int) -> None:
    """Count encoded numbers inside `count_encoded`."""
    for counted in _OPEN:
        counted.before += before
        counted.after += after


_OPEN: list[EncodedBytes] = []
"""The counts of all open `count_encoded` contexts."""
