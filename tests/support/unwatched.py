"""Ranks without what torch and TorchRec note for logs and profilers, which takes time in tests."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def leave_out_watchers() -> None:
    """Let TorchRec describe no calls for its log, and torch mark no spans for a profiler.

    Together they take a fifth of a training step.
    """
    from torch.autograd.profiler import record_function

    if torchrec_logger := sys.modules.get("torchrec.distributed.logger"):
        # It prints every module that is made.
        vars(torchrec_logger)["_get_input_from_func"] = lambda *args, **kwargs: ""
    unmarked: Any = record_function
    unmarked.marks = (unmarked.__enter__, unmarked.__exit__)
    unmarked.__enter__ = lambda self: self
    unmarked.__exit__ = lambda self, *error: None


@contextmanager
def marking_spans() -> Iterator[None]:
    """A context in which torch marks spans again, after `leave_out_watchers`."""
    from torch.autograd.profiler import record_function

    marked: Any = record_function
    unmarked = (marked.__enter__, marked.__exit__)
    marked.__enter__, marked.__exit__ = marked.marks
    try:
        yield
    finally:
        marked.__enter__, marked.__exit__ = unmarked
