"""Meshes for FSDP2 in which ranks hold a dense part in one or several copies.

two copies of four ranks:   rank 0: first half    rank 1: second half    inside a copy: gathers
                            rank 2: first half    rank 3: second half    between: gradients
"""

import torch
from torch.distributed.device_mesh import DeviceMesh

from torchrec_2dsp.comms.own_group import own_mesh
from torchrec_2dsp.errors import ConfigError

_COPIES, _SHARES = "replicate", "shard"


def check_num_copies(wrapper: str, num_copies: int) -> None:
    """Raise an error, if this is no count of copies.

    Args:
        wrapper: the name of who asks.
        num_copies: how many times the ranks hold the dense part.

    Raises:
        ConfigError: it is none.

    Example:
        >>> from torchrec_2dsp.dense.copies_mesh import check_num_copies
        >>> check_num_copies("FullyShardedDense", 0)
        Traceback (most recent call last):
        ...
        torchrec_2dsp.errors.ConfigError: FullyShardedDense(num_copies=0) is no count; use 1 or more
    """
    if isinstance(num_copies, bool) or not isinstance(num_copies, int) or num_copies < 1:
        raise ConfigError(f"{wrapper}(num_copies={num_copies!r}) is no count; use 1 or more")


def copies_mesh(ranks: torch.Tensor, device_type: str, axes: tuple[str, ...] = ()) -> DeviceMesh:
    """The mesh of some copies, each of which is sharded over its ranks.

    Args:
        ranks: of the world; the first dimension is that of copies, the second that of shares.
        device_type: such as "cpu".
        axes: the names of the other dimensions.

    Collectives:
        The creation of the groups, which all ranks of the world call.
    """
    if len(ranks) == 1:
        return own_mesh(ranks[0], device_type, (_SHARES, *axes))
    return own_mesh(ranks, device_type, (_COPIES, _SHARES, *axes))


def shares_of(mesh: DeviceMesh) -> DeviceMesh:
    """The axes of a `copies_mesh` over which FSDP2 shards and copies, without the other ones.

    Args:
        mesh: that of `copies_mesh`.
    """
    names = mesh.mesh_dim_names or ()
    return mesh[_COPIES, _SHARES] if _COPIES in names else mesh[_SHARES]
