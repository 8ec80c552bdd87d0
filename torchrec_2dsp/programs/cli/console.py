"""Elements that commands share: errors, progress bars, ``--set``, outputs that can be written."""

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
)
from rich.text import Text
from typer.models import OptionInfo

from torchrec_2dsp.errors import ConfigError, TwoDError

# Usually all ranks have the same error, and torchrun stops the others as soon as one exits: they
# wait so that rank 0 reports for all, and report themselves if it is silent.
_LET_RANK_0_SPEAK_S = 3.0
_OF_THE_DISK = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS),
    *(errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR),
}
"""Errors of files, which a traceback wouldn't explain further."""
_SECONDS_PER_LINE = 10.0
"""Seconds between progress lines without a terminal."""


@contextmanager
def shown_errors() -> Iterator[None]:
    """Turn this package's errors, and disk errors, into one line and exit code 2.

    Under torchrun, that line is also torchrun's last output.
    """
    try:
        yield
    except (TwoDError, OSError) as error:
        if not isinstance(error, TwoDError) and error.errno not in _OF_THE_DISK:
            raise
        rank = os.environ.get("RANK", "0")
        where = "" if rank == "0" else f" on rank {rank}"
        text = f"error{where}: {error}"
        # At once: torchrun reports the first rank as the cause.
        _tell_torchrun(text)
        if rank != "0":
            time.sleep(_LET_RANK_0_SPEAK_S)
        Console(stderr=True).print(Text(text, style="bold red"), soft_wrap=True)
        raise typer.Exit(code=2) from None


def _tell_torchrun(text: str) -> None:
    """Write the line to torchrun's error file, to replace the hint that there is no error."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    timestamp = {"timestamp": str(int(time.time()))}
    content = {"message": {"message": text, "extraInfo": timestamp}}
    # The folder is gone if the launcher has ended.
    with suppress(OSError):
        Path(path).write_text(json.dumps(content))


def set_option(examples: str) -> OptionInfo:
    """Return the option ``--set`` of a command that takes a config; its help has the examples."""
    text = f"Change a value of the config, such as {examples}. Can be repeated."
    return typer.Option("--set", metavar="KEY.SUB=VALUE", help=text)


def with_home(command: Callable[..., None]) -> Callable[..., None]:
    """Expand ``~`` in a command's paths, which shells leave in ``--output=~/file``."""

    def expanded(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(expanded, value))
        return Path(os.path.expanduser(value)) if isinstance(value, Path) else value

    @wraps(command)
    def run(**arguments: Any) -> None:
        command(**{name: expanded(value) for name, value in arguments.items()})

    return run


def check_writable(output: Path | None) -> None:
    """Raise `ConfigError` if ``output`` can't be written: before the work, not after it."""
    if output is None:
        return
    if output.is_dir():
        raise ConfigError(f"{output} is a folder; name a file in it")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        is_new = not output.exists()
        output.touch()
        if is_new:
            # A failure later on leaves no empty file.
            output.unlink()
    except OSError as error:
        is_file = isinstance(error, FileExistsError | NotADirectoryError)
        why = f"{error.filename} is no folder" if is_file else error.strerror
        raise ConfigError(f"{output} can't be written: {why}") from error


_KINDS = {
    ".md": "Markdown page",
    ".html": "HTML page",
    ".json": "JSON file",
    ".toml": "TOML file",
}


def check_output(output: Path | None, suffix: str) -> None:
    """Raise `ConfigError` if ``output`` doesn't end in ``suffix``, or can't be written."""
    if output is not None and output.suffix != suffix:
        raise ConfigError(f"{output} is no {_KINDS[suffix]}; use a name that ends in {suffix}")
    check_writable(output)


def show_written(console: Console, *paths: Path | str | None) -> None:
    """Print the paths of written files, unchanged."""
    for path in filter(None, paths):
        console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


class ProgressBars(AbstractContextManager["ProgressBars"]):
    """Progress bars on a terminal, one per name; nothing elsewhere, where callers print lines."""

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        """Prepare bars on this console; ``columns`` stand between bars and figures."""
        self.are_shown = console.is_terminal
        """True if there is a terminal."""
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            *columns,
            TextColumn("{task.fields[figures]}", markup=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, name: str, completed: int, total: int, figures: str = "") -> None:
        """Move the bar of this name, with figures behind it; the first call adds it."""
        if not self._tasks:
            self._progress.start()
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, figures="")
        self._progress.update(self._tasks[name], completed=completed, figures=figures)

    def close(self) -> None:
        """Release the terminal; the bars stay visible."""
        self._progress.stop()


class ReadingProgress(AbstractContextManager["ReadingProgress"]):
    """Shows the progress of reading files: bars on a terminal, occasional lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console, self._bars = console, ProgressBars(console)
        self._start = self._last_line = time.monotonic()
        self._what = ""

    def __exit__(self, *_: object) -> None:
        self._bars.close()

    def show(self, what: str, completed: int, total: int) -> None:
        """Move the bar of this rank's activity, or print a line if it is time."""
        now = time.monotonic()
        if what != self._what:
            self._what, self._start = what, now
        left_s = (now - self._start) * max(total - completed, 0) / max(completed, 1)
        figures = f"{int(left_s) // 60}:{int(left_s) % 60:02d} left"
        if self._bars.are_shown:
            self._bars.show(what, completed, total, figures)
        elif now - self._last_line >= _SECONDS_PER_LINE:
            self._last_line = now
            share = completed / max(total, 1)
            line = f"rank 0: {what}: {share:.0%}, {figures}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
