"""Write docs/gpu.md from results: ``python -m tests.gpu.page [RESULTS...]``."""

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from tests.gpu.jobs import JOBS
from tests.gpu.results import PASSED, ROOT, Result, read_results

RESULTS = ROOT / "tests" / "gpu" / "runs"
PAGE = ROOT / "docs" / "gpu.md"

_HEAD = """\
# What has run on a GPU

Made by `python -m tests.gpu.page` from what the [queue](contributing.md#on-gpus) wrote down.
"""

_NOTHING = """
The queue hasn't run on a GPU yet. What follows was tried by hand.
"""

_BY_HAND = "## Tried by hand"
"""The heading of what was written by hand, which is kept."""


def page(results: Sequence[Result], by_hand: str) -> str:
    """Return the page about results on GPUs; those on CPUs say nothing."""
    on_gpus = [result for result in results if result.card != "CPU"]
    parts = [_HEAD] if on_gpus else [_HEAD, _NOTHING]
    ordered = sorted(on_gpus, key=lambda result: result.started, reverse=True)
    # The latest first.
    for (code, card), group in groupby(ordered, lambda result: (result.code, result.card)):
        parts.append(_section(code, card, list(group)))
    return "\n".join([*parts, _BY_HAND + by_hand])


def _section(code: str, card: str, results: Sequence[Result]) -> str:
    """Return what became of all jobs with one state of the code, on one kind of card."""
    latest = results[0]
    versions = ", ".join(f"{name} {version}" for name, version in latest.versions.items())
    lines = [
        "",
        f"## {latest.started[:10]}, {card}",
        "",
        f"Commit {latest.commit or 'unknown'} (code {code}); {versions}.",
        "",
        "| job | how it ended | tests passed, failed | seconds |",
        "| --- | --- | ---: | ---: |",
    ]
    by_name = {name: [r for r in results if r.name == name] for name in {r.name for r in results}}
    lines += [_row(by_name[job.name]) for job in JOBS if job.name in by_name]
    left = [job.name for job in JOBS if job.name not in by_name]
    lines += ["", f"Not run: {'; '.join(left) or 'nothing'}."]
    for result in reversed(results):
        if result.numbers:
            lines += ["", f"### {result.name[0].upper()}{result.name[1:]}", ""]
            lines += ["| what | |", "| --- | ---: |"]
            lines += [f"| {name} | {number:,.3f} |" for name, number in result.numbers.items()]
    return "\n".join([*lines, ""])


def _row(results: Sequence[Result]) -> str:
    """Return a job's row: its latest end, and every test's in all of its runs."""
    outcomes = {test: how for result in reversed(results) for test, how in result.tests.items()}
    num_passed = sum(how == PASSED for how in outcomes.values())
    num_failed = sum(how == "failed" for how in outcomes.values())
    tests = f"{num_passed}, {num_failed}" if outcomes else "-"
    seconds = sum(result.seconds for result in results)
    usable = "" if results[0].is_usable_after else "; the GPU couldn't be used after"
    return f"| {results[0].name} | {results[0].outcome}{usable} | {tests} | {seconds:.0f} |"


def main(arguments: Sequence[str]) -> None:
    results = read_results([Path(path) for path in arguments] or [RESULTS])
    PAGE.write_text(page(results, PAGE.read_text().partition(_BY_HAND)[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
