"""Bounds on the gap between ranks and the oracle.

Where numbers are rounded on their way, there are two answers: rounding's worst case, for a whole
case, and its exact result, as long as errors haven't grown.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tests.fuzz.actions import actions_of
from tests.fuzz.case import Case, TableCase
from tests.fuzz.oracle import BY_OWNER, Expected, expect
from tests.fuzz.state import SIGNS, Noise, peers_of_first_rank, sends_by_host

BASE = 4e-6
"""The gap allowed in any case, relative to numbers of about 1: TorchRec averages row-wise bags by
their length + 1e-6, and four ranks add float32 numbers in another order than the oracle."""
NOISE_FACTOR = {"fp32": 8.0, "half": 8.0, "integers": 4.0}
"""Limits on ranks' rounding errors, as multiples of the oracle's own: they round in other
places, and the largest of many errors is compared. Integers are as far off as their codec says at
worst, everywhere, which no run is."""
BLURRED = {"fp32": 2e-4, "half": 0.02, "integers": 0.2}
"""Tolerances from which on a case says little: its rounding errors grow too fast."""
_NUDGE = 1e-6
"""The share of its row's largest number by which a number may be off before it is rounded: halfway
between two values it may become either."""
_KINDS = ("scores", "losses", "weights", "moments", "dense", "left_out")
Applied = Mapping[int, torch.Tensor]


class Tolerances:
    """The largest allowed differences: `BASE` and rounding, or the case's own bound."""

    def __init__(self, case: Case, exact: Expected, applied: Applied) -> None:
        """Measure how far rounding moves the oracle's results."""
        self._bound = case.bound
        self._noise: Mapping[tuple[str, str], float] = defaultdict(float)
        self.is_blurred = False
        """True if the tolerances are too large to detect much."""
        if self._bound:
            return
        precision = _precision(case)
        noises = [
            Noise(torch.float32, signs) for signs in ((None,) if precision == "fp32" else SIGNS)
        ]
        if precision == "integers":
            # Signs that are worst for one number may cancel in another.
            noises.append(Noise(torch.float32, rounds=True))
        noisy = [expect(case, noise, applied) for noise in noises]
        self._noise = {
            (kind, name): NOISE_FACTOR[precision] * gap
            for kind in _KINDS
            for name, gap in _gaps(vars(exact)[kind], [vars(each)[kind] for each in noisy]).items()
        }
        shares = [
            noise / (1 + _largest_of(vars(exact)[kind], name))
            for (kind, name), noise in self._noise.items()
        ]
        self.is_blurred = not max(shares, default=0.0) <= BLURRED[precision]

    def of(self, kind: str, table: str) -> float:
        """Return by how much rounding may change a table's numbers, or the scores."""
        return self._noise[kind, table]

    def base(self, kind: str, wanted: torch.Tensor) -> torch.Tensor:
        """Return the differences from wanted numbers that are allowed without rounding."""
        if not self._bound:
            return BASE * (1 + wanted.abs())
        if kind == "moments":
            return self._bound * wanted.abs().max().clamp(min=1e-12)
        is_score = kind in ("scores", "losses")
        return self._bound * (1 + wanted.abs() * is_score)


class RoundedExactly:
    """Results early in a run, with numbers rounded exactly as ranks round them."""

    def __init__(self, case: Case, applied: Applied) -> None:
        """Compute the expected results, if the oracle knows all rounding."""
        transports = {table.transport for table in case.tables.values()} | {case.sync.transport}
        is_in_8_bits = any(table.dtype == "int8" for table in case.tables.values())
        self.is_known = (transports != {"fp32"} or is_in_8_bits) and _knows_bags(case)
        """True if something is rounded, and it is known where."""
        if not self.is_known:
            return
        self.expected = expect(case, Noise(rounds=True), applied)
        """The results that must come out."""
        self._others = [
            expect(case, Noise(torch.float32, rounds=True, nudge=nudge), applied)
            for nudge in (-_NUDGE, _NUDGE)
        ]
        gradients_too = _knows_gradients(case)
        num_trained = 0
        self._covered = set[int]()
        for index, action in enumerate(actions_of(case)):
            if num_trained == 0 or (num_trained == 1 and gradients_too):
                self._covered.add(index)
            num_trained += action.kind in ("train", "detach")

    def covers(self, index: int) -> bool:
        """Tell whether an action's results are known exactly, except for ties in rounding."""
        return self.is_known and index in self._covered

    def tolerance(self, kind: str, key: Any) -> torch.Tensor:
        """Return the tolerance that each number has on top of `BASE`."""
        wanted = vars(self.expected)[kind][key]
        gaps = [(vars(other)[kind][key] - wanted).abs() for other in self._others]
        return NOISE_FACTOR["fp32"] * torch.stack(gaps).amax(dim=0)


def _precision(case: Case) -> str:
    tables = case.tables.values()
    transports = {case.sync.transport, case.qcomms, *(table.transport for table in tables)}
    if (transports | {table.dtype for table in tables}) & {"int8", "int4"}:
        return "integers"
    types = transports | {table.dtype for table in tables} | {case.dense.kind}
    return "half" if types & {"fp16", "bf16"} else "fp32"


def _knows_bags(case: Case) -> bool:
    """Tell whether the oracle sums partial bags as ranks do.

    TorchRec's own reduce-scatter adds them in their transport type, in gloo's order.
    """
    return case.qcomms == "none" or not any(
        table.sharding in BY_OWNER and table.exchange == "pooled" and table.transport == "fp32"
        for table in case.tables.values()
    )


def _knows_gradients(case: Case) -> bool:
    """Tell whether the oracle rounds gradients where ranks do, and as often."""
    tables = case.tables.values()
    return (
        _knows_sync(case)
        and case.qcomms == "none"
        and case.dense.kind != "fp16"
        and not case.variable
        and all(table.dtype == "fp32" or _rounds_as_known(case, table) for table in tables)
        # Row gradients are summed on hosts before they travel between them.
        and (
            case.local_world_size in (1, case.world_size)
            or all(table.exchange != "row_per_host" for table in tables)
        )
    )


def _rounds_as_known(case: Case, table: TableCase) -> bool:
    """Tell whether the oracle rounds a table's rows as ranks do."""
    return table.dtype == "int8" and not case.at_random and table.hot == "none"


def _knows_sync(case: Case) -> bool:
    """Tell whether the oracle rounds at the same points as the replicas' exchange."""
    sync = case.sync
    if sync.transport == "fp32":
        return True
    has_hot = any(table.hot != "none" for table in case.tables.values())
    if sync.kind == "weight":
        return sync.dense_above == 1.0 and not has_hot
    senders = [peers_of_first_rank(case), *([list(range(case.world_size))] * has_hot)]
    # Four senders on two hosts save nothing by owners of totals; others may.
    return all(len(ranks) <= 2 or sends_by_host(case, ranks) for ranks in senders)


def _largest(tensors: Iterable[torch.Tensor]) -> float:
    return max((tensor.abs().max().item() for tensor in tensors if tensor.numel()), default=0.0)


def _largest_of(tensors: dict[Any, torch.Tensor], table: str) -> float:
    return _largest(tensor for key, tensor in tensors.items() if _table_of(key) == table)


def _gaps(exact: dict[Any, torch.Tensor], noisy: list[dict[Any, torch.Tensor]]) -> dict[str, float]:
    differences: dict[str, list[torch.Tensor]] = defaultdict(list)
    for key, tensor in exact.items():
        # Noise may make a moment near 0 negative, and results that depend on it NaN.
        differences[_table_of(key)] += [
            (tensor - values[key].double()).nan_to_num(nan=math.inf) for values in noisy
        ]
    return {name: _largest(of_table) for name, of_table in differences.items()}


def _table_of(key: Any) -> str:
    return key[1] if isinstance(key, tuple) and isinstance(key[1], str) else ""
