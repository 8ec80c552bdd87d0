"""`GradientExchange`: row gradients of several ranks, brought together beside their computing.

At the lookup, ranks tell each other how many rows they touch; after the backward, they send the
rows and their gradients; where the rows are needed next, each waits, and has what all have sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.peers import Peers
from torchrec_2dsp.errors import SyncError
from torchrec_2dsp.replicas.hops import Route, Sizes, routes
from torchrec_2dsp.replicas.in_flight import InFlight, Wire
from torchrec_2dsp.rows.blocks import Block
from torchrec_2dsp.rows.gradients import BlockGradients


@dataclass(frozen=True)
class Announcement:
    """How many rows each rank sends to whom first, on its way."""

    headers: tuple[torch.Tensor, ...]
    """By rank: block by block how many rows each owner gets, then the bits of the learning rate."""
    num_blocks: int
    work: dist.Work | None

    def arrived(self) -> tuple[Sizes, float]:
        """What all ranks send; and the learning rate that all have."""
        if self.work is not None:
            self.work.wait()
        headers = torch.stack(self.headers).cpu()
        rates = headers[:, -1].contiguous().view(torch.float64)
        # NaN stands for a rank that doesn't know it.
        known = rates[~rates.isnan()].unique()
        if known.numel() != 1:
            raise SyncError(
                f"ranks that hold the same rows have different learning rates {known.tolist()}; "
                "set the same schedule on every rank"
            )
        if not self.num_blocks:
            return [], float(known[0])
        sizes = headers[:, :-1].reshape(len(headers), self.num_blocks, -1)
        return sizes.tolist(), float(known[0])


class GradientExchange:
    """What one TBE tells its peers."""

    def __init__(
        self,
        blocks: Sequence[Block],
        device: torch.device,
        peers: Peers | None,
        transport: torch.dtype = torch.float32,
    ) -> None:
        """
        Args:
            blocks: of the TBE.
            device: where it is.
            peers: the ranks that hold the same rows, by groups used for nothing else while rows
                travel; none if this rank is alone.
            transport: the type in which gradients travel.
        """
        self.num_ranks = 1 if peers is None else dist.get_world_size(peers.everyone)
        """How many ranks' gradients are added."""
        self._wire = Wire(tuple(block.key_dtype for block in blocks), transport, device)
        self._peers = None if self.num_ranks == 1 else peers
        if self._peers is None:
            return
        self._gathered, self._owned = routes(self._peers)
        # Two ranks never gain by owners, so they needn't tell what these would get.
        told = self._owned if self.num_ranks > 2 else self._gathered
        self._first_hop = told.hops[0]
        members = dist.get_process_group_ranks(self._peers.everyone)
        first = dist.get_process_group_ranks(self._first_hop.group)
        self._places = [members.index(rank) for rank in first]

    @property
    def by_owner(self) -> bool:
        """Whether the next gradients are added up by an owner for each row, as the overlap of the
        last ones suggests. Set it on all peers alike, between two steps."""
        return self._wire.overlap.is_large

    @by_owner.setter
    def by_owner(self, value: bool) -> None:
        self._wire.overlap.is_large = value

    def announce(self, keys: Sequence[torch.Tensor], learning_rate: float) -> Announcement:
        """Tell the peers what this rank's gradients will look like.

        Args:
            keys: of the touched rows, by block.
            learning_rate: what this rank knows of it.

        Collectives:
            One all-gather of 8 bytes per block and owner and 8 bytes more, not waited for.
        """
        (rate,) = torch.tensor([learning_rate], dtype=torch.float64).view(torch.int64).tolist()
        if self._peers is None:
            return Announcement((torch.tensor([rate]),), 0, None)
        sizes = [size for one in keys for size in self._first_hop.part_sizes(one)]
        header = torch.tensor([*sizes, rate], device=self._wire.device)
        headers = tuple(torch.empty_like(header) for _ in range(self.num_ranks))
        work = dist.all_gather(list(headers), header, group=self._peers.everyone, async_op=True)
        return Announcement(headers, len(keys), work)

    def send(
        self, mine: Sequence[BlockGradients], announced: Announcement, divisor: int
    ) -> InFlight:
        """Start the exchange.

        Args:
            mine: this rank's gradients, by block.
            announced: at the lookup.
            divisor: of the sum over ranks.

        Collectives:
            Per block two all-to-alls, of keys and of gradients, not waited for.
        """
        told, learning_rate = announced.arrived()
        if self._peers is None:
            alone = Route(())
            return InFlight(mine, learning_rate, divisor, wire=self._wire, route=alone, sizes=[])
        route = self._owned if self._wire.overlap.is_large else self._gathered
        sizes = [told[place] for place in self._places]
        if not route.hops[0].stride:
            sizes = [[[sum(parts)] for parts in blocks] for blocks in sizes]
        sent = InFlight(mine, learning_rate, divisor, wire=self._wire, route=route, sizes=sizes)
        sent.num_bytes += announced.headers[0].nbytes * (self.num_ranks - 1)
        return sent
