"""Choose for each table as if shards were dealt evenly: by prices, families and memory. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from torchrec_2dsp.planner.search.space import Floats, Selection, Space

_REPRICINGS = 2
_BISECTIONS = 30
_DIGITS = 9
"""Of seconds, in which choices must differ."""


@dataclass(frozen=True)
class Selected:
    """A choice for each table."""

    selection: Selection
    seconds: float
    """Of a step, if all ranks had the same to do."""


def selections(space: Space, room: float) -> list[Selected]:
    """Good choices for all tables, the best first: one for each set of families that was tried.

    A step's cost is nearly a sum over tables, so each takes what is cheapest for it; but the first
    table of a family pays for messages and kernels that the others share. So sets of families are
    tried: all pairs, and then sets that grow from the best one while that helps.

    Args:
        space: what there is to choose from.
        room: bytes that a rank has.
    """
    tried: dict[frozenset[int], Selected] = {}
    for families in _pairs(len(space.families)):
        _try(space, room, families, tried)
    while tried:
        best = min(tried, key=lambda families: tried[families].seconds)
        before = tried[best].seconds
        for family in range(len(space.families)):
            _try(space, room, best | {family}, tried)
        if min(one.seconds for one in tried.values()) >= before:
            break
    distinct = {one.selection.tobytes(): one for one in tried.values()}
    # What differs by rounding stays in its order.
    return sorted(distinct.values(), key=lambda one: round(one.seconds, _DIGITS))


def _pairs(num_families: int) -> Iterator[frozenset[int]]:
    for size in (1, 2):
        for some in combinations(range(num_families), size):
            yield frozenset(some)


def _try(
    space: Space,
    room: float,
    families: frozenset[int],
    tried: dict[frozenset[int], Selected],
) -> None:
    if families in tried:
        return
    allowed = _allowed(space, families, room)
    prices = space.first_prices
    best: Selected | None = None
    for _ in range(_REPRICINGS):
        selection = _cheapest_within(space, space.loads @ prices, allowed, room)
        if selection is None:
            break
        seconds = space.seconds(selection)
        if best is not None and seconds >= best.seconds:
            break
        is_same = best is not None and bool((best.selection == selection).all())
        best = Selected(selection, seconds)
        if is_same:
            break
        # What overlaps with something costs less, which shows where that something is known.
        prices = space.prices(space.sum_of(selection))
    if best is not None:
        tried[families] = best


def _allowed(space: Space, families: Iterable[int], room: float) -> "np.ndarray":
    """Choices of the families that fit; all that fit, for tables that have none of them."""
    fits = np.isfinite(space.bytes_of_rank) & (space.bytes_of_shard <= room)
    of_families = fits & np.isin(space.family_of, list(families))
    return np.where(of_families.any(axis=1, keepdims=True), of_families, fits)


def _cheapest_within(
    space: Space, seconds: Floats, allowed: "np.ndarray", room: float
) -> Selection | None:
    """The cheapest choices that fit together; `None` where nothing does.

    Memory gets a price, the lowest one at which all fit: by bisection.
    """
    if not allowed.any(axis=1).all():
        return None
    num_bytes = np.where(np.isfinite(space.bytes_of_rank), space.bytes_of_rank, 0.0)

    def at_price(price: float) -> Selection:
        costs = np.where(allowed, seconds + price * num_bytes, np.inf)
        return np.asarray(costs.argmin(axis=1), np.int64)

    def fits(selection: Selection) -> bool:
        return bool(num_bytes[np.arange(len(selection)), selection].sum() <= room)

    found = at_price(0.0)
    if fits(found):
        return found
    least = np.where(allowed, num_bytes, np.inf).argmin(axis=1)
    if not fits(least):
        return None
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        price = low + (high - low) / 2
        if fits(at_price(price)):
            high = price
        else:
            low = price
    found = at_price(high)
    return found if fits(found) else np.asarray(least, np.int64)
