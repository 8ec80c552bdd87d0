"""`agree` and `agreeing`: all ranks go on, or all ranks raise the same error."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from itertools import zip_longest
from types import TracebackType

import torch.distributed as dist

from torchrec_2dsp.errors import ConfigError, RankError, TwoDError


def agree(
    group: dist.ProcessGroup,
    *,
    error: TwoDError | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Raise on every rank of ``group`` if one rank has an error or the facts differ.

    Args:
        group: the ranks that must agree.
        error: what this rank found wrong, if anything.
        facts: what must be equal on all ranks, by name.

    Collectives:
        One all-gather of objects.
    """
    own = (error, dict(facts or {}))
    gathered: list[tuple[TwoDError | None, dict[str, str]]] = [own] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    ranks = dist.get_process_group_ranks(group)
    failed = [
        (rank, raised)
        for rank, (raised, _) in zip(ranks, gathered, strict=True)
        if raised is not None
    ]
    if failed:
        rank, first = failed[0]
        is_alike = all(str(raised) == str(first) for _, raised in failed)
        # A `RankError` names the rank already.
        if not isinstance(first, RankError) and not (is_alike and len(failed) == len(gathered)):
            first = type(first)(f"{first} (found on rank {rank})")
        raise _on_all_ranks(first)
    for name, expected in gathered[0][1].items():
        for rank, (_, facts_there) in zip(ranks, gathered, strict=True):
            if facts_there.get(name) != expected:
                line, line_there = _first_difference(expected, str(facts_there.get(name)))
                raise _on_all_ranks(
                    ConfigError(
                        f"{name} differs between ranks: rank {ranks[0]} has {line}, rank {rank} "
                        f"has {line_there}; give all ranks the same"
                    )
                )


class agreeing(AbstractContextManager[dict[str, str]]):
    """Run a block of local work, then `agree` on the error it raised and the facts it found.

    The block puts its facts into a dict. An error that isn't a `TwoDError` becomes a `ConfigError`
    with the same text, because the other ranks must raise it too.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._facts: dict[str, str] = {}

    def __enter__(self) -> dict[str, str]:
        return self._facts

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            agree(self._group, facts=self._facts)
        elif isinstance(error, Exception):
            agree(self._group, error=as_ours(error, ConfigError))


def as_ours(error: Exception, kind: type[TwoDError]) -> TwoDError:
    """``error`` if it is a `TwoDError`, else a ``kind`` with its text, for other ranks to raise.

    Example:
        >>> from torchrec_2dsp.comms.agreement import as_ours
        >>> from torchrec_2dsp.errors import SyncError
        >>> as_ours(ValueError("no such row"), SyncError)
        SyncError('ValueError: no such row')
    """
    if isinstance(error, TwoDError):
        return error
    converted = kind(f"{type(error).__name__}: {error}")
    converted.__cause__ = error
    return converted


def _on_all_ranks(error: TwoDError) -> TwoDError:
    error.is_on_all_ranks = True
    return error


def _first_difference(first: str, second: str, limit: int = 300) -> tuple[str, str]:
    """The first lines in which two texts differ, cut to ``limit`` characters."""
    lines = zip_longest(first.splitlines(), second.splitlines(), fillvalue="nothing")
    pair = next(((a.strip(), b.strip()) for a, b in lines if a != b), (first, second))
    return pair[0][:limit], pair[1][:limit]
