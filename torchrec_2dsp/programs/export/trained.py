"""`trained_model`: the model of a run, unsharded, with the weights of a checkpoint."""

from torch import nn

from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.checkpoint.load import load_weights
from torchrec_2dsp.parallel.checkpoint.parts import TRAIN_STATE
from torchrec_2dsp.parallel.checkpoint.stored import StoredCheckpoint
from torchrec_2dsp.parallel.train_state.state import Saved
from torchrec_2dsp.programs.data.dataset import Dataset
from torchrec_2dsp.programs.export.source import ExportSource
from torchrec_2dsp.programs.models.kinds import build_any_model
from torchrec_2dsp.programs.models.model import split_
from torchrec_2dsp.programs.train.checkpoints import RunSettings
from torchrec_2dsp.programs.train.config import shape_of


def trained_model(source: ExportSource, dataset: Dataset) -> nn.Module:
    """The model of a run as it was trained, in evaluation mode.

    Splits are part of it: what they leave out in training, they leave out where the model serves.

    Args:
        source: the run and its checkpoint.
        dataset: the data of the config.

    Raises:
        CheckpointError: the checkpoint didn't finish, is damaged, or is another model's.
    """
    config, run = source.config, source.config.runs[source.run]
    model = build_any_model(shape_of(config.data, dataset), config.model)
    split_(model, run.splits, run.split_threshold)
    stored = load_weights(source.checkpoint, model)
    _check_settings(source, stored)
    return model.eval().requires_grad_(False)


def _check_settings(source: ExportSource, stored: StoredCheckpoint) -> None:
    """Raise if the model was trained with other settings, which names and shapes don't show."""
    if not stored.names(TRAIN_STATE):
        return  # Saved by another program than this one.
    members = Saved.read(stored.tensors(TRAIN_STATE), 0, 1).members
    now = RunSettings(source.config).state_dict()
    for saved in members.get("settings", ()):
        for key in sorted(key for key in saved.keys() | now if key.startswith("model.")):
            before, after = saved.get(key, "nothing"), now.get(key, "nothing")
            if before != after:
                raise CheckpointError(
                    f"the checkpoint {source.checkpoint} is of another model: {key} was {before} "
                    f"when it was saved, and the config says {after}; give the config that it was "
                    "trained by"
                )
