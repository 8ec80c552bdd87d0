"""The costs of collectives: ranks on hosts, the bytes that move, and the seconds. Pure.

Inside a host, ranks send concurrently; over a host's link, their bytes add up. Both directions
are used at once, so the busier one counts::

    Span                 a group's ranks on hosts, and groups that share a host's link
    all_to_all(span, n)  -> Traffic(local_bytes, link_bytes), by the algorithm
    CollectiveCost.seconds(span, traffic)
                         = call + peers + max(local_bytes at its rate,
                                              link_bytes at its rate, slower among many hosts)
    merge_seconds        the all-to-alls that merge row gradients
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

from torchrec_2dsp.errors import CalibrationError

Call = Annotated[float, Field(ge=0, le=3_600)]
"""Seconds per call: an hour at most, as more is a mistake."""
Unit = Annotated[float, Field(ge=0, le=1)]
"""Seconds per byte, id or row: one at most."""


@dataclass(frozen=True)
class Span:
    """Process groups of the same shape on their hosts, all busy at the same time.

    Example:
        Four groups of two ranks, each over two hosts of four ranks.

        >>> from torchrec_2dsp import Mesh2D
        >>> from torchrec_2dsp.cost.collectives import Span
        >>> Span.of(Mesh2D(num_groups=4, group_size=2).rank_matrix(), local_world_size=4)
        Span(num_ranks=2, ranks_per_host=1, groups_per_host=4)
    """

    num_ranks: int
    """The number of ranks in a group."""

    ranks_per_host: int
    """The number of a group's ranks on the host with most of them."""

    groups_per_host: int
    """The number of groups with ranks on one host."""

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]], local_world_size: int) -> "Span":
        """Return the groups' span on hosts with ``local_world_size`` ranks each."""
        on_hosts = [Counter(rank // local_world_size for rank in group) for group in groups]
        by_host = Counter(host for num_on_host in on_hosts for host in num_on_host)
        return cls(
            num_ranks=max(len(group) for group in groups),
            ranks_per_host=max(max(num_on_host.values()) for num_on_host in on_hosts),
            groups_per_host=max(by_host.values()),
        )

    @classmethod
    def of_world(cls, world_size: int, local_world_size: int) -> "Span":
        """Return the span of all ranks as one group."""
        return cls(world_size, min(world_size, local_world_size), 1)

    @property
    def crosses_hosts(self) -> bool:
        """True if a group has ranks on several hosts."""
        return self.num_ranks > self.ranks_per_host

    @property
    def num_hosts(self) -> int:
        """The number of hosts that a group spans."""
        return -(-self.num_ranks // self.ranks_per_host)

    @property
    def fewest_on_host(self) -> int:
        """The number of ranks on the host with fewest of them: the last, which has what is left."""
        return self.num_ranks - (self.num_hosts - 1) * self.ranks_per_host

    def inside_hosts(self) -> "Span":
        """Return the span of each group's ranks on one host, as separate groups."""
        return Span(self.ranks_per_host, self.ranks_per_host, self.groups_per_host)

    def across_hosts(self) -> "Span":
        """Return the span of the ranks with the same place on their hosts, as separate groups."""
        return Span(self.num_hosts, 1, self.groups_per_host * self.ranks_per_host)


class Traffic(NamedTuple):
    """The bytes that the busiest rank and the busiest host must move."""

    local_bytes: float
    """The busiest rank's bytes inside its host."""

    link_bytes: float
    """The busiest host's bytes to or from other hosts, over all its ranks and groups."""


NOTHING_MOVED = Traffic(0.0, 0.0)


def all_to_all(span: Span, to_each: float) -> Traffic:
    """Return the traffic if every rank sends ``to_each`` bytes to every rank."""
    elsewhere = span.num_ranks - span.ranks_per_host
    return Traffic(
        (span.ranks_per_host - 1) * to_each,
        span.groups_per_host * span.ranks_per_host * elsewhere * to_each,
    )


def all_to_all_from(span: Span, to_each: ArrayLike) -> Traffic:
    """Return the traffic if rank p sends ``to_each[p]`` bytes to every rank; a number is for all.

    The reverse has the same traffic: every rank sends ``to_each[p]`` bytes to rank p.

    Example:
        One rank in four sends. The one on its host and the other host's get 100 bytes each.

        >>> from torchrec_2dsp.cost.collectives import Span, all_to_all_from
        >>> all_to_all_from(Span.of_world(4, 2), [100.0, 0.0, 0.0, 0.0])
        Traffic(local_bytes=100.0, link_bytes=200.0)
    """
    if isinstance(to_each, float):
        others = span.num_ranks - min(span.ranks_per_host, span.fewest_on_host)
        return Traffic(
            (span.ranks_per_host - 1) * to_each,
            span.groups_per_host * span.ranks_per_host * others * to_each,
        )
    sent = np.asarray(to_each, dtype=np.float64)
    firsts = _first_ranks(span)
    by_host = np.add.reduceat(sent, firsts)
    local_bytes = 0.0
    if span.ranks_per_host > 1:
        # The rank that sends least to the others on its host receives most from them.
        received = (by_host - np.minimum.reduceat(sent, firsts)).max()
        local_bytes = max((span.ranks_per_host - 1) * sent.max(), received)
    elsewhere = span.num_ranks - span.ranks_per_host
    link_bytes = 0.0
    if elsewhere:
        received = (by_host.sum() - by_host.min()) * span.ranks_per_host
        link_bytes = span.groups_per_host * max(by_host.max() * elsewhere, received)
    return Traffic(float(local_bytes), float(link_bytes))


def places_to_all(span: Span, to_each: ArrayLike) -> Traffic:
    """Return the traffic if rank p sends ``to_each[p]`` bytes to its place on each other host."""
    if isinstance(to_each, float):
        others = span.num_ranks - span.fewest_on_host
        out = span.ranks_per_host * (span.num_hosts - 1)
        return Traffic(0.0, span.groups_per_host * max(out, others) * to_each)
    by_host = np.add.reduceat(np.asarray(to_each, dtype=np.float64), _first_ranks(span))
    out = by_host * (span.num_hosts - 1)
    received = by_host.sum() - by_host
    return Traffic(0.0, float(span.groups_per_host * np.maximum(out, received).max()))


def all_reduce(span: Span, num_bytes: float) -> Traffic:
    """Return a ring all-reduce's traffic, in rank order: host links carry everything twice."""
    return _ring(span, 2 * (span.num_ranks - 1) / span.num_ranks * num_bytes)


def reduce_scatter(span: Span, num_bytes: float) -> Traffic:
    """Return the traffic of a ring that sums all ranks' ``num_bytes``: half an all-reduce's."""
    return _ring(span, (span.num_ranks - 1) / span.num_ranks * num_bytes)


def all_gather(span: Span, num_bytes: float) -> Traffic:
    """Return the traffic of a ring that gives every rank's ``num_bytes`` to all others."""
    return _ring(span, (span.num_ranks - 1) * num_bytes)


def _ring(span: Span, per_rank: float) -> Traffic:
    return Traffic(
        per_rank if span.ranks_per_host > 1 else 0.0,
        span.groups_per_host * per_rank if span.crosses_hosts else 0.0,
    )


def _first_ranks(span: Span) -> NDArray[np.int64]:
    """Return each host's first rank; the last host may have fewer ranks than the others."""
    return np.arange(0, span.num_ranks, span.ranks_per_host)


class CalibrationPart(BaseModel):
    """A part of a calibration, as strict as its file must be."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class Coefficients(CalibrationPart):
    """Seconds per unit of work, non-negative and finite."""

    base_s: Call
    """Seconds per call, whatever the work."""

    median_error: float = Field(default=0.0, ge=0)
    """The median deviation of the longer half of the measurements from these constants."""

    max_error: float = Field(default=0.0, ge=0)
    """The largest deviation of a measurement from these constants."""


class CollectiveCost(Coefficients):
    """A collective's cost; bytes travel inside and across hosts at the same time.

    Example:
        >>> from torchrec_2dsp.cost.collectives import CollectiveCost, Span, all_to_all
        >>> cost = CollectiveCost(
        ...     base_s=0.001, per_peer_s=0, local_s_per_byte=0, link_s_per_byte=1e-9
        ... )
        >>> span = Span.of_world(4, 2)
        >>> cost.seconds(span, all_to_all(span, to_each=1e6))
        0.005
    """

    per_peer_s: Call
    """Seconds per other rank in the group."""

    local_s_per_byte: Unit | None = None
    """Seconds per byte that a rank sends inside its host; ``None`` with one rank per host."""

    link_s_per_byte: Unit | None = None
    """Seconds per byte that a host sends to others; ``None`` if there was one host."""

    congestion: float = Field(default=0.0, ge=0, le=1)
    """The share by which a byte to another host takes longer with each doubling of a group's hosts
    beyond two; larger for all-to-alls, whose flows collide, than for rings."""

    def seconds(self, span: Span, traffic: Traffic) -> float:
        """Return the seconds that each group takes."""
        if span.num_ranks == 1:
            return 0.0
        moved_s = max(
            traffic.local_bytes * _known(self.local_s_per_byte, traffic.local_bytes, "in a host"),
            traffic.link_bytes
            * _known(self.link_s_per_byte, traffic.link_bytes, "across hosts")
            * (1 + self.congestion * math.log2(max(2, span.num_hosts) / 2)),
        )
        return self.base_s + (span.num_ranks - 1) * self.per_peer_s + moved_s


def _known(value: float | None, num_bytes: float, where: str) -> float:
    if value is None and num_bytes:
        raise CalibrationError(
            f"the calibration was made where nothing travels {where}, so it can't say what that "
            "takes; calibrate on hosts like those that the plan is for"
        )
    return value or 0.0


class RowBytes(NamedTuple):
    """Bytes of distinct rows with their numbers; a row that several ranks have counts once."""

    of_rank: float
    """One rank's rows."""

    of_host: float
    """The rows of all of a host's ranks."""

    of_all: float
    """The rows of all ranks."""


def merge_seconds(rows: RowBytes, span: Span, cost: CollectiveCost) -> float:
    """Price the exchanges that give all ranks the sums of all rows.

    They follow the routes of `replicas`: first inside hosts, then the shorter one between them.
    ``cost`` is the all-to-all's.
    """
    if not (span.crosses_hosts and span.ranks_per_host > 1):
        return _shorter_route(cost, span, rows.of_rank, rows.of_all)
    inside, across = span.inside_hosts(), span.across_hosts()
    return (
        rows_seconds(cost, inside, rows.of_rank / inside.num_ranks)
        + _shorter_route(
            cost, across, rows.of_host / inside.num_ranks, rows.of_all / inside.num_ranks
        )
        + rows_seconds(cost, inside, rows.of_all / inside.num_ranks)
    )


def _shorter_route(cost: CollectiveCost, span: Span, of_rank: float, of_all: float) -> float:
    """Price sending all rows to all; or rows to owners and sums to all, if that moves less."""
    owned = of_rank / span.num_ranks, of_all / span.num_ranks
    if span.num_ranks == 2 or sum(owned) >= of_rank:
        return rows_seconds(cost, span, of_rank)
    return sum(rows_seconds(cost, span, to_each) for to_each in owned)


def rows_seconds(cost: CollectiveCost, span: Span, to_each: float) -> float:
    """Price sending every rank's rows to every other one: row numbers, then values."""
    return cost.seconds(span, NOTHING_MOVED) + cost.seconds(span, all_to_all(span, to_each))
