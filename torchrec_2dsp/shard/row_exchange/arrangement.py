"""The two arrangements of rows in their shards: by owner to train, by number to be read.

With `RowOwners.HASH` the owner of a row isn't the rank in whose shard TorchRec's state dicts show
it. While a model trains, each owner's rows lie in its shard; before the state is read or written
they move to where their numbers say, and back before the next lookup. So every tensor that a state
dict gives out is the shard itself, and checkpoints know nothing of owners.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.profiler import record_function

from torchrec_2dsp.plan.parameter_sharding import RowOwners, RowSpread, num_rows
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.shard.kernels import Kernel, TableShard
from torchrec_2dsp.shard.stages import Stage

_LABEL = "## arrange rows ##"

_BUFFER_BYTES = 64 * 2**20
"""Rows move some columns at a time, so that a large shard isn't there twice."""


@dataclass(frozen=True)
class SpreadShard:
    """A shard of a table whose rows are spread over their owners."""

    shard: TableShard
    spread: RowSpread
    """The spread of the table's rows over owners."""
    rows_per_owner: int
    """The last owners may have fewer."""


@dataclass(frozen=True)
class _Side:
    """This rank's rows in one arrangement, as they travel to or from the other one."""

    order: torch.Tensor
    """Places in the shard, ordered by the rank at the other end, then by row number."""
    counts: list[int]


def arrangement_of(
    plan: ModulePlan2D, kernels: Sequence[Kernel], owners: dist.ProcessGroup
) -> "RowArrangement | None":
    """Return the arrangement of a module's tables, `None` if all are in blocks."""
    shards = {shard.table: shard for kernel in kernels for shard in kernel.shards()}
    spread = []
    for name, table in plan.tables():
        rows = num_rows(table)
        if table.owners is RowOwners.HASH and rows is not None:
            rows_per_owner = cast(Any, table.sharding_spec).shards[0].shard_sizes[0]
            spread.append(SpreadShard(shards[name], RowSpread(rows), rows_per_owner))
    return RowArrangement(spread, owners) if spread else None


class RowArrangement(Stage):
    """Moves rows of a module's spread tables between the two arrangements."""

    def __init__(self, shards: Sequence[SpreadShard], group: dist.ProcessGroup) -> None:
        self._shards = list(shards)
        self._group = group
        self._is_by_owner = False

    def before_use(self) -> None:
        """Move every row to its owner.

        Collectives:
            All-to-alls on the group, unless that is so: of the tables and their optimizer state.
        """
        if not self._is_by_owner:
            self._move()

    def before_read(self) -> None:
        """Move every row to where state dicts show it.

        Collectives:
            All-to-alls on the group, unless that is so: of the tables and their optimizer state.
        """
        if self._is_by_owner:
            self._move()

    # The state may be read in inference mode, whose tensors can't be changed afterwards.
    @torch.inference_mode(mode=False)
    @torch.no_grad()
    def _move(self) -> None:
        with record_function(_LABEL):
            for spread_shard in self._shards:
                owned, numbered = self._sides(spread_shard)
                start, end = (owned, numbered) if self._is_by_owner else (numbered, owned)
                for tensor in spread_shard.shard.tensors.values():
                    # Unseen by autograd: before a backward, rows are back where its lookup was.
                    for part in _in_parts(tensor.data):
                        self._send(part, start, end)
        self._is_by_owner = not self._is_by_owner

    def _sides(self, spread_shard: SpreadShard) -> tuple[_Side, _Side]:
        """Return the shard's contents by owner, and by number."""
        shard, num_ranks = spread_shard.shard, dist.get_world_size(self._group)
        numbers = torch.arange(shard.row, shard.row + shard.num_rows, device=shard.device)
        rows = spread_shard.spread.rows(numbers)
        readers = rows // spread_shard.rows_per_owner
        owners = spread_shard.spread.positions(numbers) // spread_shard.rows_per_owner

        def counts(ranks: torch.Tensor) -> list[int]:
            return torch.bincount(ranks, minlength=num_ranks).tolist()

        # By row number is by reader, too.
        return (
            _Side(rows.argsort(), counts(readers)),
            _Side(owners.argsort(stable=True), counts(owners)),
        )

    def _send(self, part: torch.Tensor, start: _Side, end: _Side) -> None:
        leaving = part[start.order]
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving, end.counts, start.counts, group=self._group)
        part[end.order] = coming


def _in_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield some columns at a time, as views."""
    if tensor.dim() == 1:
        yield tensor
        return
    column_bytes = max(1, tensor.shape[0] * tensor.element_size())
    yield from tensor.split(max(1, _BUFFER_BYTES // column_bytes), dim=1)
