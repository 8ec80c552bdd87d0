"""What `tests.support.faults` has seen, as a page."""

from collections.abc import Sequence
from typing import Any

from tests.support.fault_cases import (
    FAULTY_RANK,
    FAULTY_STEP,
    NUM_STEPS,
    PROGRAMS,
    Fault,
    all_cases,
)

Told = dict[str, Any]
"""An outcome, as JSON."""

_EXAMPLES = (
    "raises in the loss",
    "kill -9 in the backward",
    "SIGSTOP in the forward",
    "out of batches, then ends",
    "out of batches, then is told",
    "out of batches, then saves",
    "NaN in the loss",
    "another learning rate",
)


def page(outcomes: Sequence[Told], *, timeout_s: float, deadline_s: float) -> str:
    """A Markdown page with a row for each fault."""
    by_fault: dict[str, list[Told]] = {str(case.fault): [] for case in all_cases()}
    for told in outcomes:
        by_fault[str(Fault(**told["case"]["fault"]))].append(told)
    num_well = sum(not told["problems"] for told in outcomes)
    lines = [
        "# How training ends when a rank fails",
        "",
        f"Rank {FAULTY_RANK} of four fails at step {FAULTY_STEP} of {NUM_STEPS}, in "
        f"{len(PROGRAMS)} programs: {', '.join(PROGRAMS)}. The timeout of the process groups is "
        f"{timeout_s:g} s. A case went *well* if all other ranks ended by themselves, each with an "
        "error of this package that names the rank, no process was aborted, and the last one ended "
        f"within {deadline_s:g} s of the fault. After a SIGSTOP, or where the rank waits at a "
        f"barrier, {timeout_s:g} s more: nobody can tell such a rank from a slow one before the "
        "timeout. Without the context `failing_together` nobody has to be named, but all have to "
        f"end. {num_well} of {len(outcomes)} did. What the errors mean, and what to do about them: "
        "[guide](guides/faults.md).",
        "",
        "```sh",
        "python -m tests.support.faults --page docs/faults.md",
        "```",
        "",
        "| fault of the rank | programs | well | slowest end | otherwise |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    lines += [_row(fault, told) for fault, told in by_fault.items() if told]
    lines += ["", "What the other ranks say:", ""]
    for example in _EXAMPLES:
        texts = [_text(told) for told in by_fault.get(example, []) if not told["problems"]]
        lines += [f"- {example}: `{text}`" for text in texts[:1]]
    return "\n".join(lines) + "\n"


def _row(fault: str, outcomes: Sequence[Told]) -> str:
    well = [told for told in outcomes if not told["problems"]]
    slowest = max(told["seconds"] for told in outcomes)
    otherwise = "; ".join(
        f"{told['case']['program']}: {', '.join(told['problems'])}"
        for told in outcomes
        if told["problems"]
    )
    return f"| {fault} | {len(outcomes)} | {len(well)} | {slowest:.1f} s | {otherwise or '-'} |"


def _text(told: Told) -> str:
    (text, *_) = [end["text"] for end in told["ends"] if end["rank"] != FAULTY_RANK]
    return text.replace("|", "/")
