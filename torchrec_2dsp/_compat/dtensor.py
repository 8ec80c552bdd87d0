"""What DTensor remembers of meshes.

DTensor keeps results by the meshes of its arguments. Two meshes of the same ranks and axes are
equal there, though each has process groups of its own, so that results of a mesh whose groups are
destroyed would send the collectives of a later one to groups that are gone.
"""

from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    clear_redistribute_planner_cache,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

__all__ = ["forget_meshes"]


def forget_meshes() -> None:
    """Let DTensor forget all meshes that it has seen, and refer to their groups no more."""
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
