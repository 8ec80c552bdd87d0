"""`DensePlan`: how the ranks run the dense part of a model, as plain data."""

import enum
from dataclasses import dataclass, field

from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.mesh import DenseMesh, RankLayout


class DenseKind(enum.Enum):
    """The wrappers that can run a dense part exactly."""

    DDP = "ddp"
    """A copy on each rank: torch's and TorchRec's own."""

    FULLY_SHARDED = "fully_sharded"
    """`FullyShardedDense`: each rank keeps a share of a copy."""

    TENSOR_PARALLEL = "tensor_parallel"
    """`TensorParallelDense`: ranks compute layers together."""

    PIPELINED = "pipelined"
    """`PipelinedDense`: ranks compute some of the layers each."""


@dataclass(frozen=True, kw_only=True)
class DensePlan:
    """A wrapper and its settings.

    Example:
        >>> from torchrec_2dsp.mesh import DenseMesh
        >>> from torchrec_2dsp.plan.dense_plan import DenseKind, DensePlan
        >>> mesh = DenseMesh.for_world(8, pp=4)
        >>> str(DensePlan(kind=DenseKind.PIPELINED, mesh=mesh, num_micro_batches=8, cuts=(2, 4, 7)))
        'dp 2, pp 4, 8 micro-batches, cuts 2 4 7'
        >>> str(DensePlan(kind=DenseKind.DDP, mesh=DenseMesh.for_world(8)))
        'DDP'
        >>> mesh = DenseMesh.for_world(8, tp=2)
        >>> str(DensePlan(kind=DenseKind.TENSOR_PARALLEL, mesh=mesh, num_copies=2))
        'dp 4, tp 2, 2 copies'
    """

    kind: DenseKind
    """The wrapper."""

    mesh: DenseMesh
    """How the ranks share the layers."""

    num_copies: int = 1
    """How many copies fully sharded ranks, or groups that compute layers together, have of them."""

    num_micro_batches: int = 1
    """How many parts the batch of a pipeline is cut into."""

    cuts: tuple[int, ...] = field(default=())
    """The layers with which the second and all later stages of a pipeline begin."""

    fully_shard: bool = False
    """Whether each pipeline keeps a share of each layer, instead of a copy."""

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
        """The plan in words."""
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
