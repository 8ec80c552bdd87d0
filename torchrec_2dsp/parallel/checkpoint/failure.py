"""`run_dcp`: errors of DCP, raised as a `CheckpointError`."""

from collections.abc import Callable

from torch.distributed.checkpoint.api import CheckpointException

from torchrec_2dsp.errors import CheckpointError


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
        raise CheckpointError(f"{failure} (rank {rank}: {cause!r})") from error
    except (RuntimeError, ValueError) as error:
        # A collective between DCP's steps failed: a rank died, or its process group was destroyed.
        raise CheckpointError(f"{failure} (the ranks have lost each other: {error})") from error
