"""Errors of DCP, as ours."""

from collections.abc import Callable

from torch.distributed.checkpoint.api import CheckpointException

from torchrec_2dsp.errors import CheckpointError


def run_dcp(action: Callable[[], object], failure: str) -> None:
    """Run DCP, which fails on all ranks if it fails on one, and raise our error instead.

    Args:
        action: which calls DCP.
        failure: what follows from an error, as the beginning of a sentence.
    """
    try:
        action()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda failed: failed[0])
        if isinstance(cause, CheckpointError):
            raise CheckpointError(f"{cause} (found on rank {rank})") from error
        raise CheckpointError(f"{failure} (rank {rank}: {cause!r})") from error
    except (RuntimeError, ValueError) as error:
        # A collective between DCP's steps: some rank has died, or its process group is destroyed.
        raise CheckpointError(f"{failure} (the ranks have lost each other: {error})") from error
