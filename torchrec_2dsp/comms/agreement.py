"""All ranks go on, or all ranks raise the same error."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType

import torch.distributed as dist

from torchrec_2dsp.errors import ConfigError, TwoDError


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
    mine = (error, dict(facts or {}))
    gathered: list[tuple[TwoDError | None, dict[str, str]]] = [mine] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    failed = [(rank, found) for rank, (found, _) in enumerate(gathered) if found is not None]
    if failed:
        rank, first = failed[0]
        if all(str(found) == str(first) for _, found in failed) and len(failed) == len(gathered):
            raise first
        raise type(first)(f"{first} (found on rank {rank})")
    for name, expected in gathered[0][1].items():
        for rank, (_, found) in enumerate(gathered):
            if found.get(name) != expected:
                raise ConfigError(
                    f"{name} differs between ranks: rank 0 has {_short(expected)}, rank {rank} "
                    f"has {_short(str(found.get(name)))}; construct all ranks alike"
                )


class agreeing(AbstractContextManager[dict[str, str]]):
    """Run a block of local checks, then `agree` on what they raised and found.

    The block gets a dict for the facts. Errors that aren't ours pass through untouched.
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
        if error is None or isinstance(error, TwoDError):
            # A rank with an error may lack facts, so it sends none and only its error counts.
            agree(self._group, error=error, facts=None if error else self._facts)


def _short(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
