"""`DensePlan`: how the dense part runs, and the cuts of its layers into stages."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from torchrec_2dsp.errors import ConfigError, PlanError
from torchrec_2dsp.mesh import DenseMesh, RankLayout


class DenseKind(enum.Enum):
    """The wrappers that can run a dense part exactly."""

    DDP = "ddp"
    """A copy on each rank: torch's and TorchRec's own way."""

    FULLY_SHARDED = "fully_sharded"
    """`FullyShardedDense`: each rank keeps a share of a copy."""

    TENSOR_PARALLEL = "tensor_parallel"
    """`TensorParallelDense`: ranks compute layers together."""

    PIPELINED = "pipelined"
    """`PipelinedDense`: each rank computes some of the layers."""


@dataclass(frozen=True, kw_only=True)
class DensePlan:
    """A wrapper and its settings."""

    kind: DenseKind
    """The wrapper."""

    mesh: DenseMesh
    """The mesh by which the ranks share the layers."""

    num_copies: int = 1
    """The number of copies under full sharding, or of groups that compute layers together."""

    num_micro_batches: int = 1
    """The number of micro-batches in a pipeline."""

    cuts: tuple[int, ...] = field(default=())
    """The layers with which the second and all later stages of a pipeline begin."""

    fully_shard: bool = False
    """True if each pipeline keeps a shard of each layer, instead of a copy."""

    def __post_init__(self) -> None:
        if len(self.cuts) != self.mesh.pp - 1:
            raise PlanError(
                f"{self.mesh.pp} stages are divided by {self.mesh.pp - 1} cuts, not by "
                f"{len(self.cuts)}: {self.cuts}"
            )
        if self.kind is not DenseKind.PIPELINED and self.mesh.pp > 1:
            raise PlanError(
                f"pp={self.mesh.pp} is for a pipelined dense part, not {self.kind.value!r}"
            )
        if self.mesh.dp % self.num_copies:
            raise PlanError(
                f"num_copies={self.num_copies} doesn't divide {self.mesh.dp} "
                f"{'ranks' if self.mesh.tp == 1 else f'groups of tp={self.mesh.tp} ranks'}"
            )
        if self.fully_shard and self.kind is not DenseKind.PIPELINED:
            raise PlanError(
                f"fully_shard=True is for a pipelined dense part, not {self.kind.value!r}"
            )

    def __str__(self) -> str:
        """Describe the plan in words."""
        mesh = self.mesh
        if self.kind is DenseKind.DDP:
            return "DDP"
        copies = f", {self.num_copies} copies" if self.num_copies > 1 else ""
        if self.kind is DenseKind.FULLY_SHARDED:
            return f"fully sharded{copies}"
        sizes = ", ".join(
            f"{name} {size}"
            for name, size in (("dp", mesh.dp), ("tp", mesh.tp), ("pp", mesh.pp))
            if size > 1
        )
        if self.kind is DenseKind.TENSOR_PARALLEL:
            return f"{sizes}{copies}"
        cuts = " ".join(map(str, self.cuts))
        layout = ", strided" if mesh.dp > 1 and mesh.layout is RankLayout.STRIDED else ""
        sharded = ", sharded" if self.fully_shard else ""
        return f"{sizes}{layout}{sharded}, {self.num_micro_batches} micro-batches, cuts {cuts}"


def cut_layers(
    seconds: Sequence[float],
    activation_bytes: Sequence[float],
    num_stages: int,
    seconds_per_byte: float = 0.0,
) -> tuple[int, ...]:
    """Cut layers into stages so that the slowest stage takes as little time as possible.

    A stage's time is that of its layers plus that of its sends: its output forward and, with
    as many bytes, its input's gradient backward. Among equal cuts, the earliest are
    chosen. Cuts are the first layers of all stages but the first.

    Raises:
        ConfigError: there are fewer layers than stages, or a time is negative or not a number.

    Example:
        >>> from torchrec_2dsp.plan.dense_plan import cut_layers
        >>> cut_layers([1.0, 1.0, 1.0, 3.0], [8, 8, 8, 8], num_stages=2)
        (3,)
        >>> cut_layers([1.0, 1.0, 1.0, 1.0], [8, 800, 8, 8], num_stages=2, seconds_per_byte=0.01)
        (1,)
    """
    num_layers = len(seconds)
    check_layers(num_layers, num_stages)
    if len(activation_bytes) != num_layers:
        raise ConfigError(
            f"there are {num_layers} layers' seconds, but {len(activation_bytes)} layers' "
            "activation_bytes; give both for each layer"
        )
    for number in (*seconds, *activation_bytes, seconds_per_byte):
        if not 0 <= number < float("inf"):
            raise ConfigError(f"{number} is no time and no size; give numbers of 0 or more")
    sums = list(accumulate(seconds, initial=0.0))

    def stage_seconds(first: int, last: int) -> float:
        """Return the seconds of the stage with layers ``first`` to ``last - 1``."""
        forward = activation_bytes[last - 1] if last < num_layers else 0.0
        backward = activation_bytes[first - 1] if first > 0 else 0.0
        return sums[last] - sums[first] + seconds_per_byte * (forward + backward)

    # By number of layers: the slowest stage under the best cuts of the first layers, and the cuts.
    best: list[tuple[float, tuple[int, ...]]] = [
        (stage_seconds(0, last), ()) for last in range(1, num_layers + 1)
    ]
    for stage in range(1, num_stages):
        best = [
            min(
                (max(best[first - 1][0], stage_seconds(first, last)), (*best[first - 1][1], first))
                for first in range(stage, last)
            )
            if last > stage
            else (float("inf"), ())
            for last in range(1, num_layers + 1)
        ]
    return best[-1][1]


def even_cuts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return cuts into stages of equal length; the first stages get one more layer if needed."""
    check_layers(num_layers, num_stages)
    size, rest = divmod(num_layers, num_stages)
    return tuple(stage * size + min(stage, rest) for stage in range(1, num_stages))


def check_cuts(cuts: Sequence[int], num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the cuts if they make ``num_stages`` stages of at least one layer each."""
    check_layers(num_layers, num_stages)
    if not all(isinstance(cut, int) for cut in cuts):
        raise ConfigError(
            f"cuts={list(cuts)} are no numbers of layers; give the first layer of each stage but "
            "the first"
        )
    ends = (0, *cuts, num_layers)
    if len(cuts) != num_stages - 1:
        raise ConfigError(
            f"cuts={list(cuts)} make {len(cuts) + 1} stages, not num_stages={num_stages}; give the "
            f"first layer of each stage but the first, {num_stages - 1} numbers"
        )
    for first, last in pairwise(ends):
        if first >= last:
            raise ConfigError(
                f"cuts={list(cuts)} leave a stage without layers; give numbers that rise, from 1 "
                f"to {num_layers - 1}"
            )
    return tuple(cuts)


def check_layers(num_layers: int, num_stages: int) -> None:
    """Raise if there are fewer layers than stages."""
    if num_layers < num_stages:
        raise ConfigError(
            f"a LayerStack of {num_layers} layers can't be cut into num_stages={num_stages}; use "
            f"{num_layers} stages or fewer, or cut its layers into smaller ones"
        )
