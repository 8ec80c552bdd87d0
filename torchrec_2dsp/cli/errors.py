"""How a command that runs on many ranks shows an error."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from torchrec_2dsp.errors import TwoDError

# An error is usually that of all ranks, and torchrun stops the others as soon as one has left: they
# wait so that rank 0 speaks for all, and speak if it has nothing to say.
_LET_RANK_0_SPEAK_S = 3.0


@contextmanager
def shown_errors() -> Iterator[None]:
    """Turn this package's errors into one line and exit code 2."""
    try:
        yield
    except TwoDError as error:
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(_LET_RANK_0_SPEAK_S)
        where = "" if rank == "0" else f" on rank {rank}"
        text = Text(f"error{where}: {error}", style="bold red")
        Console(stderr=True).print(text, soft_wrap=True)
        raise typer.Exit(code=2) from None
