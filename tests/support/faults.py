"""Make training fail in many ways, and check how the other ranks end.

Run as ``python -m tests.support.faults [--case NAME] [--only TEXT] [--page FILE]``. All ranks are
forks of this process, which saves the imports, but each ends as a whole interpreter does.
"""

import argparse
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch.distributed as dist

from tests.support.devices import on_gpus
from tests.support.fault_cases import (
    DIFFERS,
    FAULTY_RANK,
    FAULTY_STEP,
    NAN,
    NUM_STEPS,
    PROGRAMS,
    SKIPS,
    STOPPED,
    Case,
    all_cases,
)
from tests.support.fault_ranks import TIMEOUT_S, run_rank

NUM_RANKS = 4
DEADLINE_S = 10.0
"""From the fault to the end of the last other rank."""
_LIMIT_S = 120.0 if on_gpus() else 45.0
"""Ranks left after that are killed; a case takes some seconds before its fault."""


@dataclass(frozen=True)
class Ended:
    """A rank's ending."""

    rank: int
    exit_code: int | None
    """`None` if it had to be killed."""
    error: str | None = None
    text: str = ""
    ranks: list[int] = field(default_factory=list)
    is_ours: bool = False
    ended_at: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """All ranks' endings in a case."""

    case: Case
    ends: list[Ended]
    seconds: float
    """From the fault to the last end."""

    @property
    def others(self) -> list[Ended]:
        """The ranks that did nothing wrong."""
        return [end for end in self.ends if end.rank != FAULTY_RANK]

    @property
    def problems(self) -> list[str]:
        """List deviations from the expected ends."""
        problems = []
        if aborted := [end.rank for end in self.ends if end.exit_code in (-6, -11)]:
            problems.append(f"aborted: {aborted}")
        if running := [end.rank for end in self.others if end.exit_code is None]:
            problems.append(f"left running: {running}")
        # Outside the context a broken connection in the backward keeps gloo's error.
        is_promised = self.case.fault.in_context
        if is_promised and (
            untyped := [f"{end.rank} {end.error}" for end in self.others if not end.is_ours]
        ):
            problems.append(f"no error of ours: {untyped}")
        unnamed = [end.rank for end in self.others if not self._names_rank(end)]
        if is_promised and unnamed:
            problems.append(f"not named by: {unnamed}")
        fault = self.case.fault
        needs_timeout = fault.kind == STOPPED or fault.moment == "waits at a barrier"
        limit = DEADLINE_S + (TIMEOUT_S if needs_timeout else 0.0)
        if self.seconds > limit:
            problems.append(f"late: {self.seconds:.1f} s")
        return problems

    def _names_rank(self, end: Ended) -> bool:
        if self.case.fault.kind in (NAN, DIFFERS):
            return "rank " in end.text
        leaves_out = self.case.fault.moment == "leaves a batch out"
        text = "not all ranks do the same" if leaves_out else "no loss has reached"
        if self.case.fault.kind == SKIPS and text not in end.text:
            return False
        return end.ranks == [FAULTY_RANK]


def run_case(case: Case, make_store: Callable[[], dist.Store], folder: Path) -> Outcome | None:
    """Fork the ranks and wait for them to end; return `None` in a fork."""
    sys.stdout.flush()
    pids: dict[int, int] = {}
    for rank in range(NUM_RANKS):
        pid = os.fork()
        if pid == 0:
            log = os.open(folder / f"log{rank}", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            run_rank(case, rank, make_store(), folder)
            return None
        pids[pid] = rank
    codes = _wait(pids)
    ends = []
    for rank in range(NUM_RANKS):
        path = folder / f"result{rank}"
        reported = json.loads(path.read_text()) if path.exists() and path.stat().st_size else {}
        ends.append(Ended(rank=rank, exit_code=codes.get(rank), **reported))
    fault = folder / "fault"
    last = max(end.ended_at for end in ends if end.rank != FAULTY_RANK)
    if not fault.exists() or not last:
        return Outcome(case, ends, _LIMIT_S)
    return Outcome(case, ends, max(last - float(fault.read_text()), 0.0))


def _wait(pids: dict[int, int]) -> dict[int, int]:
    """Return exit codes by rank; a rank still running at the deadline is killed and has none."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + _LIMIT_S
    others = set(pids.values()) - {FAULTY_RANK}
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid, rank in pids.items():
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        if others <= codes.keys():
            # The faulty one may be stopped, or need a moment to end.
            deadline = min(deadline, time.monotonic() + 2.0)
            others = {-1}
        time.sleep(0.02)
    for pid, rank in pids.items():
        if rank not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes


_SERVER = """
import sys
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def run_all(cases: Sequence[Case], logs: Path | None = None) -> list[Outcome] | None:
    """Run cases one after the other; return `None` in a fork, which should then end."""
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # The store outlives the ranks, as torchrun's agent store does.
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    port = int(server.stdout.readline())
    # Objects from the imports take seconds to collect at each exit and don't matter here.
    gc.freeze()
    outcomes = []
    for number, case in enumerate(cases):
        folder = Path(tempfile.mkdtemp())
        outcome = run_case(case, partial(_store, port, number), folder)
        if outcome is None:
            return None
        outcomes.append(outcome)
        print(
            f"{case}: {'; '.join(outcome.problems) or 'ok'} ({outcome.seconds:.1f} s)", flush=True
        )
        for end in outcome.ends if outcome.problems else ():
            print(f"    {end}", flush=True)
        if outcome.problems and logs is not None:
            shutil.copytree(folder, logs / str(number), dirs_exist_ok=True)
        shutil.rmtree(folder)
    server.kill()
    server.wait()
    return outcomes


def _store(port: int, number: int) -> dist.Store:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore(f"case{number}/", store)


EXAMPLES = (
    "raises in the loss",
    "kill -9 in the backward",
    "SIGSTOP in the forward",
    "out of batches, then ends",
    "out of batches, then is told",
    "out of batches, then saves",
    "NaN in the loss",
    "no backward of tables, then takes the next batch",
    "alone reads the state",
    "another learning rate",
)


def page(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown page with one row per fault."""
    by_fault: dict[str, list[Outcome]] = {str(case.fault): [] for case in all_cases()}
    for outcome in outcomes:
        by_fault[str(outcome.case.fault)].append(outcome)
    num_well = sum(not outcome.problems for outcome in outcomes)
    lines = [
        "# How training ends when a rank fails",
        "",
        f"Rank {FAULTY_RANK} of four fails at step {FAULTY_STEP} of {NUM_STEPS}, in "
        f"{len(PROGRAMS)} programs: {', '.join(PROGRAMS)}. The process groups' timeout is "
        f"{TIMEOUT_S:g} s. A case went *well* if all other ranks ended by themselves, each with an "
        "error of this package that names the rank, no process was aborted, and the last rank "
        f"ended within {DEADLINE_S:g} s of the fault. After a SIGSTOP, or if the rank waits at a "
        f"barrier, {TIMEOUT_S:g} s more are allowed: before the timeout such a rank looks like a "
        "slow one. Without the context `failing_together` errors needn't name the rank, but all "
        f"ranks must end. {num_well} of {len(outcomes)} cases went well. The "
        "[guide](guides/faults.md) explains the errors and their remedies.",
        "",
        "```sh",
        "python -m tests.support.faults --page docs/faults.md",
        "```",
        "",
        "| fault of the rank | programs | well | slowest end | otherwise |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    lines += [_row(fault, outcome) for fault, outcome in by_fault.items() if outcome]
    lines += ["", "What the other ranks say:", ""]
    for example in EXAMPLES:
        texts = [_text(outcome) for outcome in by_fault.get(example, []) if not outcome.problems]
        lines += [f"- {example}: `{text}`" for text in texts[:1]]
    return "\n".join(lines) + "\n"


def _row(fault: str, outcomes: Sequence[Outcome]) -> str:
    otherwise = [
        f"{outcome.case.program}: {', '.join(outcome.problems)}"
        for outcome in outcomes
        if outcome.problems
    ]
    num_well, slowest = len(outcomes) - len(otherwise), max(outcome.seconds for outcome in outcomes)
    texts = "; ".join(otherwise) or "-"
    return f"| {fault} | {len(outcomes)} | {num_well} | {slowest:.1f} s | {texts} |"


def _text(outcome: Outcome) -> str:
    return outcome.others[0].text.replace("|", "/")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", action="append", default=[], help="only the case of this name")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--logs", type=Path, help="keep what ranks said in cases with problems")
    parser.add_argument("--page", type=Path, help="write a page about it")
    options = parser.parse_args(arguments)
    cases = [case for case in all_cases() if options.only in str(case)]
    if options.case:
        cases = [case for case in cases if str(case) in options.case]
    outcomes = run_all(cases, options.logs)
    if outcomes is None:
        return 0
    if options.page is not None:
        options.page.write_text(page(outcomes))
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
