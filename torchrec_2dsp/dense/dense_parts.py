"""What wrappers have in common: their ranks, the parts without tables, and equal weights."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed.types import ShardedModule, ShardingEnv

from torchrec_2dsp.comms.groups import own_mesh
from torchrec_2dsp.errors import ConfigError


def dense_parts(
    model: nn.Module, wrapper: str, name: str = "", *, apart: tuple[type[nn.Module], ...] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules that hold parameters and no tables, by their names.

    Raises:
        ConfigError: a module that holds tables, or a part to keep apart, also holds a parameter by
            itself.
    """
    is_part = isinstance(model, apart)
    if is_part or not any(isinstance(part, (ShardedModule, *apart)) for part in model.modules()):
        if any(True for _ in model.parameters()):
            yield name, model
        return
    if isinstance(model, ShardedModule):
        return
    for param, _ in model.named_parameters(recurse=False):
        beside = " or ".join(["tables", *(f"a {kind.__name__}" for kind in apart)])
        raise ConfigError(
            f"{f'module {name!r}' if name else 'the model'} holds the parameter {param!r} beside "
            f"{beside}, which {wrapper} can't shard; put it into a module of its own"
        )
    for child_name, child in model.named_children():
        child_path = f"{name}.{child_name}" if name else child_name
        yield from dense_parts(child, wrapper, child_path, apart=apart)


def group_of(env: ShardingEnv) -> dist.ProcessGroup:
    """The ranks over which a wrapper runs the dense part."""
    if env.process_group is None:
        raise ConfigError("the model has no process group; give its environment one")
    return env.process_group


def broadcast_weights(part: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks the weights of the first one.

    Shares of different weights would make a model that nobody has initialised.

    Collectives:
        A broadcast of each parameter and buffer.
    """
    for tensor in (*part.parameters(), *part.buffers()):
        dist.broadcast(tensor.detach(), group_src=0, group=group)


_COPIES, _SHARES = "replicate", "shard"


def check_num_copies(wrapper: str, num_copies: int) -> None:
    """Raise an error, if this is no count of copies.

    Raises:
        ConfigError: it is none.

    Example:
        >>> from torchrec_2dsp.dense.dense_parts import check_num_copies
        >>> check_num_copies("FullyShardedDense", 0)
        Traceback (most recent call last):
        ...
        torchrec_2dsp.errors.ConfigError: FullyShardedDense(num_copies=0) is no count; use 1 or more
    """
    if isinstance(num_copies, bool) or not isinstance(num_copies, int) or num_copies < 1:
        raise ConfigError(f"{wrapper}(num_copies={num_copies!r}) is no count; use 1 or more")


def copies_mesh(ranks: torch.Tensor, device_type: str, axes: tuple[str, ...] = ()) -> DeviceMesh:
    """The mesh of some copies, each of which is sharded over its ranks.

    Collectives:
        The creation of the groups, which all ranks of the world call.
    """
    if len(ranks) == 1:
        return own_mesh(ranks[0], device_type, (_SHARES, *axes))
    return own_mesh(ranks, device_type, (_COPIES, _SHARES, *axes))


def shares_of(mesh: DeviceMesh) -> DeviceMesh:
    """The axes of a `copies_mesh` over which FSDP2 shards and copies, without the other ones."""
    names = mesh.mesh_dim_names or ()
    return mesh[_COPIES, _SHARES] if _COPIES in names else mesh[_SHARES]
