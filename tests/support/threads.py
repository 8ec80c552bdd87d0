"""The threads of this process, also those that Python doesn't know."""

from contextlib import suppress
from pathlib import Path


def count_threads(word: str) -> int:
    """Count the threads that have `word` in the name that the kernel knows them by."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        # A thread may end between being listed and being asked for its name.
        with suppress(FileNotFoundError, ProcessLookupError):
            count += word in task.joinpath("comm").read_text()
    return count
