"""Which exceptions say that the connection to another rank broke or timed out."""

import re
from collections.abc import Iterator

import torch.distributed as dist

_OF_GLOO = re.compile(
    r"/gloo/\S*:\d+\]|Connection (closed|reset) by peer|pair closure|an all-to-all isn't over"
    r"|all-to-all with rank"
)
"""Texts of gloo's errors, which are bare ``RuntimeError``s, and of the full-duplex all-to-all's."""


def is_broken_connection(error: BaseException) -> bool:
    """Whether an exception, or one that caused it, comes from a failed collective.

    Example:
        >>> from torchrec_2dsp.comms.broken_connection import is_broken_connection
        >>> is_broken_connection(RuntimeError("[/t/gloo/pair.cc:5] Connection closed by peer"))
        True
        >>> is_broken_connection(RuntimeError("shape '[2, 3]' is invalid for input of size 5"))
        False
    """
    return any(
        isinstance(cause, dist.DistError)
        or (isinstance(cause, RuntimeError) and _OF_GLOO.search(str(cause)) is not None)
        for cause in causes_of(error)
    )


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The exception itself, then the one that caused it, and so on."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
