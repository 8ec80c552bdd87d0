"""Choose for each table as if shards were dealt evenly: by prices, families and memory. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.planner.balance import Floats
from torchrec_2dsp.planner.search.choices import rated
from torchrec_2dsp.planner.search.space import Selection, Space

_REPRICINGS = 2
_BISECTIONS = 40
_LEAST_PRICE, _HIGHEST_PRICE = 1e-20, 1.0
"""Seconds for a byte of memory."""
_DIGITS = 9
"""The decimals of seconds in which choices must differ."""

_Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Selected:
    """A choice for each table."""

    selection: Selection
    cost: StepCost
    """The cost of a step, if all ranks had the same to do."""

    rated_s: float
    """The rating by which it is compared with others."""

    @classmethod
    def of(cls, space: Space, selection: Selection) -> "Selected":
        """A selection with the cost of its step."""
        cost = space.cost_of(selection)
        return cls(selection, cost, rated(cost, space.types_of(selection)))


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
    # If all families together don't fit, none do.
    _try(space, room, frozenset(range(len(space.families))), tried)
    if not tried:
        return []
    for families in _pairs(len(space.families)):
        _try(space, room, families, tried)
    while True:
        best = min(tried, key=lambda families: tried[families].rated_s)
        before = tried[best].rated_s
        for family in range(len(space.families)):
            _try(space, room, best | {family}, tried)
        if min(selected.rated_s for selected in tried.values()) >= before:
            break
    # What differs by rounding stays in its order.
    ordered = sorted(tried.values(), key=lambda selected: round(selected.rated_s, _DIGITS))
    return list({selected.selection.tobytes(): selected for selected in ordered}.values())


def smallest(space: Space) -> Selected:
    """The last resort, where nothing better finds ranks: the smallest shards that there are."""
    return Selected.of(space, _argmin(space.bytes_of_shard + space.bytes_of_rank))


def _pairs(num_families: int) -> Iterator[frozenset[int]]:
    for size in (1, 2):
        for numbers in combinations(range(num_families), size):
            yield frozenset(numbers)


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
        if best is not None:
            # What overlaps with something costs less, which shows where that something is known.
            prices = space.prices(space.sum_of(best.selection))
        selection = _cheapest_within(space, space.loads @ prices, allowed, room)
        if selection is None:
            break
        selected = Selected.of(space, selection)
        if best is not None and selected.rated_s >= best.rated_s:
            break
        best = selected
    if best is not None:
        tried[families] = best


def _allowed(space: Space, families: Iterable[int], room: float) -> _Mask:
    """Choices of the families that fit; all that fit, for tables that have none of them."""
    fits = np.isfinite(space.bytes_of_rank) & (space.bytes_of_shard <= room)
    of_families = fits & np.isin(space.family_of, list(families))
    return np.where(of_families.any(axis=1, keepdims=True), of_families, fits)


def _cheapest_within(
    space: Space, seconds: Floats, allowed: _Mask, room: float
) -> Selection | None:
    """The cheapest choices that fit together; `None` where nothing does.

    Memory gets a price, the lowest one at which all fit: by bisection.
    """
    if not allowed.any(axis=1).all():
        return None
    num_bytes = np.where(np.isfinite(space.bytes_of_rank), space.bytes_of_rank, 0.0)

    def at_price(price: float) -> Selection:
        return _argmin(np.where(allowed, seconds + price * num_bytes, np.inf))

    def fits(selection: Selection) -> bool:
        return bool(num_bytes[np.arange(len(selection)), selection].sum() <= room)

    selection = at_price(0.0)
    if fits(selection):
        return selection
    least = _argmin(np.where(allowed, num_bytes, np.inf))
    if not fits(least):
        return None
    low, high = _LEAST_PRICE, _HIGHEST_PRICE
    for _ in range(_BISECTIONS):
        # Prices differ by orders of magnitude.
        price = (low * high) ** 0.5
        if fits(at_price(price)):
            high = price
        else:
            low = price
    selection = at_price(high)
    return selection if fits(selection) else least


def _argmin(values: Floats) -> Selection:
    return np.asarray(values.argmin(axis=1), np.int64)
