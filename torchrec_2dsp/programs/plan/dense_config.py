"""`DenseConfig`: what a plan's config says of the rest of the model."""

from typing import Self

from pydantic import Field, model_validator

from torchrec_2dsp.cost.dense.layers import DenseLayers
from torchrec_2dsp.cost.dense.transformer import Transformer
from torchrec_2dsp.cost.kernels import Kernels
from torchrec_2dsp.cost.workload import DenseWork
from torchrec_2dsp.programs.config.section import Section


class TransformerConfig(Section):
    """A transformer over sequences of items, whose layers ranks may share."""

    num_blocks: int = Field(ge=1)
    """How many blocks there are."""

    dim: int = Field(ge=1)
    """How many numbers an item has between blocks."""

    length: int = Field(ge=1)
    """Items of a sample."""

    expansion: int = Field(default=4, ge=1)
    """How many times as wide the feed-forward part is inside."""

    num_targets: int = Field(default=1, ge=0)
    """Vectors that the loss is given for each item."""

    def layers(self, kernels: Kernels) -> DenseLayers:
        """The blocks, by what products of matrices take."""
        return Transformer(**self.model_dump()).layers(kernels)


class DenseConfig(Section):
    """The work of a step beside its tables, on one rank."""

    forward_ms: float = Field(default=0.0, ge=0)
    backward_ms: float = Field(default=0.0, ge=0)
    gradient_mb: float = Field(default=0.0, ge=0)
    """Megabytes that are all-reduced over the world in each step."""

    transformer: TransformerConfig | None = None
    """The layers of the rest of the model, in place of the numbers above: then ways to run them are
    compared, too."""

    @model_validator(mode="after")
    def _check_one_description(self) -> Self:
        if self.transformer and (self.forward_ms or self.backward_ms or self.gradient_mb):
            raise ValueError(
                "dense.transformer takes the place of forward_ms, backward_ms and gradient_mb; "
                "leave those out"
            )
        return self

    def work(self, kernels: Kernels, batch_size: int) -> DenseWork:
        """The work of a rank, which a search of the tables' plan takes as it is."""
        if self.transformer is None:
            return DenseWork(
                forward_s=self.forward_ms / 1e3,
                backward_s=self.backward_ms / 1e3,
                gradient_bytes=self.gradient_mb * 1e6,
            )
        layers = self.transformer.layers(kernels)
        return DenseWork(
            forward_s=sum(batch_size * layer.forward_s for layer in layers.layers),
            backward_s=sum(batch_size * layer.backward_s for layer in layers.layers),
        )
