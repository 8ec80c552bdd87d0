"""`step_mark`: the name that a step has in a trace. Needs no torch, so that it is read quickly."""

import re

_MARK = re.compile(r"## train step (\d+) ##")


def step_mark(step: int) -> str:
    """The name of the range that a trace has around a step, counted from 1.

    Example:
        >>> from torchrec_2dsp.programs.train.step_mark import marked_step, step_mark
        >>> step_mark(20), marked_step(step_mark(20)), marked_step("## forward 20 ##")
        ('## train step 20 ##', 20, None)
    """
    return f"## train step {step} ##"


def marked_step(name: str) -> int | None:
    """The step that a range of a trace is around; `None` if it is another range."""
    mark = _MARK.fullmatch(name)
    return None if mark is None else int(mark[1])
