"""`Together`: a context in which an error of one rank of a pipeline is raised on all of them."""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import torch.distributed as dist

from torchrec_2dsp.comms.agreement import agree
from torchrec_2dsp.comms.broken_connection import is_broken_connection
from torchrec_2dsp.comms.notice_board import described
from torchrec_2dsp.dense.pipelined.links import Links
from torchrec_2dsp.errors import RankError, TwoDError


class Together(AbstractContextManager[None]):
    """A context for what the ranks of a pipeline do together.

    A rank with an error breaks the connections by which activations and gradients travel, so that
    the others, which wait for them, learn of it at once. Then all of them agree on the error. What
    was under way can't be taken up again, so every later use raises the error again.
    """

    def __init__(self, group: dist.ProcessGroup, links: Sequence[Links]) -> None:
        """
        Args:
            group: the ranks of the pipeline, to agree on the error.
            links: the connections to break.
        """
        self._group, self._links = group, links
        self._failure: TwoDError | None = None

    def __enter__(self) -> None:
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error that has broken the connections, if there is one."""
        if self._failure is not None:
            raise copy.copy(self._failure).with_traceback(None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception):
            return
        for links in self._links:
            links.close()
        own = None if is_broken_connection(error) else _naming_rank(error)
        self._failure = RankError(
            "the connections of a pipeline of layers broke, and no rank of it says why; "
            f"{described(error)}. Start the ranks again"
        )
        try:
            agree(self._group, error=own)
        except TwoDError as agreed:
            self._failure = agreed
        except RuntimeError:
            # A rank that is gone doesn't agree either; whoever catches the error asks who it is.
            return
        if own is None:
            raise copy.copy(self._failure).with_traceback(None) from error


def _naming_rank(error: Exception) -> TwoDError:
    """The error, or, if it isn't one of this package, another one that names this rank."""
    if isinstance(error, TwoDError):
        return error
    rank = dist.get_rank()
    return RankError(f"rank {rank} failed in a pipeline of layers: {described(error)}", (rank,))
