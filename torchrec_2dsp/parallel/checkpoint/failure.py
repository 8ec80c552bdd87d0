"""`run_dcp`: errors of DCP, raised as a `CheckpointError`."""

import errno
import re
from collections.abc import Callable

from torch.distributed.checkpoint.api import CheckpointException

from torchrec_2dsp.errors import CheckpointError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a quota that is used up, and a file larger than its limit."""
_SOURCE = re.compile(r"\[\S*\.cc:\d+\] ")
"""Where in gloo's source an error was raised."""


def run_dcp(action: Callable[[], object], failure: str) -> None:
    """Run DCP, which fails on all ranks if it fails on one, and raise a `CheckpointError` instead.

    Args:
        action: calls DCP.
        failure: what follows from an error, as the beginning of a sentence.
    """
    try:
        action()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        if isinstance(cause, CheckpointError):
            raise CheckpointError(f"{cause} (found on rank {rank})") from error
        remedy = ""
        if isinstance(cause, OSError) and cause.errno in _NO_ROOM:
            remedy = "; make room there, and resume from an earlier checkpoint"
        raise CheckpointError(f"{failure} (rank {rank}: {cause!r}){remedy}") from error
    except (RuntimeError, ValueError) as error:
        # A collective between DCP's steps failed: a rank died, or its process group was destroyed.
        text = _SOURCE.sub("", str(error))
        raise CheckpointError(f"{failure} (the ranks have lost each other: {text})") from error
