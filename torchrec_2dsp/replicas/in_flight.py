"""`InFlight`: the row gradients of one backward, on their way over the hops of a route."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from torchrec_2dsp.replicas.hops import ArrivingRows, Route, Sizes, saves_bytes_by_owner
from torchrec_2dsp.rows.gradients import BlockGradients


class Overlap:
    """How much the rows of different ranks were the same in the last exchange.

    All ranks of a group know it, so all choose the same route for the next one.
    """

    def __init__(self) -> None:
        self.is_large = False
        """Whether owners would have saved bytes."""

    def seen(self, num_ranks: int, num_sent: int, num_distinct: int) -> None:
        """What a group had, see `saves_bytes_by_owner`."""
        self.is_large = saves_bytes_by_owner(num_ranks, num_sent, num_distinct)


@dataclass(frozen=True)
class Wire:
    """How the rows of a TBE travel."""

    key_dtypes: tuple[torch.dtype, ...]
    """By block, what its keys fit into."""
    transport: torch.dtype
    """The type in which gradients travel."""
    device: torch.device
    overlap: Overlap = field(default_factory=Overlap)


class InFlight:
    """One backward's gradients, on their way."""

    def __init__(
        self,
        rows: Sequence[BlockGradients],
        learning_rate: float,
        divisor: int,
        *,
        wire: Wire,
        route: Route,
        sizes: Sizes,
    ) -> None:
        """
        Args:
            rows: of this rank, by block.
            learning_rate: of all ranks.
            divisor: of the sum over ranks.
            wire: how to travel.
            route: where to; without hops if the rank is alone.
            sizes: what travels on the first hop.

        Collectives:
            Those of `Hop.start` for each block, on the first hop's group.
        """
        self.learning_rate = learning_rate
        """Of all ranks."""
        self.num_bytes = 0
        """Bytes that this rank has sent to others."""
        self._rows = tuple(rows)
        self._divisor = divisor
        self._wire = wire
        self._route = route
        self._num_done = 0
        self._num_sent = 0
        self._arriving: list[ArrivingRows] = []
        if route.hops:
            self._start(sizes)

    def leave_host(self) -> None:
        """Add up what the peers in this host have sent, and send that to other hosts.

        Collectives:
            The hops until then are waited for, the next one is not.
        """
        while self._num_done < len(self._route.before):
            self._go_on()

    def wait(self) -> None:
        """Until all ranks' gradients have come.

        Collectives:
            The hops that are left, waited for.
        """
        while self._num_done < len(self._route.hops) - 1:
            self._go_on()
        for one in self._arriving:
            one.wait()

    def collect(self) -> tuple[BlockGradients, ...]:
        """Wait for all ranks' gradients; their sums, once.

        Collectives:
            Those of `wait`.
        """
        while self._num_done < len(self._route.hops):
            self._go_on()
        if self._divisor != 1:
            for rows in self._rows:
                rows.grads.div_(self._divisor)
        return self._rows

    def _go_on(self) -> None:
        """Finish a hop, and start the next one, if there is one."""
        self._rows = tuple(one.sum() for one in self._arriving)
        self._num_done += 1
        level = self._route.level
        if self._num_done == len(self._route.before) + len(level):
            num_distinct = sum(one.keys.numel() for one in self._rows)
            self._wire.overlap.seen(level[0].num_ranks, self._num_sent, num_distinct)
        if self._num_done < len(self._route.hops):
            self._start(self._tell_sizes())

    def _tell_sizes(self) -> Sizes:
        """What each rank sends on the next hop, which is known only now."""
        hop = self._route.hops[self._num_done]
        mine = torch.tensor(
            [hop.part_sizes(one.keys) for one in self._rows], device=self._wire.device
        )
        sizes = [torch.empty_like(mine) for _ in range(hop.num_ranks)]
        dist.all_gather(sizes, mine, group=hop.group)
        self.num_bytes += mine.nbytes * (hop.num_ranks - 1)
        return torch.stack(sizes).tolist()

    def _start(self, sizes: Sizes) -> None:
        hop = self._route.hops[self._num_done]
        if self._num_done == len(self._route.before):
            self._num_sent = sum(n for blocks in sizes for parts in blocks for n in parts)
        by_block = zip(*sizes, strict=True)
        self._arriving = [
            hop.start(rows, of_block, key_dtype, self._wire.transport)
            for rows, of_block, key_dtype in zip(
                self._rows, by_block, self._wire.key_dtypes, strict=True
            )
        ]
        self.num_bytes += sum(one.num_bytes for one in self._arriving)
