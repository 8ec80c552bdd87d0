"""`Mesh2D`: the sharding groups of a world's ranks. Pure arithmetic, no process group."""

import enum
from collections import Counter
from dataclasses import dataclass

from torchrec_2dsp.errors import MeshError


class RankLayout(enum.Enum):
    """The assignment of world ranks to sharding groups."""

    STRIDED = "strided"
    """Group ``g`` is every ``num_groups``-th rank from ``g`` on. Replica peers are adjacent
    ranks, so that the replica sync stays inside a host (TorchRec's default)."""

    CONTIGUOUS = "contiguous"
    """Group ``g`` is ``group_size`` consecutive ranks, so that the group's all-to-alls stay
    inside a host (TorchRec's ``use_inter_host_allreduce=True``)."""


@dataclass(frozen=True)
class Mesh2D:
    """``num_groups`` sharding groups of ``group_size`` ranks each.

    A *sharding group* holds one full copy of every table, sharded over its ranks. The ranks
    that hold the same shard in different groups are *replica peers*. ``num_groups=1`` is plain
    TorchRec; ``group_size=1`` is data parallelism.

    Example:
        >>> from torchrec_2dsp import Mesh2D, RankLayout
        >>> mesh = Mesh2D(num_groups=2, group_size=4)
        >>> mesh.sharding_group(3)
        (1, 3, 5, 7)
        >>> mesh.replica_peers(3)
        (2, 3)
        >>> Mesh2D(2, 4, RankLayout.CONTIGUOUS).sharding_group(3)
        (0, 1, 2, 3)
    """

    num_groups: int
    """The number of copies of the tables."""

    group_size: int
    """The number of ranks that share one copy."""

    layout: RankLayout = RankLayout.STRIDED
    """The assignment of ranks to groups."""

    def __post_init__(self) -> None:
        _check_positive(num_groups=self.num_groups, group_size=self.group_size)
        _check_layout(self.layout)

    @classmethod
    def for_world(
        cls, world_size: int, *, group_size: int, layout: RankLayout = RankLayout.STRIDED
    ) -> "Mesh2D":
        """Return the mesh of ``world_size`` ranks in groups of ``group_size``.

        Example:
            >>> from torchrec_2dsp import Mesh2D
            >>> Mesh2D.for_world(64, group_size=8).num_groups
            8
            >>> Mesh2D.for_world(4, group_size=3)
            Traceback (most recent call last):
            ...
            torchrec_2dsp.errors.MeshError: group_size=3 does not divide world_size=4; ...
        """
        _check_positive(world_size=world_size)
        if group_size < 1 or world_size % group_size:
            raise MeshError(
                f"group_size={group_size} does not divide world_size={world_size}; "
                f"use one of {_list(divisors(world_size))}"
            )
        return cls(world_size // group_size, group_size, layout)

    @property
    def world_size(self) -> int:
        """The number of ranks in all groups."""
        return self.num_groups * self.group_size

    def group_of(self, rank: int) -> int:
        """Return the index of the rank's sharding group."""
        return self._place_of(rank)[0]

    def shard_index(self, rank: int) -> int:
        """Return the rank's position in its sharding group, the number that plans use."""
        return self._place_of(rank)[1]

    def rank_at(self, group: int, shard_index: int) -> int:
        """Return the world rank at a position in a group."""
        if not (0 <= group < self.num_groups and 0 <= shard_index < self.group_size):
            raise MeshError(
                f"no rank at group={group}, shard_index={shard_index} of {self}: groups are "
                f"0..{self.num_groups - 1}, shard indices 0..{self.group_size - 1}"
            )
        if self.layout is RankLayout.STRIDED:
            return shard_index * self.num_groups + group
        return group * self.group_size + shard_index

    def sharding_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold one copy of the tables with ``rank``, in shard order."""
        group = self.group_of(rank)
        return tuple(self.rank_at(group, index) for index in range(self.group_size))

    def replica_peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same shard as ``rank``, itself included, in group order."""
        index = self.shard_index(rank)
        return tuple(self.rank_at(group, index) for group in range(self.num_groups))

    def rank_matrix(self) -> list[list[int]]:
        """Return groups as rows and shard indices as columns: a ``DeviceMesh``'s argument."""
        return [
            [self.rank_at(group, index) for index in range(self.group_size)]
            for group in range(self.num_groups)
        ]

    def node_group_size(self, local_world_size: int) -> int:
        """Count the ranks of a sharding group on one host; 1 if hosts differ.

        Table-row-wise and grid sharding spread a table over that many ranks.

        Example:
            >>> from torchrec_2dsp import Mesh2D
            >>> Mesh2D(num_groups=2, group_size=4).node_group_size(local_world_size=4)
            2
        """
        _check_positive(local_world_size=local_world_size)
        ranks_per_host = {
            count
            for group in self.rank_matrix()
            for count in Counter(rank // local_world_size for rank in group).values()
        }
        return ranks_per_host.pop() if len(ranks_per_host) == 1 else 1

    def check_world(self, world_size: int) -> None:
        """Raise unless the mesh covers exactly ``world_size`` ranks."""
        if self.world_size != world_size:
            raise MeshError(
                f"{self} has {self.world_size} ranks but the world has {world_size}; build it "
                f"with Mesh2D.for_world({world_size}, group_size=...)"
            )

    def __str__(self) -> str:
        return f"Mesh2D({self.num_groups}x{self.group_size}, {self.layout.value})"

    def _place_of(self, rank: int) -> tuple[int, int]:
        if not 0 <= rank < self.world_size:
            raise MeshError(f"rank={rank} is not in 0..{self.world_size - 1} of {self}")
        if self.layout is RankLayout.STRIDED:
            return rank % self.num_groups, rank // self.num_groups
        return divmod(rank, self.group_size)


_LAYOUTS = ", ".join(str(layout) for layout in RankLayout)


@dataclass(frozen=True)
class DenseMesh:
    """``dp`` pipelines of ``pp`` tensor-parallel groups of ``tp`` ranks each.

    The ranks of a *tensor-parallel group* compute the dense part's layers together, on all their
    batches. They are neighbours, because they exchange activations in every layer.
    The groups of a *pipeline* compute one stage of the layers each, on the batches of the whole
    pipeline. Ranks at the same place in their pipelines hold the same part of the same layers, and
    exchange its gradients. The `layout` says which of these two sets of ranks are neighbours.

    Example:
        >>> from torchrec_2dsp.mesh import DenseMesh
        >>> DenseMesh.for_world(8, tp=2).groups()
        ((0, 1), (2, 3), (4, 5), (6, 7))
        >>> mesh = DenseMesh.for_world(8, tp=2, pp=2)
        >>> mesh.pipelines()
        ((0, 1, 2, 3), (4, 5, 6, 7))
        >>> mesh.copies()
        ((0, 4), (1, 5), (2, 6), (3, 7))
        >>> from torchrec_2dsp.mesh import RankLayout
        >>> DenseMesh.for_world(8, tp=2, pp=2, layout=RankLayout.STRIDED).pipelines()
        ((0, 1, 4, 5), (2, 3, 6, 7))
        >>> DenseMesh.for_world(8, tp=3)
        Traceback (most recent call last):
        ...
        torchrec_2dsp.errors.MeshError: tp=3 does not divide 8 ranks; use one of 1, 2, 4, 8
        >>> DenseMesh.for_world(8, tp=2, pp=3)
        Traceback (most recent call last):
        ...
        torchrec_2dsp.errors.MeshError: pp=3 pipeline ranks of tp=2 do not divide 8 ranks; use ...
        >>> DenseMesh.for_world(8, tp=4, local_world_size=2)
        Traceback (most recent call last):
        ...
        torchrec_2dsp.errors.MeshError: tp=4 would spread layers over hosts of 2 ranks; use ...
    """

    dp: int
    """The number of pipelines, or groups, each with a copy of the dense part."""

    tp: int = 1
    """The number of ranks that compute a layer together."""

    pp: int = 1
    """The number of groups that run the layers one after another."""

    layout: RankLayout = RankLayout.CONTIGUOUS
    """Contiguous: a pipeline's ranks are neighbours, so that activations stay inside hosts.
    Strided: ranks with the same layers are neighbours, so that gradients stay inside hosts."""

    def __post_init__(self) -> None:
        _check_positive(dp=self.dp, tp=self.tp, pp=self.pp)
        _check_layout(self.layout)

    @classmethod
    def for_world(
        cls,
        world_size: int,
        *,
        tp: int = 1,
        pp: int = 1,
        layout: RankLayout = RankLayout.CONTIGUOUS,
        local_world_size: int | None = None,
    ) -> "DenseMesh":
        """Return the mesh for ``world_size`` ranks."""
        inside = world_size if local_world_size is None else local_world_size
        sizes = divisors(world_size)
        if tp not in sizes:
            raise MeshError(
                f"tp={tp} does not divide {world_size} ranks; use one of {_list(sizes)}"
            )
        if inside % tp:
            in_host = [size for size in sizes if inside % size == 0]
            raise MeshError(
                f"tp={tp} would spread layers over hosts of {inside} ranks; use one of "
                f"{_list(in_host)}"
            )
        lengths = divisors(world_size // tp)
        if pp not in lengths:
            raise MeshError(
                f"pp={pp} pipeline ranks of tp={tp} do not divide {world_size} ranks; use one of "
                f"{_list(lengths)}"
            )
        return cls(world_size // (tp * pp), tp, pp, layout)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp * self.pipeline_size

    @property
    def pipeline_size(self) -> int:
        """The number of ranks in a pipeline."""
        return self.pp * self.tp

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return each tensor-parallel group's ranks."""
        return self._neighbours(self.tp)

    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """Return each pipeline's ranks, from the first stage to the last."""
        if self.layout is RankLayout.CONTIGUOUS:
            return self._neighbours(self.pipeline_size)
        groups = self.groups()
        return tuple(
            tuple(rank for group in groups[number :: self.dp] for rank in group)
            for number in range(self.dp)
        )

    def copies(self) -> tuple[tuple[int, ...], ...]:
        """Return the sets of ranks with the same part of the same layers."""
        return tuple(zip(*self.pipelines(), strict=True))

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the rank's pipeline and its place in it."""
        for number, ranks in enumerate(self.pipelines()):
            if rank in ranks:
                return number, ranks.index(rank)
        raise MeshError(f"rank={rank} is not in 0..{self.world_size - 1}")

    def _neighbours(self, size: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(range(first, first + size)) for first in range(0, self.world_size, size))


def _check_layout(layout: object) -> None:
    if not isinstance(layout, RankLayout):
        raise MeshError(f"layout={layout!r} is not a RankLayout; use one of {_LAYOUTS}")


def _check_positive(**numbers: object) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise MeshError(f"{name}={value!r} is not a positive integer")


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]


def _list(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
