"""`RowMerge`: the row gradients of several ranks, added and applied on each of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.collectives import all_gather_ragged
from torchrec_2dsp.errors import SyncError
from torchrec_2dsp.rows.capture import RowCapture
from torchrec_2dsp.rows.gradients import RowGradients, TableGradients, sum_tables
from torchrec_2dsp.rows.update import RowUpdater


class MergeStats(NamedTuple):
    """What one merge moved."""

    num_tensors: int
    """Tables that were updated."""
    num_rows: int
    """Distinct rows that were updated."""
    num_bytes: int
    """Bytes that this rank sent to other ranks."""


class RowMerge:
    """Merges what some TBEs captured over a group of ranks that hold the same rows.

    All ranks of the group add the same numbers in the same order, so their copies stay equal
    bit for bit.
    """

    def __init__(self, captures: Sequence[RowCapture], group: dist.ProcessGroup) -> None:
        """
        Args:
            captures: the TBEs, in the same order on every rank.
            group: the ranks that hold copies of their rows.
        """
        self._captures = list(captures)
        self._updaters = [RowUpdater(capture.tbe) for capture in captures]
        self._group = group
        self._world_size = dist.get_world_size(group)
        for capture in self._captures:
            capture.num_ranks = self._world_size

    @property
    def pending(self) -> bool:
        """Whether a backward waits to be merged."""
        return any(capture.num_pending for capture in self._captures)

    # A sync point may be reached in inference mode, whose tensors autograd can't use.
    @torch.inference_mode(mode=False)
    def run(self) -> MergeStats:
        """Merge and apply every pending backward, oldest first.

        Collectives:
            Per backward one all-gather of a header and two all-to-alls (row ids, gradients) on
            the group, none if it has one rank.
        """
        taken = [capture.take() for capture in self._captures]
        total = MergeStats(0, 0, 0)
        for backward in range(max(map(len, taken), default=0)):
            # A TBE whose output didn't reach the loss has nothing to merge, on any rank.
            touched = [index for index, entries in enumerate(taken) if len(entries) > backward]
            merged, num_bytes = self._merged([taken[index][backward] for index in touched])
            for index, gradients in zip(touched, merged, strict=True):
                self._updaters[index].apply(gradients)
            total = MergeStats(
                total.num_tensors + sum(len(gradients.tables) for gradients in merged),
                total.num_rows + sum(gradients.num_rows for gradients in merged),
                total.num_bytes + num_bytes,
            )
        return total

    def _merged(self, local: list[RowGradients]) -> tuple[list[RowGradients], int]:
        tables = [table for gradients in local for table in gradients.tables]
        if self._world_size == 1:
            return local, 0
        headers = self._exchange_headers(local, tables)
        counts = [header[: len(tables)] for header in headers]
        num_rows = [sum(count) for count in counts]
        num_values = [
            sum(n * table.grads.shape[1] for n, table in zip(count, tables, strict=True))
            for count in counts
        ]
        sent_rows = torch.cat([table.rows for table in tables])
        sent_values = torch.cat([table.grads.reshape(-1) for table in tables])
        rows = all_gather_ragged(sent_rows, num_rows, self._group)
        values = all_gather_ragged(sent_values, num_values, self._group)
        peers = [
            _unpack(peer_rows, peer_values, count, tables)
            for peer_rows, peer_values, count in zip(rows, values, counts, strict=True)
        ]
        divisor = float(self._captures[0].divisor)
        summed = [sum_tables(list(parts), divisor) for parts in zip(*peers, strict=True)]
        payload_bytes = sent_rows.nbytes + sent_values.nbytes + len(headers[0]) * 8
        return (
            self._regrouped(summed, local, [header[len(tables) :] for header in headers]),
            payload_bytes * (self._world_size - 1),
        )

    def _exchange_headers(
        self, local: list[RowGradients], tables: list[TableGradients]
    ) -> list[list[int]]:
        """Every rank's row counts by table, then the bits of its learning rates."""
        rates = torch.tensor(
            [gradients.step.learning_rate for gradients in local], dtype=torch.float64
        )
        header = torch.tensor(
            [table.rows.numel() for table in tables] + rates.view(torch.int64).tolist(),
            device=tables[0].rows.device,
        )
        gathered = [torch.empty_like(header) for _ in range(self._world_size)]
        dist.all_gather(gathered, header, group=self._group)
        return torch.stack(gathered).tolist()

    def _regrouped(
        self,
        tables: list[TableGradients],
        local: list[RowGradients],
        rate_bits: list[list[int]],
    ) -> list[RowGradients]:
        """Merged tables by TBE again, each with the learning rate that the ranks agree on."""
        merged, start = [], 0
        for index, gradients in enumerate(local):
            stop = start + len(gradients.tables)
            bits = torch.tensor([rank[index] for rank in rate_bits])
            step = replace(gradients.step, learning_rate=_agreed_rate(bits.view(torch.float64)))
            merged.append(RowGradients(tuple(tables[start:stop]), step))
            start = stop
        return merged


def _unpack(
    rows: torch.Tensor, values: torch.Tensor, counts: list[int], like: list[TableGradients]
) -> list[TableGradients]:
    dims = [table.grads.shape[1] for table in like]
    row_parts = rows.split(counts)
    value_parts = values.split([n * dim for n, dim in zip(counts, dims, strict=True)])
    return [
        TableGradients(table_rows, table_values.view(-1, dim))
        for table_rows, table_values, dim in zip(row_parts, value_parts, dims, strict=True)
    ]


def _agreed_rate(rates: torch.Tensor) -> float:
    """The one learning rate of the ranks that know it; NaN stands for a rank that doesn't."""
    known = rates[~rates.isnan()].unique()
    if known.numel() != 1:
        raise SyncError(
            f"ranks that hold the same rows have different learning rates {known.tolist()}; set "
            "the same schedule on every rank"
        )
    return float(known[0])
