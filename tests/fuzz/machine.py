"""Run many cases on several workers, sum up their results, and shrink the findings."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from tests.fuzz.case import Case
from tests.fuzz.draw import draw_case
from tests.fuzz.judge import Counts, Verdict
from tests.fuzz.shrink import shrink
from tests.fuzz.worker import Worker

DEADLINE_S = 60.0
SHRINK_S = 120.0
"""The time limit for making a finding smaller."""
MAX_REFUSED_SHARE, MAX_BLURRED_SHARE = 0.25, 0.15
ENOUGH_CASES = 150
"""So many cases are enough to judge the machine itself by."""


@dataclass(frozen=True)
class Finding:
    """A case that failed."""

    case: Case
    """The smallest one that fails in the same way."""
    drawn: Case
    """The case as it was drawn."""
    verdict: Verdict
    """On the smallest one."""

    def __str__(self) -> str:
        return (
            f"{self.verdict.kind}\n  python -m tests.fuzz --case '{self.case.to_json()}'\n"
            f"  drawn as {self.drawn.to_json()}\n{self.verdict.text}"
        )


@dataclass
class Summary:
    """All cases' results."""

    num_ok: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    repeated: Counter[str] = field(default_factory=Counter)
    """Findings of kinds that there were enough of, which weren't made smaller."""
    counts: Counts = field(default_factory=Counts)

    @property
    def num_cases(self) -> int:
        """The number of all judged cases."""
        failed = len(self.findings) + self.repeated.total()
        return self.num_ok + self.refusals.total() + failed

    @property
    def complaints(self) -> list[str]:
        """Return complaints about the machine itself."""
        if self.num_cases < ENOUGH_CASES:
            return []
        complaints = []
        refused = self.refusals.total() / self.num_cases
        if refused > MAX_REFUSED_SHARE:
            complaints.append(f"{refused:.0%} of the cases were refused")
        if self.counts.blurred > MAX_BLURRED_SHARE * self.num_cases:
            complaints.append(f"{self.counts.blurred} cases had tolerances too large to say much")
        for name, count in vars(self.counts).items():
            if not count and name != "blurred":
                complaints.append(f"no {name} in any case")
        return complaints

    def __str__(self) -> str:
        lines = [f"{self.num_cases} cases: {self.num_ok} ok"]
        lines += [f"{count:6} refused, {kind}" for kind, count in self.refusals.most_common()]
        lines += [f"{count:6} more findings, {kind}" for kind, count in self.repeated.most_common()]
        compared = ", ".join(f"{count:,} {name}" for name, count in vars(self.counts).items())
        lines += [f"compared: {compared.replace('_', ' ')}"]
        lines += [f"THE MACHINE: {complaint}" for complaint in self.complaints]
        lines += [f"FINDING {number}: {entry}" for number, entry in enumerate(self.findings, 1)]
        return "\n".join(lines)


class Machine:
    """Runs cases on workers side by side."""

    def __init__(
        self,
        workers: list[Worker],
        *,
        deadline_s: float = DEADLINE_S,
        shrink_s: float = SHRINK_S,
        max_of_kind: int = 2,
        show: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Shrink up to ``max_of_kind`` findings per kind for ``shrink_s``; 0 shrinks none."""
        self._workers = workers
        self._deadline_s, self._shrink_s = deadline_s, shrink_s
        self._max_of_kind = max_of_kind
        self._show = show

    def run(
        self,
        first_seed: int,
        num_cases: int | None,
        seconds: float | None = None,
        *,
        max_findings: int = 20,
        is_wanted: Callable[[Case], bool] = lambda case: True,
    ) -> Summary:
        """Draw cases from consecutive seeds, up to a number, a time or ``max_findings``."""
        cases = (draw_case(seed) for seed in _seeds(first_seed, num_cases, seconds))
        return self.run_cases((case for case in cases if is_wanted(case)), max_findings)

    def run_cases(self, cases: Iterator[Case], max_findings: int = 20) -> Summary:
        """Run these cases, and shrink the first findings of each kind."""
        summary = Summary()
        start = shown = time.monotonic()
        for case, verdict in self._verdicts(cases, lambda: len(summary.findings) < max_findings):
            summary.counts += verdict.counts
            if verdict.outcome == "ok":
                summary.num_ok += 1
            elif verdict.outcome == "refused":
                summary.refusals[verdict.kind] += 1
            elif self._is_known(verdict, summary):
                summary.repeated[verdict.kind] += 1
                self._show(f"again {verdict.kind}: {case.to_json()}")
            else:
                self._show(f"finding, {verdict.kind}: {case.to_json()}")
                summary.findings.append(self.shrunk(case, verdict))
                self._show(f"shrunk to {summary.findings[-1].case.to_json()}")
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                findings = len(summary.findings) + summary.repeated.total()
                self._show(
                    f"{summary.num_cases} cases in {shown - start:.0f} s: {summary.num_ok} ok, "
                    f"{summary.refusals.total()} refused, {findings} findings"
                )
        return summary

    def _is_known(self, verdict: Verdict, summary: Summary) -> bool:
        """Tell whether enough findings of this kind were shrunk already."""
        kinds = [finding.verdict.kind for finding in summary.findings]
        return kinds.count(verdict.kind) >= self._max_of_kind

    def shrunk(self, case: Case, verdict: Verdict) -> Finding:
        """Return the smallest case found in time that fails in the same way."""
        if not self._shrink_s:
            return Finding(case, case, verdict)
        deadline = time.monotonic() + self._shrink_s
        last = verdict

        def still_fails(other: Case) -> bool:
            nonlocal last
            if time.monotonic() > deadline:
                return False
            answer = worker.judged(other, self._deadline_s)
            fails = answer.outcome == "finding" and answer.kind == verdict.kind
            last = answer if fails else last
            return fails

        with Worker(self._workers[0].plant) as worker:
            return Finding(shrink(case, still_fails), case, last)

    def _verdicts(
        self, cases: Iterator[Case], goes_on: Callable[[], bool]
    ) -> Iterator[tuple[Case, Verdict]]:
        """Yield each case with its verdict, in order of completion."""
        idle, running = list(self._workers), {}
        while True:
            while idle and goes_on() and (case := next(cases, None)) is not None:
                worker = idle.pop()
                worker.ask(case, self._deadline_s)
                running[worker.connection] = (worker, case)
            if not running:
                return
            for connection in wait(list(running)):
                worker, case = running.pop(connection)  # type: ignore[arg-type]
                idle.append(worker)
                yield case, worker.answer()


def _seeds(first: int, count: int | None, seconds: float | None) -> Iterator[int]:
    start, seed = time.monotonic(), first
    while count is None or seed < first + count:
        if seconds is not None and time.monotonic() - start > seconds:
            return
        yield seed
        seed += 1
