"""Places where a DLRM or a DCN is split: what comes out of them is thresholded."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.models.dlrm import DLRMTrain
from torchrec.modules.mlp import Perceptron

from torchrec_2dsp.dense.thresholded import Thresholded, ThresholdKind
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.sections import SplitPlace

_CHILD = "split"


def split_(model: nn.Module, splits: Mapping[SplitPlace, float], threshold: ThresholdKind) -> None:
    """Let a DLRM or a DCN threshold what comes out at its splits, in place.

    Parameters keep their names. A hook does the work, of modules that stay what they are when the
    model is sharded: the lookup's is around the collection of tables.

    Args:
        model: the unsharded model.
        splits: the density at each place.
        threshold: how the smallest number that is kept is found.

    Raises:
        ConfigError: the model is of another kind, and there are splits.
    """
    if splits and not isinstance(model, DLRMTrain):
        raise ConfigError(
            f"splits={dict(splits)} are places of a DLRM or a DCN, and the model is a "
            f"{type(model).__name__}; leave them out, or set kind='dlrm' or 'dcn'"
        )
    for place, density in splits.items():
        module = _module_at(model, place)
        # As a child it is copied, moved, saved and switched to evaluation with the model.
        module.add_module(_CHILD, Thresholded(density, threshold))
        module.register_forward_hook(_thresholded)


def _module_at(model: nn.Module, place: SplitPlace) -> nn.Module:
    dlrm: Any = model.model
    if place == "embeddings":
        return dlrm.sparse_arch
    arch = dlrm.dense_arch if place == "dense" else dlrm.over_arch
    # A perceptron is a linear layer and its ReLU.
    return next(module for module in arch.modules() if isinstance(module, Perceptron))


def _thresholded(module: nn.Module, inputs: Any, activations: torch.Tensor) -> torch.Tensor:
    return module.get_submodule(_CHILD)(activations)
