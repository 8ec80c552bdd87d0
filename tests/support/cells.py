"""`Cell`: one combination of the parity matrix."""

from dataclasses import dataclass, field

import torchrec_2dsp as tdsp
from tests.support.models import ModelSpec

EPS = 1e-3
"""Large enough that a gradient which cancels to almost nothing, whose rounding error is then
all of it, doesn't become a full AdaGrad step."""


@dataclass(frozen=True)
class Cell:
    """One combination of the matrix."""

    mesh: tdsp.Mesh2D
    sharding: str = "row_wise"
    spec: ModelSpec = field(default_factory=ModelSpec)
    optimizer: str = "rowwise_adagrad"
    sync: tdsp.GradientSync | tdsp.WeightSync = field(default_factory=tdsp.GradientSync)
    hot_rows: tuple[tuple[str, tuple[int, ...]], ...] = ()
    always_capture: bool = False
    stock_wrapper: bool = False
    batch_sizes: tuple[int, ...] = ()
    eps: float = EPS
    seed: int = 0
    max_length: int = 4
    variable: bool = False
    """Whether batches have a batch size for each feature, see `make_variable_batch`."""
    exchange: str = "pooled"
    owners: str = "block"
    transport: str = "fp32"
    """How rows or bags travel."""
    demands: tuple[tuple[str, tdsp.ParameterConstraints2D], ...] = ()
    """Of each table, in place of ``sharding``, ``exchange`` and ``hot_rows``: by predicted cost."""
    in_world: tuple[str, ...] = ()
    """Tables with one copy, on the ranks of all groups."""
    proposed: bool = False
    """Whether TorchRec's planner makes the plan, of this package's proposals."""

    def __str__(self) -> str:
        kind = "sequence" if self.spec.sequence else self.spec.pooling
        parts = [self.sharding, kind + ("-weighted" if self.spec.weighted else "")]
        parts += [self.optimizer, str(self.mesh), type(self.sync).__name__]
        parts += [f"{self.exchange}-exchange"] * (self.exchange != "pooled")
        parts += [self.transport] * (self.transport != "fp32")
        parts += ["hash"] * (self.owners == "hash") + ["demands"] * bool(self.demands)
        parts += ["proposed"] * self.proposed + [f"{name} once" for name in self.in_world]
        parts += ["hot"] * bool(self.hot_rows) + ["stock-dmp"] * self.stock_wrapper
        return " ".join(parts + ["VBE"] * self.variable + ["captured"] * self.always_capture)

    @property
    def num_values(self) -> int:
        """Weights of the tables that all ranks hold together."""
        copies = self.mesh.world_size if self.sharding == "data_parallel" else self.mesh.num_groups
        return sum(
            (1 if table.name in self.in_world else copies) * table.num_rows * table.dim
            for table in self.spec.tables
        )
