"""`Traffic`: the bytes that a collective has to move, by the algorithm that moves them. Pure.

Inside a host, ranks send at the same time; over a host's link, what its ranks send adds up. Both
ways are free at once, so the busier direction counts.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchrec_2dsp.cost.span import Span


class Traffic(NamedTuple):
    """The bytes that the busiest rank and the busiest host have to move."""

    local_bytes: float
    """Bytes of the busiest rank, inside its host."""

    link_bytes: float
    """Bytes of the busiest host to or from other hosts, of all its ranks and groups together."""


def all_to_all(span: Span, to_each: float) -> Traffic:
    """Every rank sends ``to_each`` bytes to every rank.

    Example:
        >>> from torchrec_2dsp.cost.span import Span
        >>> from torchrec_2dsp.cost.traffic import all_to_all
        >>> all_to_all(Span.of_world(4, 2), to_each=100.0)
        Traffic(local_bytes=100.0, link_bytes=400.0)
    """
    elsewhere = span.num_ranks - span.ranks_per_host
    return Traffic(
        (span.ranks_per_host - 1) * to_each,
        span.groups_per_host * span.ranks_per_host * elsewhere * to_each,
    )


def all_to_all_from(span: Span, to_each: ArrayLike) -> Traffic:
    """Rank p of a group sends ``to_each[p]`` bytes to every rank of it.

    The other way round it is the same: every rank sends ``to_each[p]`` bytes to rank p.

    Example:
        One of four ranks sends. The one on its host and those on the other get 100 bytes each.

        >>> from torchrec_2dsp.cost.span import Span
        >>> from torchrec_2dsp.cost.traffic import all_to_all_from
        >>> all_to_all_from(Span.of_world(4, 2), [100.0, 0.0, 0.0, 0.0])
        Traffic(local_bytes=100.0, link_bytes=200.0)
    """
    sent = np.asarray(to_each, dtype=np.float64)
    firsts = _first_ranks(span)
    by_host = np.add.reduceat(sent, firsts)
    local_bytes = 0.0
    if span.ranks_per_host > 1:
        # Who sends least to the others of a host gets most from them.
        received = (by_host - np.minimum.reduceat(sent, firsts)).max()
        local_bytes = max((span.ranks_per_host - 1) * sent.max(), received)
    elsewhere = span.num_ranks - span.ranks_per_host
    link_bytes = 0.0
    if elsewhere:
        received = (by_host.sum() - by_host.min()) * span.ranks_per_host
        link_bytes = span.groups_per_host * max(by_host.max() * elsewhere, received)
    return Traffic(float(local_bytes), float(link_bytes))


def places_to_all(span: Span, to_each: ArrayLike) -> Traffic:
    """Rank p of a group sends ``to_each[p]`` bytes to the rank with its place on each other host.

    Example:
        >>> from torchrec_2dsp.cost.span import Span
        >>> from torchrec_2dsp.cost.traffic import places_to_all
        >>> places_to_all(Span.of_world(4, 2), [100.0, 50.0, 0.0, 0.0])
        Traffic(local_bytes=0.0, link_bytes=150.0)
    """
    by_host = np.add.reduceat(np.asarray(to_each, dtype=np.float64), _first_ranks(span))
    out = by_host * (span.num_hosts - 1)
    received = by_host.sum() - by_host
    return Traffic(0.0, float(span.groups_per_host * np.maximum(out, received).max()))


def all_reduce(span: Span, num_bytes: float) -> Traffic:
    """A ring through the ranks in their order: each link between hosts carries all of it twice.

    Example:
        >>> from torchrec_2dsp.cost.span import Span
        >>> from torchrec_2dsp.cost.traffic import all_reduce
        >>> all_reduce(Span.of_world(4, 2), num_bytes=100.0)
        Traffic(local_bytes=150.0, link_bytes=150.0)
    """
    return _ring(span, 2 * (span.num_ranks - 1) / span.num_ranks * num_bytes)


def reduce_scatter(span: Span, num_bytes: float) -> Traffic:
    """Every rank has ``num_bytes`` and gets its part of the sum: half an all-reduce."""
    return _ring(span, (span.num_ranks - 1) / span.num_ranks * num_bytes)


def all_gather(span: Span, num_bytes: float) -> Traffic:
    """Every rank gives ``num_bytes`` to every other one, by a ring."""
    return _ring(span, (span.num_ranks - 1) * num_bytes)


def _ring(span: Span, per_rank: float) -> Traffic:
    return Traffic(
        per_rank if span.ranks_per_host > 1 else 0.0,
        span.groups_per_host * per_rank if span.crosses_hosts else 0.0,
    )


def _first_ranks(span: Span) -> NDArray[np.int64]:
    """The first rank of each host; the last host may have fewer ranks than the others."""
    return np.arange(0, span.num_ranks, span.ranks_per_host)
