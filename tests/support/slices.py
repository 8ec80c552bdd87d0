"""Which of the tests marked `slow` run: all, or a slice of them, another one for each commit."""

from collections.abc import Sequence

import pytest

from tests.support.commit import seed_of_commit


def parse_slice(text: str) -> tuple[int, int]:
    """``"3/24"`` as ``(3, 24)``; ``"commit/24"`` is the slice that the commit chooses."""
    number, separator, count = text.partition("/")
    if not separator or not count.isdecimal() or int(count) < 1:
        raise pytest.UsageError(f"--slow-slice={text} has no number of slices; use such as 3/24")
    if number == "commit":
        return seed_of_commit() % int(count), int(count)
    if not number.isdecimal() or int(number) >= int(count):
        raise pytest.UsageError(
            f"--slow-slice={text} is no slice; use 0/{count} to {int(count) - 1}/{count}, or "
            f"commit/{count}"
        )
    return int(number), int(count)


def slice_of(names: Sequence[str], number: int, count: int) -> set[str]:
    """Every so many-th name, so that neighbours, which take alike long, are in other slices."""
    return set(sorted(names)[number::count])
