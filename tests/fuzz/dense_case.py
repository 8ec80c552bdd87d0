"""How the dense part of a case looks, and how it is trained."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DenseCase:
    """The dense part; fields that a kind of training doesn't have are ignored."""

    kind: str = "ddp"
    """TorchRec's own ``"ddp"``, its ``"fp16"`` hook, ``"thresholded"``, ``"fully_sharded"``,
    ``"tensor_parallel"``, ``"pipelined"``, ``"delayed"``, or ``"local"`` for ranks that meet."""
    hidden: tuple[int, ...] = ()
    """The widths of its hidden layers."""
    shortcut: bool = False
    """Whether a layer goes beside them, which some batches don't use."""
    optimizer: str = "sgd"
    clip: float = 0.0
    """The largest norm of its gradients; 0 for any."""
    warm_up: int = 1
    """How many first steps of ``"delayed"`` and ``"thresholded"`` are as in DDP."""
    density: float = 1.0
    """The share of elements that ``"thresholded"`` sends, or ``"local"`` when ranks meet."""
    values: str = "fp32"
    """How these travel."""
    route: str = "auto"
    """On which way."""
    num_copies: int = 1
    """How many times ranks hold the layers, if they have parts or shares of them."""
    tp: int = 1
    """How many ranks compute the layers together, if they are ``"tensor_parallel"``."""
    schedule: str = "1F1B"
    """The order in which the two stages of ``"pipelined"`` work."""
    num_micro_batches: int = 1
    """Into how many parts it cuts the batches of a pipeline."""
    layout: str = "contiguous"
    """How the ranks of a pipeline lie."""
    fully_shard: bool = False
    """Whether its pipelines have shares of layers."""
    local_steps: int = 1
    """After how many steps ``"local"`` ranks meet."""
    residual_decay: float = 1.0
    """What is left until the next meeting of what wasn't sent."""

    @property
    def has_shortcut(self) -> bool:
        """Whether there is one: stages have none beside them, and split layers run on the batches
        of several ranks."""
        return self.shortcut and self.kind not in ("tensor_parallel", "pipelined")

    @property
    def max_norm(self) -> float:
        """``clip`` where it can be: torch's norm is of gradients on one mesh of ranks, and split
        layers have another one than whole ones."""
        return 0.0 if self.kind == "tensor_parallel" else self.clip

    @property
    def leaves_out(self) -> bool:
        """Whether ranks choose what they send, which the oracle then takes from them."""
        return self.kind in ("thresholded", "local") and self.density < 1

    @property
    def is_apart(self) -> bool:
        """Whether there are steps after which ranks have different weights."""
        return self.kind == "local" and self.local_steps > 1


PLAIN_DENSE = DenseCase()
"""The dense part of a case that says nothing of it."""
