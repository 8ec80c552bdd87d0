"""`DenseMesh`: how the ranks of a world share the dense part of a model. Pure arithmetic."""

from dataclasses import dataclass

from torchrec_2dsp.errors import MeshError


@dataclass(frozen=True)
class DenseMesh:
    """``dp`` tensor-parallel groups of ``tp`` ranks each.

    The ranks of a *tensor-parallel group* compute the layers of the dense part together, on the
    batches of all of them. Ranks with one place in their groups hold the same part of each layer.
    A group's ranks are neighbours, because they exchange activations in every layer.

    Example:
        >>> from torchrec_2dsp.mesh.dense_mesh import DenseMesh
        >>> DenseMesh.for_world(8, tp=2).groups()
        ((0, 1), (2, 3), (4, 5), (6, 7))
        >>> DenseMesh.for_world(8, tp=3)
        Traceback (most recent call last):
        ...
        torchrec_2dsp.errors.MeshError: tp=3 does not divide 8 ranks; use one of 1, 2, 4, 8
        >>> DenseMesh.for_world(8, tp=4, local_world_size=2)
        Traceback (most recent call last):
        ...
        torchrec_2dsp.errors.MeshError: tp=4 would spread layers over hosts of 2 ranks; use one ...
    """

    dp: int
    """How many groups there are, each with a copy of the dense part."""

    tp: int = 1
    """How many ranks compute a layer together."""

    def __post_init__(self) -> None:
        for name in ("dp", "tp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise MeshError(f"{name}={value!r} is not a positive integer")

    @classmethod
    def for_world(
        cls, world_size: int, *, tp: int, local_world_size: int | None = None
    ) -> "DenseMesh":
        """The mesh of a world.

        Args:
            world_size: how many ranks there are.
            tp: how many of them compute a layer together.
            local_world_size: how many ranks a host has, if layers may not be spread over hosts.
        """
        inside = world_size if local_world_size is None else local_world_size
        sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
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
        return cls(world_size // tp, tp)

    @property
    def world_size(self) -> int:
        """How many ranks all groups have together."""
        return self.dp * self.tp

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each tensor-parallel group."""
        return tuple(
            tuple(range(first, first + self.tp)) for first in range(0, self.world_size, self.tp)
        )


def _list(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
