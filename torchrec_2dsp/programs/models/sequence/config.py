"""`SequenceModelConfig`: a next-item transformer in a config file."""

from typing import Literal, Self

from pydantic import Field, model_validator

from torchrec_2dsp.programs.data.negatives import NegativeKind
from torchrec_2dsp.programs.models.planned_section import PlannedSection
from torchrec_2dsp.programs.models.ranking_metrics import RankingConfig


class SequenceModelConfig(PlannedSection):
    """A transformer that predicts each next item of a sequence.

    Example:
        >>> from torchrec_2dsp.programs.models.sequence.config import SequenceModelConfig
        >>> SequenceModelConfig(dim=64, num_heads=4).hidden
        256
    """

    kind: Literal["sequence"] = "sequence"
    """The kind of model."""

    feature: str = "item"
    """The sparse feature that holds a user's items, oldest first."""

    dim: int = Field(default=32, ge=4, multiple_of=4)
    """The embedding dimension, which is the transformer's as well."""

    max_length: int = Field(default=50, ge=2)
    """How many of a user's last items are used, the one to predict included."""

    num_blocks: int = Field(default=2, ge=1)
    """How many blocks of attention and feed-forward layers there are."""

    num_heads: int = Field(default=2, ge=1)
    """How many heads the attention has."""

    hidden_factor: int = Field(default=4, ge=1)
    """The size of the feed-forward layers, as a multiple of `dim`."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """The share of activations that a training step leaves out. Above 0, each rank draws its own:
    runs differ between meshes, and layers can't be split by tensor parallelism."""

    num_negatives: int = Field(default=64, ge=1)
    """How many items each sequence's next items are told from in training."""

    eval_negatives: int = Field(default=0, ge=0)
    """How many items each held-out sequence's last item is ranked among, if ``ranking.among`` is
    "sampled"; 0 for `num_negatives`."""

    negatives: NegativeKind = NegativeKind.UNIFORM
    """How negatives are drawn: uniform, or log_uniform where ids are numbered by frequency. The
    loss corrects for it."""

    loss_mean: Literal["tokens", "samples"] = "tokens"
    """What the loss is the mean over: the predicted items of the rank's batch, or the sequences,
    each of which then counts as much, whichever rank has it."""

    length_chunks: int = Field(default=1, ge=1)
    """Into how many chunks of about equal lengths a rank's sequences are cut in training, each
    filled up to its own longest. With 1 all are filled up to `max_length`, so that a step takes as
    long whatever their lengths are."""

    ranking: RankingConfig = RankingConfig()
    """How held-out next items are ranked."""

    seed: int = Field(default=0, ge=0)
    """The seed of the initial weights and of the negatives."""

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.dim % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} does not divide dim={self.dim}; use another of the two"
            )
        return self

    @property
    def hidden(self) -> int:
        """The size of the feed-forward layers."""
        return self.hidden_factor * self.dim
