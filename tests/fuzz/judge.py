"""Compare ranks' results with the oracle, replicas bit for bit, and densities to their bound."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.fuzz.actions import actions_of, batches_of
from tests.fuzz.batches import local_batch
from tests.fuzz.case import Case
from tests.fuzz.dense_oracle import PositionWeights
from tests.fuzz.oracle import Expected, expect
from tests.fuzz.search import contradiction
from tests.fuzz.seen import Piece, RankReport, Seen
from tests.fuzz.state import initial_dense, initial_tables
from tests.fuzz.tolerance import Applied, RoundedExactly, Tolerances
from torchrec_2dsp.dense.gradient_sums import GradientReport


class Difference(Exception):
    """Ends the comparison of a case."""

    def __init__(self, kind: str, text: str) -> None:
        """Store the finding's kind, without numbers, and its text: what differs, where and how."""
        self.kind, self.text = kind, text
        super().__init__(text)


def check_density(case: Case, exact: Expected, seen: list[Seen]) -> int:
    """Check that no rank exceeded the density; return how many elements all ranks chose."""
    if not case.dense.leaves_out:
        return 0
    num_chosen, actions = 0, actions_of(case)
    for index in seen[0].sent:
        # DDP learns a static graph in the first step, where it adds up after each batch; otherwise
        # it does after the last one.
        is_in_parts = (
            index == 0 and case.dense.kind == "thresholded" and not case.dense.has_shortcut
        )
        num_sums = len(batches_of(case, actions[index])) if is_in_parts else 1
        for rank, of_rank in enumerate(seen):
            report, where = of_rank.sent[index], f"rank {rank} in action {index}"
            _check_report(case, report, index in exact.sent_whole, where)
            _check_chosen(case, report, num_sums, where)
            num_chosen += report.num_entries
        if (sent := seen[0].sent[index]).num_thresholded_steps:
            applied, allowed = seen[0].applied[index], num_sums * case.world_size
            num_whole = len(applied) - sent.num_elements // num_sums
            _check_sum(case, applied, allowed, num_whole, f"action {index}")
    return num_chosen


def _check_report(case: Case, sent: GradientReport, is_whole: bool, where: str) -> None:
    """Check a rank's report on how it sent one step's gradients."""
    is_thresholded = sent.num_thresholded_steps == 1
    has_choice = case.dense.kind == "thresholded" and case.dense.route == "auto"
    # Ranks that don't meet send nothing.
    num_steps = int(case.dense.kind == "thresholded" or not is_whole)
    if sent.num_steps != num_steps or (is_thresholded and is_whole):
        raise Difference("wrong report", f"{where}: {sent}")
    if not is_whole and not is_thresholded and not has_choice:
        raise Difference("wrong report", f"{where} was to leave something out: {sent}")
    if has_choice and is_thresholded and not sent.num_bytes < sent.dense_bytes:
        raise Difference("wrong report", f"{where} chose to send more than in DDP: {sent}")


def _check_chosen(case: Case, sent: GradientReport, num_sums: int, where: str) -> None:
    """Check how many elements a rank reports to have sent in one step."""
    num_sums *= sent.num_thresholded_steps
    most_of = {num_sums * size: num_sums * most for size, most in _most_of_buckets(case).items()}
    if sent.num_entries > (most := most_of.get(sent.num_elements, -1)):
        raise Difference(
            "more than the density",
            f"{where}: {sent.num_entries} of {sent.num_elements} elements, where {most} are "
            f"allowed, in sums of {sorted(most_of)}",
        )


def _most_of_buckets(case: Case) -> dict[int, int]:
    """Return how many elements a rank may send, by the size of what chooses in a step.

    Small buckets each take the cheapest route: any set of parameters may choose. Otherwise all do.
    """
    sizes = [param.numel() for param in initial_dense(case).values()]
    dense, most = case.dense, {0: 0}
    is_by_bucket = dense.small_buckets and dense.kind == "thresholded" and dense.route == "auto"
    for size in sizes:
        chosen = {num + size: sent + _most_of(case, size) for num, sent in most.items()}
        kept = most if is_by_bucket else {}
        most = {num: max(kept.get(num, 0), chosen.get(num, 0)) for num in {*kept, *chosen}}
    return most


def _check_sum(
    case: Case, applied: torch.Tensor, num_messages: int, num_whole: int, where: str
) -> None:
    """Check that no more elements arrived than ``num_messages`` messages may hold.

    Parameters with ``num_whole`` elements together came whole, from buckets that chose none.
    """
    for number, (size, values) in enumerate(_by_param(case, applied)):
        allowed = num_messages * _most_of(case, size)
        if (num_changed := int(values.count_nonzero())) > allowed:
            num_whole -= size
            if num_whole < 0:
                raise Difference(
                    "more than the density",
                    f"{num_changed} of {size} elements of dense parameter {number} were sent in "
                    f"{where}; the density allows all ranks {allowed} together",
                )


def _most_of(case: Case, size: int) -> int:
    """Return how many elements a rank may send at once from a parameter with this size."""
    share = case.dense.density * size
    return max(1, round(share)) if case.dense.kind == "local" else math.ceil(share)


def _by_param(case: Case, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    sizes = [param.numel() for param in initial_dense(case).values()]
    yield from zip(sizes, values.split(sizes), strict=True)


REFUSALS = ("ConfigError", "MeshError", "PlanError", "UnsupportedError")
"""Errors by which a configuration is refused; others of ours mean that a good one failed."""


@dataclass
class Counts:
    """Counts comparisons, so that an empty comparison is noticed."""

    scores: int = 0
    weights: int = 0
    moved_weights: int = 0
    """Weights that training has changed."""
    moved_positions: int = 0
    """Position weights that training has changed."""
    moments: int = 0
    id_maps: int = 0
    evicted: int = 0
    """Rows that id maps gave to other ids."""
    copies: int = 0
    """Numbers that two ranks hold, compared bit for bit."""
    left_out: int = 0
    """Dense gradients that ranks hadn't sent yet."""
    chosen: int = 0
    """Dense gradients' elements that ranks chose to send, where they didn't send all."""
    refused_batches: int = 0
    refused_nans: int = 0
    """Cases in which all ranks had to refuse a gradient, and did."""
    synced_rows: int = 0
    rounded: int = 0
    """Numbers that were rounded on their way, compared with an oracle that rounds alike."""
    searched: int = 0
    """Cases whose plan was searched."""
    blurred: int = 0
    """1 if the case's tolerance is too large to detect much."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{name: vars(self)[name] + vars(other)[name] for name in vars(self)})


@dataclass(frozen=True)
class Verdict:
    """A case's result."""

    outcome: str
    """``"ok"``, ``"refused"`` or ``"finding"``."""
    kind: str = ""
    """The kind of refusal or finding, in a few words without numbers."""
    text: str = ""
    """All that is known of it."""
    counts: Counts = field(default_factory=Counts)


def judge(case: Case, reports: list[RankReport]) -> Verdict:
    if case.has_nan:
        return _judge_nan(case, reports)
    if any(report.outcome != "returned" for report in reports):
        return _failed(reports)
    seen = [report.seen for report in reports if report.seen is not None]
    if case.search is not None:
        chosen = seen[0].chosen
        assert chosen is not None
        if any(of_rank.chosen != chosen for of_rank in seen):
            return Verdict("finding", "ranks have other plans", str([of.chosen for of in seen]))
        if text := contradiction(case, chosen):
            return Verdict("finding", "a plan against demands", text)
        verdict = _compared(chosen, seen)
        verdict.counts.searched = 1
        return replace(verdict, text=verdict.text and f"{verdict.text}\n  plan {chosen.to_json()}")
    return _compared(case, seen)


def _compared(case: Case, seen: list[Seen]) -> Verdict:
    comparison = _Comparison(case, seen[0].applied)
    try:
        for rank, of_rank in enumerate(seen):
            comparison.check_rank(rank, of_rank)
        comparison.check_copies(seen)
        comparison.check_refusals(seen)
        comparison.check_left_out(seen)
        comparison.check_density(seen)
    except Difference as difference:
        return Verdict("finding", difference.kind, difference.text, comparison.counts)
    comparison.counts.synced_rows = sum(of_rank.num_synced_rows for of_rank in seen)
    return Verdict("ok", counts=comparison.counts)


def _judge_nan(case: Case, reports: list[RankReport]) -> Verdict:
    """Judge a case in which all ranks must raise the same error."""
    alike = {(report.outcome, report.error, report.message) for report in reports}
    if len(alike) == 1 and reports[0].is_ours and reports[0].error == "NotFiniteError":
        return Verdict("ok", counts=Counts(refused_nans=1))
    if {report.outcome for report in reports} == {"returned"}:
        return Verdict("ok") if _has_no_ids(case) else Verdict("finding", "a NaN wasn't refused")
    verdict = _failed(reports)
    return replace(verdict, outcome="finding", kind=f"a NaN: {verdict.kind}")


def _has_no_ids(case: Case) -> bool:
    """Tell whether the last rank's last batch has no ids, and so no row gradients."""
    batch = local_batch(case, case.steps - 1, case.world_size - 1)
    return not any(lookups.ids.numel() for lookups in batch.sent.values())


def _failed(reports: list[RankReport]) -> Verdict:
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
    # Other ranks' errors about a lost rank say less than that rank's own error.
    raised = [report for report in reports if report.outcome == "raised"]
    own = [report for report in raised if "Connection" not in report.message] or raised
    kind = f"{own[0].error}: {_stem(own[0].message)}{also}"
    if len(alike) > 1 and not also:
        kind += ", not alike on all ranks"
    return Verdict("finding", kind, shown)


def _stem(message: str) -> str:
    """Return an error's text without its case-specific names and numbers."""
    line = message.strip().splitlines()[0] if message.strip() else ""
    return re.sub(r"'[^']*'|m\d[tf]\d+|[-\d.]+|\([^)]*\)", "_", line)[:90]


class _Comparison:
    def __init__(self, case: Case, applied: Applied) -> None:
        self._case, self._exact = case, expect(case, applied=applied)
        self.counts = Counts()
        self._tolerances = Tolerances(case, self._exact, applied)
        self._rounded = RoundedExactly(case, applied)
        self.counts.evicted = self._exact.num_evicted
        self.counts.blurred = int(self._tolerances.is_blurred)
        self._initial = initial_tables(case)
        self._num_positions = PositionWeights(case).num_trained

    def check_rank(self, rank: int, seen: Seen) -> None:
        """Compare a rank with the oracle; lookups first, because faults show there first."""
        for index, scores in seen.scores.items():
            of_rank = ("scores", (index, rank))
            self._compare(*of_rank, scores, f"scores of rank {rank} in {self._at(index)}")
            self.counts.scores += scores.numel()
        for index, losses in seen.losses.items():
            of_rank = ("losses", (index, rank))
            self._compare(*of_rank, losses, f"losses of rank {rank} in {self._at(index)}")
            self.counts.scores += losses.numel()
        for index, state in seen.states.items():
            where = f"on rank {rank} in {self._at(index)}"
            self._compare("dense", (index, rank), state.dense, f"dense part {where}")
            before = torch.cat([param.flatten() for param in initial_dense(self._case).values()])
            moved = (state.dense.cpu() - before).abs() > 1e-6
            self.counts.moved_positions += int(moved[: self._num_positions].sum())
            wanted = self._exact.id_maps[index]
            if wrong := [name for name in wanted if not wanted[name].equal(state.id_maps[name])]:
                raise Difference("wrong id map", f"{wrong[0]} {where}")
            self.counts.id_maps += len(wanted)
            for piece in state.weights:
                of_table = ("weights", (index, piece.table))
                self._compare(*of_table, piece.values, f"{_name(piece)} {where}", piece)
                before = _cut(self._initial[piece.table], piece).double()
                wanted = _cut(self._exact.weights[index, piece.table], piece)
                self.counts.weights += wanted.numel()
                self.counts.moved_weights += int(((wanted - before).abs() > 1e-6).sum())
            for piece in state.moments:
                of_table = ("moments", (index, piece.table))
                what = f"moments of {_name(piece)} {where}"
                self._compare(*of_table, piece.values, what, piece)
                self.counts.moments += piece.values.numel()
        missing = {index for index, of in self._exact.dense if of == rank} ^ seen.states.keys()
        looked_up = seen.scores.keys() | seen.losses.keys() | seen.refusals.keys()
        wanted_lookups = {index for index, of in self._exact.scores if of == rank}
        missing |= wanted_lookups - looked_up
        if missing:
            raise Difference("the machine", f"rank {rank} didn't see actions {sorted(missing)}")

    def check_copies(self, seen: list[Seen]) -> None:
        """Check that copies are bitwise equal and tables complete."""
        for index in sorted({index for index, _ in self._exact.dense}):
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
                # Ranks that train by themselves are equal when they have met.
                if torch.equal(self._exact.dense[index, rank], self._exact.dense[index, 0]):
                    pieces["dense part"].append((rank, state.dense))
            for name, copies in pieces.items():
                self._check_equal(name, copies, index)
            for name, table in self._case.tables.items():
                for holder in self._holders(name):
                    if held[name, holder] != table.rows * table.dim:
                        text = f"{held[name, holder]} of {table.rows * table.dim} weights of {name}"
                        raise Difference("incomplete table", f"{text} in {self._at(index)}")

    def check_refusals(self, seen: list[Seen]) -> None:
        """Check that all ranks refuse bad batches with the same error."""
        for index, action in enumerate(actions_of(self._case)):
            texts = {of_rank.refusals.get(index, "") for of_rank in seen}
            if action.kind != "refuse" and texts == {""}:
                continue
            if len(texts) > 1 or "" in texts:
                raise Difference("not refused alike", f"{self._at(index)}: {texts}")
            self.counts.refused_batches += 1

    def check_left_out(self, seen: list[Seen]) -> None:
        """Check that sent and unsent dense gradients add up to the total."""
        for (index, _), wanted in self._exact.left_out.items():
            if not seen[0].left_out.keys() & {index}:
                continue
            left_out = torch.stack([of_rank.left_out[index] for of_rank in seen]).sum(dim=0)
            what = f"dense gradients that weren't sent by {self._at(index)}"
            self._compare("left_out", (index, 0), left_out, what)
            self.counts.left_out += int((wanted != 0).sum())
        for index in seen[0].applied:
            copies = [(rank, of_rank.applied[index]) for rank, of_rank in enumerate(seen)]
            self._check_equal("dense gradients", copies, index)

    def check_density(self, seen: list[Seen]) -> None:
        """Check that ranks send no more dense gradients than the density allows."""
        self.counts.chosen += check_density(self._case, self._exact, seen)

    def _check_equal(self, name: str, copies: list[tuple[int, torch.Tensor]], index: int) -> None:
        (first_rank, first), *others = copies
        for rank, values in others:
            self.counts.copies += values.numel()
            if first.shape != values.shape or not torch.equal(first, values):
                gap = (first.double() - values.double()).abs().max().item()
                text = f"{name} on ranks {first_rank} and {rank} by {gap:.3g} in {self._at(index)}"
                raise Difference("copies differ", text)

    def _holder(self, table: str, group: int, rank: int) -> int:
        if self._case.tables[table].sharding == "data_parallel":
            return rank
        return 0 if self._case.tables[table].once else group

    def _holders(self, table: str) -> range:
        """Return a table's full copies as indices: one per rank, per group, or in the world."""
        if self._case.tables[table].sharding == "data_parallel":
            return range(self._case.world_size)
        return range(1 if self._case.tables[table].once else self._case.groups)

    def _compare(
        self, kind: str, key: Any, values: torch.Tensor, what: str, piece: Piece | None = None
    ) -> None:
        """Compare values with the oracle's for a kind and key, or with a piece cut from them."""
        index, table = key
        is_rounded = self._rounded.covers(index)
        expected = self._rounded.expected if is_rounded else self._exact
        wanted = vars(expected)[kind][key]
        noise = (
            self._rounded.tolerance(kind, key)
            if is_rounded
            else torch.full_like(wanted, self._tolerances.of(kind, "" if piece is None else table))
        )
        if piece is not None:
            wanted, noise = _cut(wanted, piece), _cut(noise, piece)
        if values.shape != wanted.shape:
            raise Difference(f"wrong shape of {kind}", f"{what}: {values.shape}")
        if not values.numel():
            return
        self.counts.rounded += is_rounded * values.numel()
        gaps = (values.double() - wanted).abs().nan_to_num(nan=torch.inf)
        excess = gaps - self._tolerances.base(kind, wanted)
        if not bool((excess <= noise).all()):
            place = int((excess - noise).argmax())
            raise Difference(
                "wrong numbers",
                f"{what}: {values.flatten()[place].item():.8g} in place of "
                f"{wanted.flatten()[place].item():.8g}, off by {gaps.flatten()[place].item():.3g} "
                f"and by {excess.flatten()[place].item():.3g} more than allowed, where rounding "
                f"explains {noise.flatten()[place].item():.3g}",
            )

    def _at(self, index: int) -> str:
        return f"action {index} ({actions_of(self._case)[index].kind})"


def _cut(table: torch.Tensor, piece: Piece) -> torch.Tensor:
    rows, columns = piece.values.shape
    return table[piece.row : piece.row + rows, piece.column : piece.column + columns]


def _name(piece: Piece) -> str:
    return f"{piece.table} at row {piece.row}, column {piece.column}"
