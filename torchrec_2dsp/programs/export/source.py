"""Find the checkpoint to export and its run's config, and rebuild the trained model."""

from dataclasses import dataclass

from torch import nn
from torchrec.modules.embedding_configs import DataType

from torchrec_2dsp.errors import CheckpointError, ConfigError
from torchrec_2dsp.parallel.checkpoint.address import Address, Place, place_of
from torchrec_2dsp.parallel.checkpoint.load import load_weights
from torchrec_2dsp.parallel.checkpoint.parts import TRAIN_STATE
from torchrec_2dsp.parallel.checkpoint.save import latest_checkpoint
from torchrec_2dsp.parallel.checkpoint.stored import StoredCheckpoint
from torchrec_2dsp.parallel.train_state.state import Saved
from torchrec_2dsp.programs.config.config_file import load_config
from torchrec_2dsp.programs.data.dataset import Dataset
from torchrec_2dsp.programs.models.kinds import build_any_model
from torchrec_2dsp.programs.models.model import split_
from torchrec_2dsp.programs.models.planned import table_configs
from torchrec_2dsp.programs.train.checkpoints import RunSettings
from torchrec_2dsp.programs.train.config import TrainConfig

_CONFIG = "config.toml"
"""The file that tells a run's folder from a checkpoint."""


@dataclass(frozen=True)
class ExportSource:
    """The checkpoint to export, and its run's config."""

    config: TrainConfig
    run: str
    checkpoint: Place

    @classmethod
    def find(cls, path: Place, *, config: str = "", run: str = "") -> "ExportSource":
        """Find the source that a user names.

        Args:
            path: the folder of a program's output, or a checkpoint.
            config: the training config of a checkpoint's run; a program's output has
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
        if isinstance(path, Address) or not (path / _CONFIG).exists():
            return cls._of_checkpoint(path, config, run)
        if config:
            raise ConfigError(
                f"{path} has its config already, and --config {config} is another; leave it out"
            )
        train_config = load_config(TrainConfig, path / _CONFIG)
        name = _chosen_run(train_config, run, "")
        return cls(train_config, name, _newest(train_config, name))

    @classmethod
    def _of_checkpoint(cls, path: Place, config: str, run: str) -> "ExportSource":
        if not config:
            raise ConfigError(
                f"{path} has no {_CONFIG}, so it isn't a training program's output; to export a "
                "checkpoint, name the config that it was trained by with --config"
            )
        train_config = load_config(TrainConfig, config)
        # Checkpoints are in <folder>/<run>/<last or best>/<step>.
        parent = path.resolve().parent.parent.name
        return cls(train_config, _chosen_run(train_config, run, parent), path)


def _chosen_run(config: TrainConfig, run: str, likely: str) -> str:
    """Return the named run, the only one, or a likely one."""
    if run:
        return next(iter(config.only([run]).runs))
    if len(config.runs) == 1:
        return next(iter(config.runs))
    if likely in config.runs:
        return likely
    raise ConfigError(
        f"the config has the runs {', '.join(config.runs)}; choose the one to export with --only"
    )


def _newest(config: TrainConfig, run: str) -> Place:
    """Return a run's newest checkpoint with the best evaluation, or else its newest."""
    if not config.checkpoint.folder:
        raise ConfigError(
            "the run left no checkpoints, because its config has no checkpoint.folder; set it and "
            "train again"
        )
    folder = place_of(config.checkpoint.folder) / run
    newest = latest_checkpoint(folder / "best") or latest_checkpoint(folder / "last")
    if newest is None:
        raise CheckpointError(
            f"{folder} has no finished checkpoint; train until the first one is saved, or give the "
            "path of another one with --config"
        )
    return newest


def trained_model(source: ExportSource, dataset: Dataset) -> nn.Module:
    """Build a run's model as it was trained, in evaluation mode.

    Splits are part of it: what they leave out in training, they also leave out in serving.
    """
    config, run = source.config, source.config.runs[source.run]
    model = build_any_model(dataset, config.model)
    split_(model, run.splits, run.split_threshold)
    tables = [
        model.get_parameter(name)
        for name, table in table_configs(model).items()
        if table.data_type is DataType.BF16
    ]
    # TorchRec's unsharded collections make such tables in fp16, with its range.
    for weight in tables:
        weight.data = weight.data.bfloat16()
    stored = load_weights(source.checkpoint, model)
    for weight in tables:
        weight.data = weight.data.float()
    _check_settings(source, dataset, stored)
    return model.eval().requires_grad_(False)


_ENCODING = (
    *("data.features", "data.dense", "data.encoding"),
    *("the log's vocabulary", "the log's scale", "the log's sequences"),
)
"""The prefixes of the settings that determine how a log's values become a model's inputs."""


def _check_settings(source: ExportSource, dataset: Dataset, stored: StoredCheckpoint) -> None:
    """Raise if the model was trained with other settings, which names and shapes don't reveal."""
    if not stored.names(TRAIN_STATE):
        return  # Another program saved it.
    members = Saved.read(stored.tensors(TRAIN_STATE), 0, 1).members
    settings = RunSettings(source.config, source.run, dataset.fingerprint)
    for saved in members.get("settings", ()):
        for key, before, now in settings.differences(saved):
            if key.startswith(("model.", "run.split", *_ENCODING)):
                raise CheckpointError(
                    f"the checkpoint {source.checkpoint} is of another model: {key} was {before} "
                    f"when it was saved, and is {now} now; give the config that it was trained "
                    "by, and the files as they were"
                )
