"""Errors of DCP, as ours."""

from collections.abc import Callable

from torch.distributed.checkpoint.api import CheckpointException

from torchrec_2dsp.errors import CheckpointError


def run_dcp(action: Callable[[], object], failure: str) -> None:
    """Run DCP, which fails on all ranks if it fails on one, and raise our error instead."""
    try:
        action()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failed: failed[0])
        raise CheckpointError(f"{failure} (rank {rank}: {cause!r})") from error
