"""`Halves`: which of the rows that travel go first, told by their owners to who wants them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Half:
    """Some of a batch's rows, as both ends see them."""

    asked_at: torch.Tensor
    """Which of the rows that this rank is asked for, rank by rank."""
    num_asked: list[int]
    """How many these are, by rank."""
    wanted_at: torch.Tensor
    """Which of the rows that this rank wants, owner by owner."""
    num_wanted: list[int]
    """How many these are, by owner."""


class Halves:
    """Two halves of what travels between each two ranks."""

    def __init__(
        self,
        is_second: torch.Tensor,
        num_asked: Sequence[int],
        num_wanted: Sequence[int],
        group: dist.ProcessGroup,
    ) -> None:
        """
        Args:
            is_second: of the rows that this rank is asked for, rank by rank.
            num_asked: how many these are, by rank.
            num_wanted: how many rows this rank wants, by owner.
            group: the ranks.

        Collectives:
            One all-to-all with a byte for each row, not waited for.
        """
        self._is_second_here = is_second
        self._num_asked, self._num_wanted = list(num_asked), list(num_wanted)
        self._is_second_there = is_second.new_empty(sum(num_wanted), dtype=torch.uint8)
        self._told = is_second.to(torch.uint8)
        self._work = dist.all_to_all_single(
            self._is_second_there,
            self._told,
            self._num_wanted,
            self._num_asked,
            group=group,
            async_op=True,
        )
        self._known: tuple[Half, Half] | None = None

    def wait(self) -> tuple[Half, Half]:
        """The first and the second half."""
        if self._known is None:
            assert self._work is not None
            self._work.wait()
            here, there = self._is_second_here, self._is_second_there.bool()
            num_asked, num_wanted = _counts((here, self._num_asked), (there, self._num_wanted))
            first = Half(_positions(~here), num_asked[0], _positions(~there), num_wanted[0])
            self._known = (
                first,
                Half(_positions(here), num_asked[1], _positions(there), num_wanted[1]),
            )
            self._work, self._told = None, here
        return self._known


def _positions(flags: torch.Tensor) -> torch.Tensor:
    return flags.nonzero().view(-1)


def _counts(*ends: tuple[torch.Tensor, list[int]]) -> list[tuple[list[int], list[int]]]:
    """For each end, by rank, how many are in the first half, and how many in the second."""
    # All at once: on a GPU this waits for the device.
    sums = torch.stack(
        [torch.stack([part.sum() for part in flags.split(sizes)]) for flags, sizes in ends]
    ).tolist()
    return [
        ([count - second for count, second in zip(of, seconds, strict=True)], seconds)
        for (_, of), seconds in zip(ends, sums, strict=True)
    ]
