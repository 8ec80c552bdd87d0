"""`ExportSource`: the checkpoint that is exported, and the config of the run that left it."""

from dataclasses import dataclass
from pathlib import Path

from torchrec_2dsp.errors import CheckpointError, ConfigError
from torchrec_2dsp.parallel.checkpoint.save import latest_checkpoint
from torchrec_2dsp.programs.config.config_file import load_config
from torchrec_2dsp.programs.train.config import TrainConfig

_CONFIG = "config.toml"
"""The file by which a run's folder is told from a checkpoint."""


@dataclass(frozen=True)
class ExportSource:
    """The checkpoint that is exported, and the config of the run that left it."""

    config: TrainConfig
    """The config of the training program."""

    run: str
    """The name of the run in the config."""

    checkpoint: Path
    """The folder of the checkpoint."""

    @classmethod
    def find(cls, path: Path, *, config: str = "", run: str = "") -> "ExportSource":
        """The source that a user names.

        Args:
            path: the folder of a program's output, or a checkpoint.
            config: the config that the run of a checkpoint was trained by; a program's output has
                it already.
            run: which run of the config; needed if there are several.

        Raises:
            ConfigError: there is no such folder, config or run.
            CheckpointError: the run has no finished checkpoint.
        """
        if not path.is_dir():
            raise ConfigError(
                f"there is no folder {path}; give the output.folder of a training program, or a "
                "checkpoint"
            )
        if not (path / _CONFIG).exists():
            return cls._of_checkpoint(path, config, run)
        if config:
            raise ConfigError(
                f"{path} has its config already, and --config {config} is another; leave it out"
            )
        train_config = load_config(TrainConfig, path / _CONFIG)
        name = _chosen_run(train_config, run, "")
        return cls(train_config, name, _newest(train_config, name))

    @classmethod
    def _of_checkpoint(cls, path: Path, config: str, run: str) -> "ExportSource":
        if not config:
            raise ConfigError(
                f"{path} has no {_CONFIG}, so it is no output of a training program; to export a "
                "checkpoint, name the config that it was trained by with --config"
            )
        train_config = load_config(TrainConfig, config)
        # Checkpoints lie in <folder>/<run>/<last or best>/<step>.
        parent = path.resolve().parent.parent.name
        return cls(train_config, _chosen_run(train_config, run, parent), path)


def _chosen_run(config: TrainConfig, run: str, likely: str) -> str:
    """The run that is named, the only one, or a likely one."""
    if run:
        return next(iter(config.only([run]).runs))
    if len(config.runs) == 1:
        return next(iter(config.runs))
    if likely in config.runs:
        return likely
    raise ConfigError(
        f"the config has the runs {', '.join(config.runs)}; choose the one to export with --only"
    )


def _newest(config: TrainConfig, run: str) -> Path:
    """The newest checkpoint of the best evaluations, or else the newest one of a run."""
    if not config.checkpoint.folder:
        raise ConfigError(
            "the run left no checkpoints, because its config has no checkpoint.folder; set it and "
            "train again"
        )
    folder = Path(config.checkpoint.folder) / run
    newest = latest_checkpoint(folder / "best") or latest_checkpoint(folder / "last")
    if newest is None:
        raise CheckpointError(
            f"{folder} has no finished checkpoint; train until the first one is saved, or give the "
            "path of another one with --config"
        )
    return newest
