"""Modules whose tables differ in mesh or training: one copy in the world, or frozen, beside others.

TorchRec's sharded modules know one set of ranks, and train all their tables. So each of the plan's
meshes has one for trained tables and one for frozen ones, and a `PartedModule` shows them as one,
with all tables under their names and one output.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardedModule
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from torchrec_2dsp._compat.shardings import is_in_pipeline, load_as, shardings_of
from torchrec_2dsp._compat.torchrec import KJTListSplitsAwaitable
from torchrec_2dsp.comms.groups import MeshGroups
from torchrec_2dsp.errors import ConfigError, UnsupportedError
from torchrec_2dsp.plan.fits_module import FUSED, SHARDED_TYPES, is_left_whole
from torchrec_2dsp.shard.optimizers import table_of
from torchrec_2dsp.shard.sharded_modules import (
    LooksUpAtOnce,
    ShardedEmbeddingBagCollection2D,
    ShardedEmbeddingCollection2D,
    missed_ids,
    tied_sequences,
)
from torchrec_2dsp.shard.stages import BatchNotes, Output, watch_calls
from torchrec_2dsp.shard.tables import Tables2D, table_modules

ShardedModule2D = ShardedEmbeddingBagCollection2D | ShardedEmbeddingCollection2D
Reshard = Callable[[Tables2D, Collection[str]], Sequence[Callable[[], ShardedModule2D]]]
"""Checks that some of a part's tables can be trained; returns functions that shard these and the
still frozen tables, without weights."""


@dataclass
class PartContexts(Multistreamable):
    """A batch's context in each part."""

    of_parts: list[Any]
    parts: list[Any]
    """The parts that have the batch's ids."""
    given: Any = None
    """The batch as the module received it."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        for ctx in self.of_parts:
            ctx.record_stream(stream)


class PartedModule(
    LooksUpAtOnce, ShardedModule[Any, Any, Output, PartContexts], FusedOptimizerModule
):
    """Presents several sharded modules as one: those of several meshes, and of frozen tables.

    Like TorchRec's lookups, parts aren't submodules, but their tables are: names and pipelines see
    one module.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        parts: Sequence[ShardedModule2D],
        reshard: Reshard,
    ) -> None:
        super().__init__(cast(Any, parts[0]).qcomm_codecs_registry)
        watch_calls(self)
        self._configs, self._reshard = configs, reshard
        self._order: list[str] | None = None
        self._take(parts)
        load_as(self, lambda: self._parts)

    def _take(self, parts: Sequence[ShardedModule2D]) -> None:
        self._parts: list[Any] = list(parts)
        self._names = [_names_in(self._configs, part) for part in self._parts]
        tables = {
            name: table for part in self._parts for name, table in table_modules(part).items()
        }
        ordered = nn.ModuleDict({config.name: tables[config.name] for config in self._configs})
        is_bags = isinstance(parts[0], ShardedEmbeddingBagCollection2D)
        setattr(self, "embedding_bags" if is_bags else "embeddings", ordered)

    @property
    def parts(self) -> list[ShardedModule2D]:
        """The sharded modules, each with one mesh's trained or frozen tables."""
        return list(self._parts)

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The unsharded module's type, which all parts share."""
        return self._parts[0].unsharded_module_type

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """All tables' fused optimizers, combined."""
        return CombinedOptimizer([part.fused_optimizer for part in self._parts])

    def prepared_unfreeze(self, names: Collection[str]) -> Callable[[int], None]:
        """Check that frozen tables can be trained; return a function that starts to train them.

        The function takes the sync policies' step count; call it on all ranks.
        """
        new_parts = {
            part: self._reshard(part.tables, names)
            for part in self._parts
            if part.tables.are_frozen and not set(part.tables.table_names).isdisjoint(names)
        }

        def swap(policy_step: int) -> None:
            # Dense layers may have learnt the columns' order.
            self._order = self._order or list(self._output_names())
            parts = [
                _replaced(part, new_parts[part], policy_step) if part in new_parts else [part]
                for part in self._parts
            ]
            self._take(list(chain.from_iterable(parts)))

        return swap

    def _output_names(self) -> Iterator[str]:
        for part, names in zip(self._parts, self._names, strict=True):
            shardings = shardings_of(part)
            keys = [key for sharding in shardings for key in sharding.embedding_names()]
            yield from (names[key] for key in dict.fromkeys(keys))

    def train(self, mode: bool = True) -> "PartedModule":
        """Set all parts to training or to evaluation."""
        for part in self._parts:
            part.train(mode)
        return super().train(mode)

    def create_context(self) -> PartContexts:
        """Create a context for each part."""
        return PartContexts([part.create_context() for part in self._parts], self._parts)

    def paired(self, ctx: PartContexts) -> Iterable[tuple[Any, Any]]:
        """Return each part with its context for a batch."""
        if ctx.parts is not self._parts:
            raise ConfigError(
                "a pipeline holds a batch from before unfreeze(), whose ids are with tables that "
                "are gone; make the pipeline anew after the call"
            )
        return zip(self._parts, ctx.of_parts, strict=True)

    def input_dist(
        self, ctx: PartContexts, features: KeyedJaggedTensor, /
    ) -> Awaitable[Awaitable[Any]]:
        """Let each part take its tables' features."""
        ctx.given = features
        exchanges = [part.input_dist(part_ctx, features) for part, part_ctx in self.paired(ctx)]
        return KJTListSplitsAwaitable(exchanges, ctx)

    def compute_and_output_dist(self, ctx: PartContexts, input: Any) -> LazyAwaitable[Output]:
        """Look up part by part; rows travel while the next part looks up."""
        outputs: list[tuple[Any, LazyAwaitable[Any]]] = []
        for (part, part_ctx), ids in zip(self.paired(ctx), input, strict=True):
            with _gradients_of(part):
                rows = part.compute_and_output_dist(part_ctx, ids)
            outputs.append((part, rows))
        return _Joined(outputs, self._names, self._order)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yield all sharded parameters' names."""
        for part in self._parts:
            yield from part.sharded_parameter_names(prefix)

    def state_dict(  # type: ignore[override]
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return all parts' tables, under the unsharded module's names."""
        for part in self._parts:
            destination = part.state_dict(
                destination=destination, prefix=prefix, keep_vars=keep_vars
            )
        return destination


class TablesAndMore(LooksUpAtOnce, ShardedModule[Any, Any, Any, Any]):
    """A sharded module that holds tables and more, under TorchRec's names."""

    def __init__(self, unsharded: nn.Module, sharded: ShardedModule2D | PartedModule) -> None:
        super().__init__(sharded.qcomm_codecs_registry)
        watch_calls(self)
        self._unsharded_type = type(unsharded)

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The unsharded module's type."""
        return self._unsharded_type


def sharded_tables(model: nn.Module) -> list[Tables2D]:
    """Return a model's sharded tables in model order: one `Tables2D` per mesh and module."""
    return [part.tables for module in model.modules() for part in parts_of(module)]


def refuse_updates_at_once(model: nn.Module) -> None:
    """Raise `ConfigError` if each batch's backward updates a table."""
    inside = {id(of) for own in model.modules() if parts_of(own) for of in own.modules()}
    for path, module in model.named_modules():
        is_own = id(module) in inside or sharded_tables(module)
        if isinstance(module, ShardedModule) and not is_own:
            raise ConfigError(
                f"module {path!r} ({type(module).__name__}) updates its tables in the backward of "
                "each batch; shard it by this package's sharders, with accumulates=True"
            )
    if not all(part.sync_point.can_hold for part in sharded_tables(model)):
        raise ConfigError(
            "tables are updated in the backward of each batch; make their sharder with "
            "accumulates=True, or replicas with GradientSync()"
        )


def check_can_start(model: nn.Module) -> None:
    """Refuse a model with sharded modules, or with values that nothing would initialise."""
    for path, module in model.named_modules():
        if isinstance(module, ShardedModule):
            raise UnsupportedError(
                f"module {path!r} is sharded already, perhaps by a try that failed, and would stay "
                "as it is; build the model anew, and shard it once"
            )
    collections = [
        module
        for module in model.modules()
        if isinstance(module, (*SHARDED_TYPES, *FUSED)) and not is_left_whole(module)
    ]
    replaced = {part for module in collections for part in module.modules()}
    owners = dict[nn.Parameter, str]()
    for path, module in model.named_modules():
        if module not in replaced:
            _check_meta(module, path, owners)


def _check_meta(module: nn.Module, path: str, owners: dict[nn.Parameter, str]) -> None:
    """Refuse values that TorchRec would leave uninitialised, fill with zeros, or untie."""
    prefix = f"{path}." if path else ""
    params = {
        name: param for name, param in module.named_parameters(recurse=False) if param.is_meta
    }
    buffers = [name for name, value in module.named_buffers(recurse=False) if value.is_meta]
    if (buffers and not params) or not hasattr(module, "reset_parameters"):
        for name in (*params, *buffers):
            raise UnsupportedError(
                f"{prefix + name!r} is on the meta device, and its module "
                f"({type(module).__name__}) has no reset_parameters() for it, so training would "
                "begin with whatever is in memory, or zeros; build the module on a device"
            )
    for name, param in params.items():
        if param in owners:
            raise UnsupportedError(
                f"{owners[param]!r} and {prefix + name!r} are one parameter on the meta device, of "
                "which TorchRec would make two; build their modules on a device"
            )
        owners[param] = prefix + name


def check_tracked(model: nn.Module, skipped: Iterable[str]) -> None:
    """Refuse TorchRec's trackers of a model if they would miss ids of a module not ``skipped``."""
    for path, module in model.named_modules():
        if not set(path.split(".")).isdisjoint(skipped):
            continue
        if isinstance(module, PartedModule):
            raise missed_ids(f"module {path!r}", "its tables differ in copies, or some are frozen")
        for part in parts_of(module):
            part.check_tracked()


def frozen_names(model: nn.Module) -> list[str]:
    """Return the names of a model's frozen tables."""
    all_tables = sharded_tables(model)
    return sorted(name for tables in all_tables if tables.are_frozen for name in tables.table_names)


def prepared_unfreeze(model: nn.Module, names: Collection[str]) -> list[Callable[[int], None]]:
    """Check that a model's frozen tables can be trained; return each module's function for it."""
    frozen = frozen_names(model)
    others = sorted(set(names) - set(frozen))
    if others or not names:
        raise ConfigError(
            f"unfreeze() got {repr(others[0]) if others else 'no table'}; give it frozen tables: "
            + (", ".join(frozen) or "the model has none")
        )
    if any(tables.sync_point.is_held for tables in sharded_tables(model)):
        raise ConfigError("an accumulate() of this model isn't over; call unfreeze() after it")
    if any(map(is_in_pipeline, model.modules())):
        raise ConfigError(
            "a train pipeline is attached to the model, whose batches and optimizer don't know "
            "the tables of unfreeze(); call its detach() before, and make it anew after"
        )
    for module in model.modules():
        if isinstance(module, TablesAndMore) and not set(frozen_names(module)).isdisjoint(names):
            raise UnsupportedError(
                f"unfreeze() can't train tables in a {module.unsharded_module_type.__name__}; "
                "shard the model again without freezing them"
            )
    parted = [module for module in model.modules() if isinstance(module, PartedModule)]
    return [module.prepared_unfreeze(names) for module in parted]


def groups_of(model: nn.Module) -> MeshGroups | None:
    """Return the communicators in a model's sharded modules; `None` without a 2D module."""
    return next((tables.groups for tables in sharded_tables(model)), None)


@dataclass(frozen=True)
class PrefetchedBatch:
    """A batch in one part, for a pipeline that prefetches rows."""

    tables: Tables2D
    notes: BatchNotes
    arrived: Any = None
    """The input exchange's result, if the pipeline has waited for it."""


def prefetched_batches(module: Any, ctx: Any, arrived: Any = None) -> list[PrefetchedBatch]:
    """Split a sharded module's batch into its parts; other modules have none."""
    if isinstance(module, PartedModule):
        arrived = [None] * len(module.parts) if arrived is None else arrived
        return [
            PrefetchedBatch(part.tables, part_ctx.notes, ids)
            for (part, part_ctx), ids in zip(module.paired(ctx), arrived, strict=True)
        ]
    return [PrefetchedBatch(part.tables, ctx.notes, arrived) for part in parts_of(module)]


def parts_of(module: nn.Module) -> list[ShardedModule2D]:
    """Return a module's sharded modules, each with one mesh's trained or frozen tables."""
    if isinstance(module, PartedModule):
        return module.parts
    return [module] if isinstance(module, ShardedModule2D) else []


def _gradients_of(part: Any) -> torch.set_grad_enabled:
    """Return a context without gradients if a part's tables are frozen."""
    return torch.set_grad_enabled(torch.is_grad_enabled() and not part.tables.are_frozen)


class _Joined(LazyAwaitable[Output]):
    """Joins all parts' outputs, under the names that they would have without parts."""

    def __init__(
        self,
        outputs: list[tuple[Any, LazyAwaitable[Any]]],
        names: Sequence[Mapping[str, str]],
        order: list[str] | None,
    ) -> None:
        super().__init__()
        self._outputs = outputs
        self._names, self._order = names, order

    def _wait_impl(self) -> Output:
        outputs = []
        for part, output in self._outputs:
            with _gradients_of(part):
                outputs.append(output.wait())
        named = list(zip(outputs, self._names, strict=True))
        if not isinstance(outputs[0], KeyedTensor):
            joined = {
                names[key]: sequence for output, names in named for key, sequence in output.items()
            }
            return tied_sequences({name: joined[name] for name in self._order or joined})
        keyed = KeyedTensor(
            keys=[names[key] for output, names in named for key in output.keys()],  # noqa: SIM118
            length_per_key=[dim for output in outputs for dim in output.length_per_key()],
            values=torch.cat([output.values() for output in outputs], dim=1),
            key_dim=1,
        )
        if self._order in (None, keyed.keys()):
            return keyed
        return KeyedTensor.from_tensor_list(self._order, [keyed[name] for name in self._order])


def _names_in(configs: Sequence[Any], part: Any) -> dict[str, str]:
    """Map a part's output names to the whole module's, which may add a table's name."""
    all_names = get_embedding_names_by_table(list(configs))
    by_table = dict(zip((config.name for config in configs), all_names, strict=True))
    own = [config for config in configs if config.name in part.tables.table_names]
    return {
        alone: beside
        for config, names in zip(own, get_embedding_names_by_table(own), strict=True)
        for alone, beside in zip(names, by_table[config.name], strict=True)
    }


def _replaced(
    part: ShardedModule2D, makers: Iterable[Callable[[], ShardedModule2D]], policy_step: int
) -> list[ShardedModule2D]:
    """Return new parts with a part's weights, hot rows and counts."""
    state = part.state_dict()
    # The weights that a new part draws are overwritten.
    with torch.random.fork_rng({weight.device for weight in part.parameters() if weight.is_cuda}):
        new_parts = [make() for make in makers]
    for new_part in new_parts:
        tables = new_part.tables
        tables.hot_sets.renew(part.tables.hot_sets.by_table)
        tables.sync_point.count_from(policy_step)
        own = {key: value for key, value in state.items() if table_of(key) in tables.table_names}
        new_part.load_state_dict(own)
        new_part.train(part.training)
        tables.num_bad_ids = part.tables.num_bad_ids
    return new_parts
