"""A user's own model in the training program: a factory, named in the config."""

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.section import Seed, named_in_config
from torchrec_2dsp.programs.data.dataset import DatasetFeature
from torchrec_2dsp.programs.models.model import PlannedSection


class OwnModelConfig(PlannedSection):
    """A model that a user's function builds."""

    kind: Literal["module:factory"] = "module:factory"
    """The kind of model."""

    factory: str = Field(min_length=1)
    """The function: ``"my_package.my_module:make_model"``."""

    options: dict[str, Any] = Field(default={})
    """The function's third argument: any values that a config file can hold."""

    seed: Seed = 0
    """The seed of torch's random numbers when the function is called."""


def build_own_model(
    config: OwnModelConfig, features: Sequence[DatasetFeature], num_dense: int
) -> nn.Module:
    """Build the user's model; equal configs give equal weights on every rank.

    Raises:
        ConfigError: there is no such function, or it doesn't return a module.
    """
    factory = named_in_config(config.factory, "factory")
    try:
        inspect.signature(factory).bind(features, num_dense, config.options)
    except TypeError as error:
        raise ConfigError(
            f"factory={config.factory!r} doesn't take (features, num_dense, options): {error}"
        ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = factory(features, num_dense, dict(config.options))
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"factory={config.factory!r} gives a {type(model).__name__}, which is no "
            "torch.nn.Module; return the model"
        )
    return model
