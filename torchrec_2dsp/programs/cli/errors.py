"""How a command that runs on many ranks shows an error."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from torchrec_2dsp.errors import ConfigError, TwoDError

# An error is usually that of all ranks, and torchrun stops the others as soon as one has left: they
# wait so that rank 0 speaks for all, and speak if it has nothing to say.
_LET_RANK_0_SPEAK_S = 3.0


@contextmanager
def shown_errors() -> Iterator[None]:
    """Turn this package's errors into one line and exit code 2.

    Under torchrun that line is also the last thing that torchrun says.
    """
    try:
        yield
    except TwoDError as error:
        rank = os.environ.get("RANK", "0")
        where = "" if rank == "0" else f" on rank {rank}"
        text = f"error{where}: {error}"
        # At once: torchrun takes the first of the ranks for the cause.
        _tell_torchrun(text)
        if rank != "0":
            time.sleep(_LET_RANK_0_SPEAK_S)
        Console(stderr=True).print(Text(text, style="bold red"), soft_wrap=True)
        raise typer.Exit(code=2) from None


def _tell_torchrun(text: str) -> None:
    """Leave the line where torchrun looks for what it shows at its end, in place of a hint that
    there is nothing to show."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    timestamp = {"timestamp": str(int(time.time()))}
    content = {"message": {"message": text, "extraInfo": timestamp}}
    # The folder is gone where the launcher has ended.
    with suppress(OSError):
        Path(path).write_text(json.dumps(content))


def check_writable(output: Path | None) -> None:
    """Raise `ConfigError` if ``output`` can't be written: before the work, not after it."""
    if output is None:
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        is_new = not output.exists()
        output.touch()
        if is_new:
            # What fails later leaves no empty file.
            output.unlink()
    except OSError as error:
        raise ConfigError(f"--output {output} can't be written: {error.strerror}") from error
