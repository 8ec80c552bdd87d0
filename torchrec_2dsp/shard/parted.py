"""Modules some of whose tables have one copy in the world, and others one in each group.

A sharded module of TorchRec knows one set of ranks. So there is one for each mesh of the plan, and
a `PartedModule` that shows them as one: with all tables under their names, and one output.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardedModule
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from torchrec_2dsp._compat.c10d import IncompatibleKeys
from torchrec_2dsp._compat.torchrec import KJTListSplitsAwaitable
from torchrec_2dsp.comms.mesh_groups import MeshGroups
from torchrec_2dsp.shard.optimizers import table_of
from torchrec_2dsp.shard.sharded_modules import (
    ShardedEmbeddingBagCollection2D,
    ShardedEmbeddingCollection2D,
)
from torchrec_2dsp.shard.stages import BatchNotes
from torchrec_2dsp.shard.tables import Tables2D

Output = KeyedTensor | dict[str, JaggedTensor]
"""What a sharded module returns: a `KeyedTensor` of bags, or a `JaggedTensor` for each sequence."""
ShardedModule2D = ShardedEmbeddingBagCollection2D | ShardedEmbeddingCollection2D
"""The sharded modules of this package."""


class SomeTables:
    """An unsharded module as if it had some of its tables only; the parameters are its own."""

    def __init__(self, module: Any, configs: Sequence[BaseEmbeddingConfig]) -> None:
        """
        Args:
            module: an `EmbeddingBagCollection` or an `EmbeddingCollection`.
            configs: of the tables that show.
        """
        self._module = module
        self._configs: list[Any] = list(configs)
        self._names = {config.name for config in configs}

    def embedding_bag_configs(self) -> list[Any]:
        """The configs of an `EmbeddingBagCollection`, as far as they show."""
        return self._configs

    def embedding_configs(self) -> list[Any]:
        """The configs of an `EmbeddingCollection`, as far as they show."""
        return self._configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of outputs, as if there were no other tables."""
        return get_embedding_names_by_table(self._configs)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of these tables, by name."""
        named = self._module.named_parameters()
        return ((name, parameter) for name, parameter in named if self._has(name))

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of these tables."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The state of these tables."""
        state = self._module.state_dict()
        return {key: value for key, value in state.items() if self._has(key)}

    def _has(self, key: str) -> bool:
        return table_of(key) in self._names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@dataclass
class PartContexts(Multistreamable):
    """What the parts of a module know of a batch."""

    of_parts: list[Any]
    """The context of each part, in their order."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        for ctx in self.of_parts:
            ctx.record_stream(stream)


class PartedModule(ShardedModule[Any, Any, Output, PartContexts], FusedOptimizerModule):
    """Sharded modules of several meshes, as one.

    Parts aren't submodules, as TorchRec's lookups aren't: names and pipelines see one module.
    """

    def __init__(
        self, configs: Sequence[BaseEmbeddingConfig], parts: Sequence[ShardedModule2D]
    ) -> None:
        """
        Args:
            configs: of all tables.
            parts: a sharded module for each mesh, which all ranks give in the same order.
        """
        super().__init__(cast(Any, parts[0]).qcomm_codecs_registry)
        self._parts: list[Any] = list(parts)
        self._names = [_names_in(configs, part) for part in self._parts]

    @property
    def parts(self) -> list[ShardedModule2D]:
        """The sharded modules, each with the tables of a mesh."""
        return list(self._parts)

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The type of the unsharded module, which all parts share."""
        return self._parts[0].unsharded_module_type

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The fused optimizer of all tables."""
        return CombinedOptimizer([part.fused_optimizer for part in self._parts])

    def train(self, mode: bool = True) -> "PartedModule":
        """Set all parts to training, or to evaluation."""
        for part in self._parts:
            part.train(mode)
        return super().train(mode)

    def create_context(self) -> PartContexts:
        """A context of each part."""
        return PartContexts([part.create_context() for part in self._parts])

    def input_dist(
        self, ctx: PartContexts, features: KeyedJaggedTensor, /
    ) -> Awaitable[Awaitable[Any]]:
        """Let each part take the features of its tables."""
        exchanges = [part.input_dist(part_ctx, features) for part, part_ctx in self._with(ctx)]
        return KJTListSplitsAwaitable(exchanges, ctx)

    def compute(self, ctx: PartContexts, dist_input: Any) -> list[Any]:
        """What the parts look up."""
        inputs = zip(self._with(ctx), dist_input, strict=True)
        return [part.compute(part_ctx, ids) for (part, part_ctx), ids in inputs]

    def output_dist(self, ctx: PartContexts, output: Any) -> LazyAwaitable[Output]:
        """One output of what the parts looked up."""
        outputs = zip(self._with(ctx), output, strict=True)
        return _Joined(
            [part.output_dist(part_ctx, rows) for (part, part_ctx), rows in outputs], self._names
        )

    def compute_and_output_dist(self, ctx: PartContexts, input: Any) -> LazyAwaitable[Output]:
        """One output of all parts; what one looked up travels while the next one looks up."""
        inputs = zip(self._with(ctx), input, strict=True)
        return _Joined(
            [part.compute_and_output_dist(part_ctx, ids) for (part, part_ctx), ids in inputs],
            self._names,
        )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of all parts."""
        for part in self._parts:
            yield from part.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of all parts."""
        for part in self._parts:
            yield from part.named_buffers(prefix, recurse, remove_duplicate)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """The names of all parameters that are sharded."""
        for part in self._parts:
            yield from part.sharded_parameter_names(prefix)

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """The tables of all parts, under the names of the unsharded module."""
        for part in self._parts:
            destination = part.state_dict(
                destination=destination, prefix=prefix, keep_vars=keep_vars
            )
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Let each part take its own tables."""
        missing: list[str] = []
        taken_keys: set[str] = set()
        for part in self._parts:
            own = {
                key: value
                for key, value in state_dict.items()
                if table_of(key) in part.tables.table_names
            }
            taken_keys |= own.keys()
            missing += part.load_state_dict(own, strict=strict, assign=assign).missing_keys
        unexpected = sorted(state_dict.keys() - taken_keys)
        if strict and unexpected:
            raise RuntimeError(f"no table of the module has {', '.join(unexpected)}")
        return IncompatibleKeys(missing, unexpected)

    def _with(self, ctx: PartContexts) -> Iterable[tuple[Any, Any]]:
        return zip(self._parts, ctx.of_parts, strict=True)


def sharded_tables(model: nn.Module) -> list[Tables2D]:
    """The sharded tables of a model, in its order: one `Tables2D` for each mesh of each module."""
    return [part.tables for module in model.modules() for part in _parts_of(module)]


def groups_of(model: nn.Module) -> MeshGroups | None:
    """The communicators of a model's sharded modules; `None` if none is of this package."""
    return next((tables.groups for tables in sharded_tables(model)), None)


@dataclass(frozen=True)
class PrefetchedBatch:
    """One batch of one part, as a pipeline that prefetches rows sees it."""

    tables: Tables2D
    """The tables that the batch looks up."""
    notes: BatchNotes
    """What is known of the batch."""
    arrived: Any = None
    """What the input exchange of the batch gave, if the pipeline has waited for it."""


def prefetched_batches(module: Any, ctx: Any, arrived: Any = None) -> list[PrefetchedBatch]:
    """A batch of a sharded module, part by part.

    Args:
        module: any module; one that isn't of this package has no parts.
        ctx: what the module's ``create_context`` gave for the batch.
        arrived: what the module's input exchange gave, if that is known.
    """
    if isinstance(module, PartedModule):
        arrived = [None] * len(module.parts) if arrived is None else arrived
        parts = zip(module.parts, ctx.of_parts, arrived, strict=True)
        return [PrefetchedBatch(part.tables, part_ctx.notes, ids) for part, part_ctx, ids in parts]
    return [PrefetchedBatch(part.tables, ctx.notes, arrived) for part in _parts_of(module)]


def _parts_of(module: nn.Module) -> list[ShardedModule2D]:
    if isinstance(module, PartedModule):
        return module.parts
    kinds = (ShardedEmbeddingBagCollection2D, ShardedEmbeddingCollection2D)
    return [module] if isinstance(module, kinds) else []


class _Joined(LazyAwaitable[Output]):
    """The outputs of all parts, under the names that they have without parts."""

    def __init__(
        self, outputs: list[LazyAwaitable[Any]], names: Sequence[Mapping[str, str]]
    ) -> None:
        super().__init__()
        self._outputs = outputs
        self._names = names

    def _wait_impl(self) -> Output:
        outputs = [output.wait() for output in self._outputs]
        named = list(zip(outputs, self._names, strict=True))
        if not isinstance(outputs[0], KeyedTensor):
            return {
                names[key]: sequence for output, names in named for key, sequence in output.items()
            }
        return KeyedTensor(
            keys=[names[key] for output, names in named for key in output.keys()],  # noqa: SIM118
            length_per_key=[dim for output in outputs for dim in output.length_per_key()],
            values=torch.cat([output.values() for output in outputs], dim=1),
            key_dim=1,
        )


def _names_in(configs: Sequence[Any], part: Any) -> dict[str, str]:
    """What a part's outputs are called beside those of the other parts.

    A feature that looks up several tables carries a table's name in each of its outputs.
    """
    all_names = get_embedding_names_by_table(list(configs))
    by_table = dict(zip((config.name for config in configs), all_names, strict=True))
    own = [config for config in configs if config.name in part.tables.table_names]
    return {
        alone: beside
        for config, names in zip(own, get_embedding_names_by_table(own), strict=True)
        for alone, beside in zip(names, by_table[config.name], strict=True)
    }
