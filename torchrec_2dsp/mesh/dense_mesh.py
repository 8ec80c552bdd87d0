"""`DenseMesh`: how the ranks of a world share the dense part of a model. Pure arithmetic."""

from dataclasses import dataclass

from torchrec_2dsp.errors import MeshError
from torchrec_2dsp.mesh.mesh2d import RankLayout


@dataclass(frozen=True)
class DenseMesh:
    """``dp`` pipelines of ``pp`` tensor-parallel groups of ``tp`` ranks each.

    The ranks of a *tensor-parallel group* compute the layers of the dense part together, on the
    batches of all of them. They are neighbours, because they exchange activations in every layer.
    The groups of a *pipeline* compute one stage of the layers each, on the batches of the whole
    pipeline. Ranks with one place in their pipelines hold the same part of the same layers, and
    exchange its gradients. The `layout` says which of the two are neighbours.

    Example:
        >>> from torchrec_2dsp.mesh.dense_mesh import DenseMesh
        >>> DenseMesh.for_world(8, tp=2).groups()
        ((0, 1), (2, 3), (4, 5), (6, 7))
        >>> mesh = DenseMesh.for_world(8, tp=2, pp=2)
        >>> mesh.pipelines()
        ((0, 1, 2, 3), (4, 5, 6, 7))
        >>> mesh.copies()
        ((0, 4), (1, 5), (2, 6), (3, 7))
        >>> from torchrec_2dsp.mesh.mesh2d import RankLayout
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
    """How many pipelines, or groups, there are, each with a copy of the dense part."""

    tp: int = 1
    """How many ranks compute a layer together."""

    pp: int = 1
    """How many groups run the layers one after the other."""

    layout: RankLayout = RankLayout.CONTIGUOUS
    """Whether the ranks of a pipeline are neighbours, so that activations stay inside hosts; or
    strided, so that those that hold the same layers are, and gradients stay inside."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise MeshError(f"{name}={value!r} is not a positive integer")

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
        """The mesh of a world.

        Args:
            world_size: how many ranks there are.
            tp: how many of them compute a layer together.
            pp: how many groups of them run the layers one after the other.
            layout: how ranks are dealt to pipelines.
            local_world_size: how many ranks a host has, if layers may not be spread over hosts.
        """
        inside = world_size if local_world_size is None else local_world_size
        sizes = _divisors(world_size)
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
        lengths = _divisors(world_size // tp)
        if pp not in lengths:
            raise MeshError(
                f"pp={pp} pipeline ranks of tp={tp} do not divide {world_size} ranks; use one of "
                f"{_list(lengths)}"
            )
        return cls(world_size // (tp * pp), tp, pp, layout)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.dp * self.pipeline_size

    @property
    def pipeline_size(self) -> int:
        """How many ranks a pipeline has."""
        return self.pp * self.tp

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each tensor-parallel group."""
        return self._neighbours(self.tp)

    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each pipeline, from the first stage to the last."""
        if self.layout is RankLayout.CONTIGUOUS:
            return self._neighbours(self.pipeline_size)
        groups = self.groups()
        return tuple(
            tuple(rank for group in groups[number :: self.dp] for rank in group)
            for number in range(self.dp)
        )

    def copies(self) -> tuple[tuple[int, ...], ...]:
        """The sets of ranks that hold the same part of the same layers."""
        return tuple(zip(*self.pipelines(), strict=True))

    def place_of(self, rank: int) -> tuple[int, int]:
        """The number of a rank's pipeline, and the rank's place in it."""
        for number, ranks in enumerate(self.pipelines()):
            if rank in ranks:
                return number, ranks.index(rank)
        raise MeshError(f"rank={rank} is not in 0..{self.world_size - 1}")

    def _neighbours(self, size: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(range(first, first + size)) for first in range(0, self.world_size, size))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _list(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
