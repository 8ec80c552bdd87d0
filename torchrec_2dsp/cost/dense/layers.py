"""`DenseLayers`: the work of a dense part, layer by layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_2dsp.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """The work of a step with one layer, on one rank.

    Example:
        >>> from torchrec_2dsp.cost.dense.layers import LayerWork
        >>> layer = LayerWork(name="block", forward_s=1e-5, backward_s=2e-5, call_s=1e-4)
        >>> round(layer.seconds(100), 6)
        0.0031
    """

    name: str
    """The layer's name in the model."""

    forward_s: float
    """Seconds of the forward for each sample."""

    backward_s: float
    """Seconds of the backward for each sample, with all but the optimizer."""

    call_s: float = 0.0
    """Seconds of a forward and a backward beyond those of their samples."""

    parameter_bytes: float = 0.0
    """Bytes of the layer's parameters."""

    output_bytes: float = 0.0
    """Bytes of what comes out, for each sample."""

    kept_bytes: float = 0.0
    """Bytes of what is kept for the backward, for each sample."""

    sums: int = 0
    """How often ranks that compute the layer together add up its output in a forward, and in a
    backward; 0 for a layer that can't be split."""

    def seconds(self, num_samples: float, *, tp: int = 1) -> float:
        """The seconds of a forward and a backward.

        Args:
            num_samples: how many go through at once.
            tp: how many ranks compute the layer together, if it can be split.
        """
        shared_by = tp if self.sums else 1
        return self.call_s + num_samples * (self.forward_s + self.backward_s) / shared_by


@dataclass(frozen=True, kw_only=True)
class DenseLayers:
    """The layers of a dense part in their order, and what goes in at both ends."""

    layers: tuple[LayerWork, ...]
    """The layers; the loss belongs to the last."""

    input_bytes: float
    """Bytes of what the first layer is given, for each sample."""

    target_bytes: float
    """Bytes of what the loss is given besides, for each sample."""

    state_per_weight: float = 2.0
    """Numbers of optimizer state for each weight: 2 with Adam, 1 with AdaGrad, 0 with SGD."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("a dense part without layers takes no time; name at least one")

    @property
    def parameter_bytes(self) -> float:
        """Bytes of all parameters."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def can_be_split(self) -> bool:
        """Whether ranks can compute a layer together."""
        return any(layer.sums for layer in self.layers)

    def stages(self, cuts: Sequence[int]) -> list[tuple[LayerWork, ...]]:
        """The layers of each stage.

        Args:
            cuts: the layers with which the second and all later stages begin.
        """
        ends = [*cuts, len(self.layers)]
        return [self.layers[start:end] for start, end in zip([0, *cuts], ends, strict=True)]
