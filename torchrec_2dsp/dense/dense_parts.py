"""Dense parts: the modules without tables, their ranks, equal weights, and meshes with copies."""

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
    """Yield the largest modules that hold parameters and no tables, by name.

    Raises:
        ConfigError: a module that holds tables, or one of ``apart``, holds a parameter itself too.
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
    """Return the ranks over which a wrapper runs the dense part."""
    if env.process_group is None:
        raise ConfigError("the model has no process group; give its environment one")
    return env.process_group


def broadcast_weights(part: nn.Module, group: dist.ProcessGroup) -> None:
    """Give all ranks the first rank's weights.

    Shards of different weights would be a model that nobody has initialised.

    Collectives:
        A broadcast of each parameter and buffer.
    """
    for tensor in (*part.parameters(), *part.buffers()):
        dist.broadcast(tensor.detach(), group_src=0, group=group)


_COPIES, _SHARES = "replicate", "shard"


def check_num_copies(wrapper: str, num_copies: int) -> None:
    """Refuse a number of copies below 1."""
    if isinstance(num_copies, bool) or not isinstance(num_copies, int) or num_copies < 1:
        raise ConfigError(f"{wrapper}(num_copies={num_copies!r}) is no count; use 1 or more")


def copies_mesh(ranks: torch.Tensor, device_type: str, axes: tuple[str, ...] = ()) -> DeviceMesh:
    """Build a mesh of copies, each sharded over its ranks: ``ranks[copy, shard, *axes]``.

    two copies on four ranks:   rank 0: first half    rank 1: second half    inside a copy: gathers
                                rank 2: first half    rank 3: second half    between: gradients

    Collectives:
        Creates process groups, on all ranks of the world.
    """
    if len(ranks) == 1:
        return own_mesh(ranks[0], device_type, (_SHARES, *axes))
    return own_mesh(ranks, device_type, (_COPIES, _SHARES, *axes))


def shares_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes of a `copies_mesh` that FSDP2 uses."""
    names = mesh.mesh_dim_names or ()
    return mesh[_COPIES, _SHARES] if _COPIES in names else mesh[_SHARES]
