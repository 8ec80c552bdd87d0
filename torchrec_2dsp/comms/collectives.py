"""Collectives that torch doesn't offer on every backend."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Arriving:
    """Tensors from all ranks of a group, on their way."""

    values: torch.Tensor
    """Those of the other ranks in their order, then the own one."""
    sent: torch.Tensor
    """Kept until it has left."""
    work: dist.Work
    counts: tuple[int, ...]
    """The first dimension, by rank."""
    rank: int
    """This one."""

    def wait(self) -> torch.Tensor:
        """The values, all of which have come."""
        self.work.wait()
        return self.values

    def by_rank(self) -> list[torch.Tensor]:
        """The same, rank by rank."""
        return self._by_rank(self.wait())

    def places(self) -> torch.Tensor:
        """Where the values of rank 0 stand, then those of rank 1, and so on."""
        places = torch.arange(self.values.shape[0], device=self.values.device)
        return torch.cat(self._by_rank(places))

    def _by_rank(self, values: torch.Tensor) -> list[torch.Tensor]:
        others = [count for rank, count in enumerate(self.counts) if rank != self.rank]
        parts = list(values.split([*others, self.counts[self.rank]]))
        parts.insert(self.rank, parts.pop())
        return parts


def start_all_to_all_ragged(
    parts: Sequence[torch.Tensor], counts: Sequence[int], group: dist.ProcessGroup
) -> Arriving:
    """Give every rank its part, which may differ from others in the first dimension.

    Args:
        parts: of this rank, by the rank that gets it.
        counts: the first dimension of what each rank has for this one.
        group: the ranks that take part, at least two.

    Collectives:
        One all-to-all, not waited for. Nothing is sent to oneself, and nothing is copied for a
        single peer.
    """
    rank = dist.get_rank(group)
    mine = parts[rank]
    others = [part for other, part in enumerate(parts) if other != rank]
    values = mine.new_empty((sum(counts), *mine.shape[1:]))
    num_received = values.shape[0] - mine.shape[0]
    received = [0 if other == rank else count for other, count in enumerate(counts)]
    sent = [0 if other == rank else part.shape[0] for other, part in enumerate(parts)]
    buffer = torch.cat(others) if len(others) > 1 else others[0]
    work = dist.all_to_all_single(
        values[:num_received], buffer, received, sent, group=group, async_op=True
    )
    assert work is not None
    values[num_received:] = mine
    return Arriving(values, buffer, work, tuple(counts), rank)


def start_all_gather_ragged(
    mine: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup
) -> Arriving:
    """Give every rank the tensors of all, which may differ in their first dimension.

    Args:
        mine: this rank's tensor.
        counts: the first dimension of every rank's tensor, known to all.
        group: the ranks that take part, at least two.

    Collectives:
        As `start_all_to_all_ragged`: gloo has no all-gather of different sizes.
    """
    return start_all_to_all_ragged([mine] * len(counts), counts, group)


def all_gather_ragged(
    local: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """As `start_all_gather_ragged`, waited for: the tensors rank by rank.

    Collectives:
        One all-to-all on ``group``.
    """
    if len(sizes) == 1:
        return [local]
    return start_all_gather_ragged(local, sizes, group).by_rank()
