"""`train`: trains the runs of a config, shows them, and says how to go on after a stop."""

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from torchrec_2dsp.errors import RankError
from torchrec_2dsp.programs.cli.console import (
    ReadingProgress,
    check_output,
    set_option,
    show_written,
    shown_errors,
)

if TYPE_CHECKING:
    from torchrec_2dsp.programs.train.config import TrainConfig
    from torchrec_2dsp.programs.train.results import TrainWatcher


_Config = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="What to train: a TOML file, or a config that ships: demo, sequence, criteo, avazu, "
        "movielens and others.",
    ),
]
_Overrides = Annotated[list[str] | None, set_option("loop.steps=50 or runs.exact.num_groups=4")]
# Not "--run": torchrun would read that as its own --run-path.
_Only = Annotated[
    list[str] | None,
    typer.Option(metavar="RUN", help="Train only this run. Can be repeated."),
]
_Output = Annotated[
    Path | None,
    typer.Option(help="Write the runs' results here, as JSON for train-study."),
]
_Resume = Annotated[
    str,
    typer.Option(
        metavar="auto|never|PATH",
        help="auto: continue each run from its newest checkpoint, if it has one; never: start "
        "anew; PATH: continue from this checkpoint.",
    ),
]
_Profile = Annotated[
    str,
    typer.Option(
        metavar="FIRST:LAST",
        help="Trace these steps on each rank, for Perfetto, into output.folder.",
    ),
]


@shown_errors()
def train(
    config: _Config,
    overrides: _Overrides = None,
    only: _Only = None,
    output: _Output = None,
    resume: _Resume = "never",
    profile: _Profile = "",
) -> None:
    """Train a model once per run of a config, and compare the runs.

    Start it with torchrun, which starts the ranks:

    torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp train --config demo
    """
    from torchrec_2dsp.comms.alarm import agreeing
    from torchrec_2dsp.comms.groups import world_group
    from torchrec_2dsp.parallel.checkpoint.address import place_of
    from torchrec_2dsp.programs.cli.train_display import TrainDisplay, show_result
    from torchrec_2dsp.programs.config.config_file import load_config
    from torchrec_2dsp.programs.launch import launched_world, quiet_upstream
    from torchrec_2dsp.programs.train.checkpoints import Resume
    from torchrec_2dsp.programs.train.config import TrainConfig
    from torchrec_2dsp.programs.train.program import train as train_runs
    from torchrec_2dsp.programs.train.steps import profiled_steps

    quiet_upstream()
    training = load_config(TrainConfig, config, overrides or []).only(only or [])
    starts: dict[str, Resume] = {"auto": "auto", "never": None}
    start = starts.get(resume, place_of(os.path.expanduser(resume)))
    profiled, loop = profiled_steps(profile) if profile else range(0), training.loop
    with (
        saying_how_to_go_on(training.checkpoint.folder),
        launched_world(loop.device, "train", loop.timeout_s) as rank,
    ):
        console, is_first = Console(), rank == 0
        # If rank 0 can't write, all ranks raise.
        with agreeing(world_group()):
            writers = _writers(training, output) if is_first else []
        with closing(TrainDisplay(console)) as display, ReadingProgress(console) as reading:
            watchers = [display, *writers] if is_first else []
            if is_first:
                display.opening(training)
            result = train_runs(
                training,
                watchers,
                resume=start,
                profiled=profiled,
                reading=reading.show if is_first else None,
            )
        if is_first:
            show_result(result, console)
        with agreeing(world_group()):
            if is_first and output is not None:
                result.record(training).save(output)
        if is_first:
            show_written(console, output, training.output.folder)


@contextmanager
def saying_how_to_go_on(folder: str) -> Iterator[None]:
    """Tell a user who stops the program how to continue, on rank 0; exit with a stop's code.

    Ranks are stopped together, and some notice another rank's stop first.
    """
    try:
        yield
    except (KeyboardInterrupt, RankError) as error:
        if isinstance(error, RankError) and KeyboardInterrupt.__name__ not in str(error):
            raise
        # After Ctrl-C in a terminal, torchrun sends its ranks one more of these signals.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        if os.environ.get("RANK") == "0":
            text = (
                f"stopped; to go on from the newest checkpoint in {folder}, start the same command "
                "with --resume auto"
                if folder
                else "stopped; nothing is left to go on from, because checkpoint.folder isn't set"
            )
            Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
        signal.signal(signal.SIGINT, handler)
        raise typer.Exit(code=130) from None


def _writers(config: "TrainConfig", output: Path | None) -> "list[TrainWatcher]":
    from torchrec_2dsp.errors import ConfigError
    from torchrec_2dsp.programs.config.section import named_in_config
    from torchrec_2dsp.programs.train.results import RunFolder, TensorBoardWatcher, TrainWatcher

    check_output(output, ".json")
    writers: list[TrainWatcher] = []
    if config.output.folder:
        writers.append(RunFolder(config.output.folder, config))
    if config.loop.tensorboard_dir:
        try:
            writers.append(TensorBoardWatcher(config.loop.tensorboard_dir))
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"loop.tensorboard_dir={config.loop.tensorboard_dir!r} needs tensorboard, which is "
                "not installed; pip install 'torchrec-2dsp[tensorboard]', or leave it empty"
            ) from error
    for name in config.output.watchers:
        watcher = named_in_config(name, "output.watchers")(config)
        if not isinstance(watcher, TrainWatcher):
            raise ConfigError(
                f"output.watchers={name!r} makes a {type(watcher).__name__}; it has to be a "
                "torchrec_2dsp.programs.train.results.TrainWatcher"
            )
        writers.append(watcher)
    return writers
