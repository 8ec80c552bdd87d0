"""Modules some of whose tables have one copy in the world, and others one in each group.

A sharded module of TorchRec knows one set of ranks. So there is one for each mesh of the plan, and
a `PartedModule` that shows them as one: with all tables under their names, and one output.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from torchrec_2dsp.shard.hot_rows.module import HotRowsModule
from torchrec_2dsp.shard.optimizers import table_of

Output = KeyedTensor | dict[str, JaggedTensor]
"""Of bags, and of sequences."""


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
        """Of an `EmbeddingBagCollection`."""
        return self._configs

    def embedding_configs(self) -> list[Any]:
        """Of an `EmbeddingCollection`."""
        return self._configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """As if there were no other tables."""
        return get_embedding_names_by_table(self._configs)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Of these tables."""
        return ((key, one) for key, one in self._module.named_parameters() if self._has(key))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of these tables."""
        return (one for _, one in self.named_parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Of these tables."""
        return {key: one for key, one in self._module.state_dict().items() if self._has(key)}

    def _has(self, key: str) -> bool:
        return table_of(key) in self._names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@dataclass
class PartContexts(Multistreamable):
    """What the parts know of a batch."""

    of_parts: list[Any]

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        for ctx in self.of_parts:
            ctx.record_stream(stream)


class PartedModule(ShardedModule[Any, Any, Output, PartContexts], FusedOptimizerModule):
    """Sharded modules of several meshes, as one.

    Parts aren't submodules, as TorchRec's lookups aren't: names and pipelines see one module.
    """

    def __init__(
        self, configs: Sequence[BaseEmbeddingConfig], parts: Sequence[HotRowsModule]
    ) -> None:
        """
        Args:
            configs: of all tables.
            parts: a sharded module for each mesh, which all ranks give in the same order.
        """
        first: Any = parts[0]
        super().__init__(first.qcomm_codecs_registry)
        self._parts: list[Any] = list(parts)
        self._names = [_names_in(configs, part) for part in self._parts]
        self._tables = [set(part.module_sharding_plan) for part in self._parts]

    @property
    def parts(self) -> list[HotRowsModule]:
        """The sharded modules, each with the tables of a mesh."""
        return list(self._parts)

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """As the parts'."""
        return self._parts[0].unsharded_module_type

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """Of all tables."""
        return CombinedOptimizer([part.fused_optimizer for part in self._parts])

    def train(self, mode: bool = True) -> "PartedModule":
        """Of all parts."""
        for part in self._parts:
            part.train(mode)
        return super().train(mode)

    def create_context(self) -> PartContexts:
        """The parts' own."""
        return PartContexts([part.create_context() for part in self._parts])

    def input_dist(
        self, ctx: PartContexts, features: KeyedJaggedTensor, /
    ) -> Awaitable[Awaitable[Any]]:
        """Each part takes the features of its tables."""
        asked = [part.input_dist(one, features) for part, one in self._with(ctx)]
        return KJTListSplitsAwaitable(asked, ctx)

    def compute(self, ctx: PartContexts, dist_input: Any) -> list[Any]:
        """What the parts look up."""
        inputs = zip(self._with(ctx), dist_input, strict=True)
        return [part.compute(one, its) for (part, one), its in inputs]

    def output_dist(self, ctx: PartContexts, output: Any) -> LazyAwaitable[Output]:
        """One output of what the parts looked up."""
        outputs = zip(self._with(ctx), output, strict=True)
        return _Joined([part.output_dist(one, its) for (part, one), its in outputs], self._names)

    def compute_and_output_dist(self, ctx: PartContexts, input: Any) -> LazyAwaitable[Output]:
        """What one part looked up travels while the next one looks up."""
        inputs = zip(self._with(ctx), input, strict=True)
        return _Joined(
            [part.compute_and_output_dist(one, its) for (part, one), its in inputs], self._names
        )

    @property
    def can_send_early(self) -> bool:
        """Whether a part can."""
        return any(part.can_send_early for part in self._parts)

    def announce_rows(
        self, ctx: PartContexts, asked: Any, running_ctx: PartContexts, running: Any
    ) -> None:
        """As of a module without parts."""
        running_ones = zip(running_ctx.of_parts, running, strict=True)
        for (part, one), its, other in zip(self._with(ctx), asked, running_ones, strict=True):
            part.announce_rows(one, its, *other)

    def let_follow(self, ctx: PartContexts, follower: PartContexts) -> None:
        """As of a module without parts."""
        for (part, one), its in zip(self._with(ctx), follower.of_parts, strict=True):
            part.let_follow(one, its)

    def send_late_rows(self, ctx: PartContexts) -> None:
        """As of a module without parts."""
        for part, one in self._with(ctx):
            part.send_late_rows(one)

    def drop_early_rows(self, ctx: PartContexts) -> None:
        """As of a module without parts."""
        for part, one in self._with(ctx):
            part.drop_early_rows(one)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Of all parts."""
        for part in self._parts:
            yield from part.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Of all parts."""
        for part in self._parts:
            yield from part.named_buffers(prefix, recurse, remove_duplicate)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Of all parts."""
        for part in self._parts:
            yield from part.sharded_parameter_names(prefix)

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Of all parts, under the names of the unsharded module."""
        for part in self._parts:
            destination = part.state_dict(
                destination=destination, prefix=prefix, keep_vars=keep_vars
            )
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Each part takes what is its own."""
        missing: list[str] = []
        known: set[str] = set()
        for part, tables in zip(self._parts, self._tables, strict=True):
            its = {key: one for key, one in state_dict.items() if table_of(key) in tables}
            known |= its.keys()
            missing += part.load_state_dict(its, strict=strict, assign=assign).missing_keys
        unexpected = sorted(state_dict.keys() - known)
        if strict and unexpected:
            raise RuntimeError(f"no table of the module has {', '.join(unexpected)}")
        return IncompatibleKeys(missing, unexpected)

    def _with(self, ctx: PartContexts) -> Iterable[tuple[Any, Any]]:
        return zip(self._parts, ctx.of_parts, strict=True)


def parts_of(model: nn.Module) -> list[HotRowsModule]:
    """The sharded embedding modules of a model, in its order; one for each mesh of its tables."""
    found: list[HotRowsModule] = []
    for module in model.modules():
        if isinstance(module, PartedModule):
            found += module.parts
        elif isinstance(module, HotRowsModule):
            found.append(module)
    return found


def groups_of(model: nn.Module) -> MeshGroups | None:
    """The communicators of a model's sharded modules; `None` if none is of this package."""
    return next((part.groups for part in parts_of(model)), None)


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
            return {names[key]: one for its, names in named for key, one in its.items()}
        return KeyedTensor(
            keys=[names[key] for its, names in named for key in its.keys()],  # noqa: SIM118
            length_per_key=[dim for its in outputs for dim in its.length_per_key()],
            values=torch.cat([its.values() for its in outputs], dim=1),
            key_dim=1,
        )


def _names_in(configs: Sequence[Any], part: Any) -> dict[str, str]:
    """What a part's outputs are called beside those of the other parts.

    A feature that looks up several tables carries a table's name in each of its outputs.
    """
    all_names = get_embedding_names_by_table(list(configs))
    by_table = dict(zip((config.name for config in configs), all_names, strict=True))
    own = [config for config in configs if config.name in part.module_sharding_plan]
    return {
        alone: beside
        for config, names in zip(own, get_embedding_names_by_table(own), strict=True)
        for alone, beside in zip(names, by_table[config.name], strict=True)
    }
