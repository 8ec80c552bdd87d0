"""The time of bringing row gradients together: of hot rows, and of rows of replica peers."""

from typing import NamedTuple

from torchrec_2dsp.cost.coefficients import CollectiveCost
from torchrec_2dsp.cost.span import Span
from torchrec_2dsp.cost.traffic import Traffic, all_to_all


class RowBytes(NamedTuple):
    """Distinct rows with their numbers; a row that several ranks have counts once."""

    of_rank: float
    """Bytes that one rank has."""

    of_host: float
    """Bytes that the ranks of a host have together."""

    of_all: float
    """Bytes that all ranks have together."""


def merge_seconds(rows: RowBytes, span: Span, cost: CollectiveCost) -> float:
    """The exchanges of `rows.hops.routes`: inside hosts first, and the shorter one between them.

    Args:
        rows: whose sums all ranks need.
        span: the ranks.
        cost: of their all-to-all.

    Example:
        Of four ranks that have the same 1,000 bytes each, a host sends 500 for each of its two.

        >>> from torchrec_2dsp.cost.coefficients import CollectiveCost
        >>> from torchrec_2dsp.cost.row_merge import RowBytes, merge_seconds
        >>> from torchrec_2dsp.cost.span import Span
        >>> cost = CollectiveCost(base_s=0, per_peer_s=0, local_s_per_byte=0, link_s_per_byte=1e-6)
        >>> merge_seconds(RowBytes(1_000.0, 1_000.0, 1_000.0), Span.of_world(4, 2), cost)
        0.001
    """
    if span.num_ranks == 1 or not rows.of_all:
        return 0.0
    if not (span.crosses_hosts and span.ranks_per_host > 1):
        return _gathered(cost, span, rows.of_rank, rows.of_all)
    inside, across = span.inside_hosts(), span.across_hosts()
    return (
        _seconds(cost, inside, rows.of_rank / inside.num_ranks)
        + _gathered(cost, across, rows.of_host / inside.num_ranks, rows.of_all / inside.num_ranks)
        + _seconds(cost, inside, rows.of_all / inside.num_ranks)
    )


def gather_seconds(num_bytes: float, span: Span, cost: CollectiveCost) -> float:
    """All rows of every rank to every other one, at once."""
    return 0.0 if span.num_ranks == 1 or not num_bytes else _seconds(cost, span, num_bytes)


def _gathered(cost: CollectiveCost, span: Span, of_rank: float, of_all: float) -> float:
    """All rows to all; or each to its owner first, and sums to all, where that moves less."""
    owned = of_rank / span.num_ranks, of_all / span.num_ranks
    if span.num_ranks == 2 or sum(owned) >= of_rank:
        return _seconds(cost, span, of_rank)
    return sum(_seconds(cost, span, to_each) for to_each in owned)


def _seconds(cost: CollectiveCost, span: Span, to_each: float) -> float:
    """Row numbers and values are two messages."""
    return cost.seconds(span, Traffic(0.0, 0.0)) + cost.seconds(span, all_to_all(span, to_each))
