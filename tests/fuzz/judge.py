"""Compare what the ranks saw with what the oracle expects, and copies with copies."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.fuzz.actions import actions_of
from tests.fuzz.case import Case
from tests.fuzz.oracle import expect
from tests.fuzz.processes import RankReport
from tests.fuzz.run import Piece, Seen
from tests.fuzz.tables import SIGNS, Noise
from tests.fuzz.weights import initial_tables

BASE = 4e-6
"""What may differ anyway, relative to numbers of about 1: TorchRec averages row-wise bags by their
length + 1e-6, and four ranks add float32 numbers in another order than the oracle."""
NOISE_FACTOR = 8.0
"""How many times the oracle's own rounding error the ranks' may be: they round in other places,
and the largest of many errors is compared."""
BLURRED = {"fp32": 2e-4, "half": 0.02}
"""Tolerances from which on a case says little: its rounding errors grow too fast."""
REFUSALS = ("ConfigError", "MeshError", "PlanError", "UnsupportedError")
"""Errors by which a configuration is refused; others of ours mean that a good one failed."""


@dataclass
class Counts:
    """How much was compared, so that a comparison of nothing is noticed."""

    scores: int = 0
    weights: int = 0
    moved_weights: int = 0
    """Weights that training has changed."""
    moments: int = 0
    copies: int = 0
    """Numbers that two ranks hold, compared bit for bit."""
    refused_batches: int = 0
    synced_rows: int = 0
    blurred: int = 0
    """1 if the tolerance of the case is so large that it says little."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{name: vars(self)[name] + vars(other)[name] for name in vars(self)})


@dataclass(frozen=True)
class Verdict:
    """What came of a case."""

    outcome: str
    """``"ok"``, ``"refused"`` or ``"finding"``."""
    kind: str = ""
    """Which refusal or finding, in a few words without numbers."""
    text: str = ""
    """All that is known of it."""
    counts: Counts = field(default_factory=Counts)


def judge(case: Case, reports: list[RankReport]) -> Verdict:
    """The verdict on what the ranks did."""
    if any(report.outcome != "returned" for report in reports):
        return _failed(reports)
    seen = [report.seen for report in reports if report.seen is not None]
    comparison = _Comparison(case)
    try:
        for rank, of_rank in enumerate(seen):
            comparison.check_rank(rank, of_rank)
        comparison.check_copies(seen)
        comparison.check_refusals(seen)
    except _Difference as difference:
        return Verdict("finding", difference.kind, difference.text, comparison.counts)
    comparison.counts.synced_rows = sum(of_rank.num_synced_rows for of_rank in seen)
    return Verdict("ok", counts=comparison.counts)


def _failed(reports: list[RankReport]) -> Verdict:
    """Ranks that raised, died or hung."""
    shown = "\n".join(
        f"---- rank {rank} {report.outcome}: {report.error} {report.message}\n{report.trace}"
        for rank, report in enumerate(reports)
    )
    first = reports[0]
    alike = {(report.outcome, report.error, report.message) for report in reports}
    if len(alike) == 1 and first.is_ours and first.error in REFUSALS:
        return Verdict("refused", f"{first.error}: {_stem(first.message)}", shown)
    outcomes = {report.outcome for report in reports}
    also = "".join(f", a rank {outcome}" for outcome in ("died", "hung") if outcome in outcomes)
    if "raised" not in outcomes:
        return Verdict("finding", also.removeprefix(", "), shown)
    # What the others say of a rank that is gone says less than that rank's own error.
    raised = [report for report in reports if report.outcome == "raised"]
    own = [report for report in raised if "Connection" not in report.message] or raised
    kind = f"{own[0].error}: {_stem(own[0].message)}{also}"
    if len(alike) > 1 and not also:
        kind += ", not alike on all ranks"
    return Verdict("finding", kind, shown)


def _stem(message: str) -> str:
    """An error's text without what differs from case to case."""
    line = message.strip().splitlines()[0] if message.strip() else ""
    return re.sub(r"'[^']*'|m\d[tf]\d+|[-\d.]+|\([^)]*\)", "_", line)[:90]


class _Difference(Exception):
    """Something that isn't as expected."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind, self.text = kind, text
        super().__init__(text)


class _Comparison:
    def __init__(self, case: Case) -> None:
        self._case, self._exact = case, expect(case)
        self.counts = Counts()
        types = {case.sync.transport, case.qcomms, *(t.dtype for t in case.tables.values())}
        has_halves = bool(types & {"fp16", "bf16"})
        noisy = [
            expect(case, Noise(torch.float32, signs))
            for signs in (SIGNS if has_halves else (None,))
        ]
        exact = self._exact
        self._noise = {
            (kind, name): NOISE_FACTOR * gap
            for kind in ("scores", "weights", "moments", "dense")
            for name, gap in _gaps(vars(exact)[kind], [vars(each)[kind] for each in noisy]).items()
        }
        """What rounding may add to `BASE`, by kind of number and table."""
        limit = BLURRED["half" if has_halves else "fp32"]
        noises = [
            noise / (1 + _largest_of(vars(exact)[kind], name))
            for (kind, name), noise in self._noise.items()
        ]
        self.counts.blurred = int(not max(noises, default=0.0) <= limit)
        self._initial = initial_tables(case)

    def check_rank(self, rank: int, seen: Seen) -> None:
        """What one rank saw against the oracle; lookups first, since what they miss shows first."""
        for index, scores in seen.scores.items():
            wanted = self._exact.scores[index, rank]
            self._compare(
                "scores", "", scores, wanted, f"scores of rank {rank} in {self._at(index)}"
            )
            self.counts.scores += scores.numel()
        for index, state in seen.states.items():
            where = f"on rank {rank} in {self._at(index)}"
            self._compare(
                "dense", "", state.dense, self._exact.dense[index], f"dense layer {where}"
            )
            for piece in state.weights:
                wanted = _cut(self._exact.weights[index, piece.table], piece)
                self._compare(
                    "weights", piece.table, piece.values, wanted, f"{_name(piece)} {where}"
                )
                before = _cut(self._initial[piece.table], piece).double()
                self.counts.weights += wanted.numel()
                self.counts.moved_weights += int(((wanted - before).abs() > 1e-6).sum())
            for piece in state.moments:
                wanted = _cut(self._exact.moments[index, piece.table], piece)
                self._compare(
                    "moments",
                    piece.table,
                    piece.values,
                    wanted,
                    f"moments of {_name(piece)} {where}",
                )
                self.counts.moments += wanted.numel()
        missing = self._exact.dense.keys() ^ seen.states.keys()
        looked_up = seen.scores.keys() | seen.refusals.keys()
        wanted_lookups = {index for index, of in self._exact.scores if of == rank}
        missing |= wanted_lookups - looked_up
        if missing:
            raise _Difference("the machine", f"rank {rank} didn't see actions {sorted(missing)}")

    def check_copies(self, seen: list[Seen]) -> None:
        """What several ranks hold must be equal bit for bit, and tables must be complete."""
        for index in self._exact.dense:
            pieces: dict[str, list[tuple[int, torch.Tensor]]] = defaultdict(list)
            held: dict[tuple[str, int], int] = defaultdict(int)
            for rank, of_rank in enumerate(seen):
                state = of_rank.states[index]
                group = self._case.mesh.group_of(rank)
                for kind, of_kind in (("weights", state.weights), ("moments", state.moments)):
                    for piece in of_kind:
                        pieces[f"{kind} of {_name(piece)}"].append((rank, piece.values))
                for piece in state.weights:
                    held[piece.table, self._holder(piece.table, group, rank)] += (
                        piece.values.numel()
                    )
                for name, tensor in state.hot_copies.items():
                    pieces[f"hot rows of {name}"].append((rank, tensor))
                pieces["dense layer"].append((rank, state.dense))
            for name, copies in pieces.items():
                self._check_equal(name, copies, index)
            for name, table in self._case.tables.items():
                for holder in self._holders(name):
                    if held[name, holder] != table.rows * table.dim:
                        text = f"{held[name, holder]} of {table.rows * table.dim} weights of {name}"
                        raise _Difference("incomplete table", f"{text} in {self._at(index)}")

    def check_refusals(self, seen: list[Seen]) -> None:
        """Bad batches are refused by one error on all ranks."""
        for index, action in enumerate(actions_of(self._case)):
            texts = {of_rank.refusals.get(index, "") for of_rank in seen}
            if action.kind != "refuse" and texts == {""}:
                continue
            if len(texts) > 1 or "" in texts:
                raise _Difference("not refused alike", f"{self._at(index)}: {texts}")
            self.counts.refused_batches += 1

    def _check_equal(self, name: str, copies: list[tuple[int, torch.Tensor]], index: int) -> None:
        (first_rank, first), *others = copies
        for rank, values in others:
            self.counts.copies += values.numel()
            if first.shape != values.shape or not torch.equal(first, values):
                gap = (first.double() - values.double()).abs().max().item()
                text = f"{name} on ranks {first_rank} and {rank} by {gap:.3g} in {self._at(index)}"
                raise _Difference("copies differ", text)

    def _holder(self, table: str, group: int, rank: int) -> int:
        """Which of `_holders` a rank belongs to."""
        if self._case.tables[table].sharding == "data_parallel":
            return rank
        return 0 if self._case.tables[table].once else group

    def _holders(self, table: str) -> range:
        """Those that together hold a whole table: each rank, each group, or the world."""
        if self._case.tables[table].sharding == "data_parallel":
            return range(self._case.world_size)
        return range(1 if self._case.tables[table].once else self._case.groups)

    def _compare(
        self, kind: str, table: str, values: torch.Tensor, wanted: torch.Tensor, what: str
    ) -> None:
        if values.shape != wanted.shape:
            raise _Difference(f"wrong shape of {kind}", f"{what}: {values.shape}")
        if not values.numel():
            return
        gaps = (values.double() - wanted).abs().nan_to_num(nan=torch.inf)
        excess = gaps - BASE * (1 + wanted.abs())
        noise = self._noise[kind, table]
        if not excess.max().item() <= noise:
            place = int(excess.argmax())
            raise _Difference(
                "wrong numbers",
                f"{what}: {values.flatten()[place].item():.8g} in place of "
                f"{wanted.flatten()[place].item():.8g}, off by {gaps.flatten()[place].item():.3g} "
                f"and by {excess.max().item():.3g} more than float32 is, where rounding explains "
                f"{noise:.3g}",
            )

    def _at(self, index: int) -> str:
        return f"action {index} ({actions_of(self._case)[index].kind})"


def _cut(table: torch.Tensor, piece: Piece) -> torch.Tensor:
    rows, columns = piece.values.shape
    return table[piece.row : piece.row + rows, piece.column : piece.column + columns]


def _name(piece: Piece) -> str:
    return f"{piece.table} at row {piece.row}, column {piece.column}"


def _largest(tensors: Iterable[torch.Tensor]) -> float:
    return max((tensor.abs().max().item() for tensor in tensors if tensor.numel()), default=0.0)


def _largest_of(tensors: dict[Any, torch.Tensor], table: str) -> float:
    return _largest(tensor for key, tensor in tensors.items() if _table_of(key) == table)


def _gaps(exact: dict[Any, torch.Tensor], noisy: list[dict[Any, torch.Tensor]]) -> dict[str, float]:
    """The largest difference of the tensors of each table; under "" of those that are of none."""
    differences: dict[str, list[torch.Tensor]] = defaultdict(list)
    for key, tensor in exact.items():
        differences[_table_of(key)] += [tensor - values[key].double() for values in noisy]
    return {name: _largest(of_table) for name, of_table in differences.items()}


def _table_of(key: Any) -> str:
    return key[1] if isinstance(key, tuple) and isinstance(key[1], str) else ""
