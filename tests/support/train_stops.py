"""A training program in which one rank stops itself by SIGSTOP at a given moment.

``python -m tests.support.train_stops MOMENT RANK train ...`` is started on each rank. The stopped
rank doesn't respond until it is killed. Each rank prints when it stopped or ended.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from torchrec_2dsp.parallel.checkpoint.writer import ChecksumWriter
from torchrec_2dsp.programs.cli.app import app
from torchrec_2dsp.programs.train import program as trainer
from torchrec_2dsp.programs.train.metrics import Meter
from torchrec_2dsp.programs.train.steps import PipelinedSteps

MOMENTS: dict[str, tuple[Any, str]] = {
    "step": (PipelinedSteps, "step"),
    "report": (Meter, "gather"),
    "evaluation": (trainer, "evaluated"),
    "save": (ChecksumWriter, "write_data"),
}
"""The function that a rank calls at each moment: its owner and its name."""
AT_CALL = 2
"""The call at which the rank stops: at the first, nothing was done before."""


def stop_at(moment: str) -> None:
    """Make this process stop at a moment."""
    owner, name = MOMENTS[moment]
    called: Callable[..., Any] = getattr(owner, name)
    num_calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == AT_CALL:
            _say("stops")
            os.kill(os.getpid(), signal.SIGSTOP)
        return called(*args, **kwargs)

    setattr(owner, name, call)


def _say(what: str) -> None:
    print(f"rank {os.environ['RANK']} {what} at {time.time():.1f}", flush=True)


def main(moment: str, rank: str, *arguments: str) -> None:
    """Run the program on this rank."""
    sys.argv = ["torchrec-2dsp", *arguments]
    if os.environ["RANK"] == rank:
        stop_at(moment)
    try:
        app()
    finally:
        _say("ends")


if __name__ == "__main__":
    main(*sys.argv[1:])
