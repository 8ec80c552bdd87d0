"""Write docs/gpu.md from results: ``python -m tests.gpu.page [RESULTS...]``."""

import sys
from collections import Counter
from collections.abc import Sequence
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
"""The heading of the handwritten part, which is kept."""


def page(results: Sequence[Result], by_hand: str) -> str:
    """Return the page about results on GPUs; CPU results are left out."""
    on_gpus = [result for result in results if result.card != "CPU"]
    cards = list(dict.fromkeys(result.card for result in on_gpus))
    parts = [_HEAD, *([] if cards else [_NOTHING])]
    parts += [_section(card, [r for r in on_gpus if r.card == card]) for card in cards]
    return "\n".join([*parts, _BY_HAND + by_hand])


def _section(card: str, results: Sequence[Result]) -> str:
    """Return the section on one card: each job's results with the latest code it ran."""
    latest = results[-1]
    versions = ", ".join(f"{name} {version}" for name, version in latest.versions.items())
    lines = [
        "",
        f"## {card}",
        "",
        f"The last time {latest.started[:10]}; {versions}.",
        "",
        "| job | commit | how it ended | tests passed, failed | seconds |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    by_name = {job.name: [r for r in results if r.name == job.name] for job in JOBS}
    lines += [_row(of_job) for of_job in by_name.values() if of_job]
    left = Counter(name.split()[0].strip(",") for name, ran in by_name.items() if not ran)
    kinds = ", ".join(f"{kind} ({number})" for kind, number in left.items())
    lines += ["", f"Jobs that haven't run: {kinds or 'none'}."]
    for name, of_job in by_name.items():
        if numbers := next((r.numbers for r in reversed(of_job) if r.numbers), {}):
            lines += ["", f"### {name[0].upper()}{name[1:]}", ""]
            lines += ["| what | |", "| --- | ---: |"]
            lines += [f"| {what} | {number:,.3f} |" for what, number in numbers.items()]
    return "\n".join([*lines, ""])


def _row(results: Sequence[Result]) -> str:
    """Return a job's row: its latest outcome, and test counts over all runs of that code."""
    latest = results[-1]
    of_code = [result for result in results if result.code == latest.code]
    outcomes = {test: how for result in of_code for test, how in result.tests.items()}
    num_passed = sum(how == PASSED for how in outcomes.values())
    num_failed = sum(how == "failed" for how in outcomes.values())
    tests = f"{num_passed}, {num_failed}" if outcomes else "-"
    seconds = sum(result.seconds for result in of_code)
    usable = "" if latest.is_usable_after else "; the GPU couldn't be used after"
    cells = latest.name, latest.commit, f"{latest.outcome}{usable}", tests, f"{seconds:.0f}"
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> None:
    results = read_results([Path(path) for path in arguments] or [RESULTS])
    PAGE.write_text(page(results, PAGE.read_text().partition(_BY_HAND)[2]))


if __name__ == "__main__":
    main(sys.argv[1:])
