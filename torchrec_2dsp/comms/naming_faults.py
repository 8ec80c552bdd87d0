"""`naming_faults`: a context for a call of all ranks, whose errors name the rank that failed."""

from contextlib import AbstractContextManager
from types import TracebackType

from torchrec_2dsp.comms.broken_connection import causes_of, is_broken_connection
from torchrec_2dsp.comms.notice_board import NoticeBoard
from torchrec_2dsp.errors import RankError, TwoDError


class naming_faults(AbstractContextManager[None]):
    """A context whose errors tell which rank failed.

    A broken connection becomes a `RankError` that names the rank, after all ranks were asked. This
    rank's own error is raised as it is, and posted for the other ranks.
    """

    def __init__(self, board: NoticeBoard, phase: str | None = None) -> None:
        """
        Args:
            board: the notice board of the world.
            phase: what the block does; `None` if it does several things.
        """
        self._board, self._phase = board, phase

    def __enter__(self) -> None:
        self._board.raise_failure()
        if self._phase is not None:
            self._board.activity.begin(self._phase)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            if self._phase is not None:
                self._board.activity.phase = f"after {self._phase}"
        elif is_broken_connection(error) and not _is_explained(error):
            raise self._board.explain(error) from error
        elif not (isinstance(error, StopIteration) or _is_explained(error)):
            self._board.fail(error)


def _is_explained(error: BaseException) -> bool:
    """Whether the other ranks know of the error already."""
    return any(
        isinstance(cause, RankError) or (isinstance(cause, TwoDError) and cause.is_on_all_ranks)
        for cause in causes_of(error)
    )
