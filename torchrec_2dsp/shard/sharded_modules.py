"""The sharded modules: TorchRec's, for bags and for sequences, with this package's stages.

Bags and sequences differ only in how hot rows join the output: bags are added, and averaged
where TorchRec can't; sequences' rows return to their ids' positions.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_2dsp._compat.shardings import before_loads
from torchrec_2dsp._compat.tensors import tied
from torchrec_2dsp._compat.torchrec import ColumnWiseSequences, CwPooledEmbeddingSharding
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.errors import CheckpointError, UnsupportedError
from torchrec_2dsp.plan.parameter_sharding import (
    ROW_EXCHANGES,
    Exchange,
    ParameterSharding2D,
    RowStorage,
    TableType,
)
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.shard.batch import with_parts
from torchrec_2dsp.shard.codecs import codecs_registry
from torchrec_2dsp.shard.kernels import STORED_AS
from torchrec_2dsp.shard.optimizers import table_of
from torchrec_2dsp.shard.replica_sync import Replication
from torchrec_2dsp.shard.shardings import sharding_class
from torchrec_2dsp.shard.stages import (
    BagContext,
    BatchNotes,
    HotFeature,
    Output,
    SequenceContext,
    Stage,
    cold_before_hot,
    features_by_output,
    watch_calls,
)
from torchrec_2dsp.shard.tables import Tables2D


class LooksUpAtOnce:
    """A sharded module whose lookup and output exchange are a single call."""

    @torch.compiler.disable(reason="tables exchange rows with other ranks")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, or a train pipeline's forward in its place, outside compiled graphs."""
        stock: Any = super()
        return stock.__call__(*args, **kwargs)

    def compute(self, ctx: Any, dist_input: Any) -> Any:
        """Raise an error: nothing would complete the rows between the two calls."""
        raise UnsupportedError(
            f"{type(self).__name__} has no compute() and output_dist() of its own; call "
            "compute_and_output_dist()"
        )

    def output_dist(self, ctx: Any, output: Any) -> Any:
        """Raise `compute`'s error."""
        return self.compute(ctx, output)


def missed_ids(tables: str, reason: str) -> UnsupportedError:
    """Return the error for a tracker that would miss ids of some tables."""
    return UnsupportedError(
        f"TorchRec's tracker would miss ids of {tables}, because {reason}; plan without that, or "
        "name the module in fqns_to_skip and count its ids by RowCounter"
    )


class RunsPlan2D(LooksUpAtOnce):
    """A sharded module with this package's sharding types and stages."""

    tables: Tables2D

    @property
    def module_sharding_plan(self) -> Any:
        """The plan that TorchRec builds state dicts from, with its own names for types."""
        return self._module_sharding_plan

    @module_sharding_plan.setter
    def module_sharding_plan(self, plan: dict[str, ParameterSharding2D]) -> None:  # pyright: ignore
        self._module_sharding_plan = {
            name: replace(table, sharding_type=TableType.of_name(table.sharding_type).base.value)
            for name, table in plan.items()
        }

    def init_data_parallel(self) -> None:
        """Do nothing: data-parallel tables have their own optimizer, and need no DDP."""

    def check_tracked(self) -> None:
        """Refuse TorchRec's trackers if ids are looked up where trackers can't see them."""
        for name, table in self.module_sharding_plan.items():
            if table.hot_set is not None or table.exchange in ROW_EXCHANGES:
                has = f"exchange={table.exchange.value!r}" if table.hot_set is None else "hot rows"
                raise missed_ids(f"table {name!r}", f"it has {has}")

    def register_post_lookup_tracker_fn(self, record_fn: Any) -> None:
        """Let a tracker see the ids that arrive, if these are all ids."""
        self.check_tracked()
        stock: Any = super()
        stock.register_post_lookup_tracker_fn(record_fn)

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Let the stages see the batch, then distribute its ids."""
        ctx.given = features
        stock: Any = super()
        return self.tables.send_ids(ctx, features, stock.input_dist)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Look up rows, in the tables and in the stages."""
        stock: Any = super()
        return self.tables.look_up(ctx, input, stock.compute_and_output_dist)


_AVERAGED_HERE = (
    TableType(ShardingType.ROW_WISE),
    TableType(ShardingType.TABLE_ROW_WISE),
    TableType(ShardingType.GRID_SHARD),
    TableType(ShardingType.ROW_WISE, Exchange.NONEMPTY),
)
"""Sharding types for which a rank sees parts of bags. TorchRec doesn't average grid tables at all.
For the others it divides whole outputs, also other types' tables, by lengths + 1e-6, and
fails where a rank has no samples."""


class ShardedEmbeddingBagCollection2D(RunsPlan2D, ShardedEmbeddingBagCollection):  # pyright: ignore[reportIncompatibleVariableOverride]
    """TorchRec's sharded collection, repeated over a mesh's groups."""

    def __init__(
        self, module: Any, plan: ModulePlan2D, *, replication: Replication, **stock: Any
    ) -> None:
        configs: list[EmbeddingBagConfig] = module.embedding_bag_configs()
        averaged = _averaged_here(configs, plan)
        summing = [_summing(table) if table.name in averaged else table for table in configs]
        shown = cast(EmbeddingBagCollection, SomeTables(module, summing))
        super().__init__(shown, plan, **stock)
        device = stock["device"] or torch.device("cpu")
        watch_calls(self)
        before_loads(self, partial(_check_load, _shapes("embedding_bags", configs)))
        outputs = JoinBags(features_by_output(configs, averaged))
        self.tables = Tables2D(self, module, configs, plan, replication, device, outputs)
        if device.type == "cuda":
            self.tables.stages.append(EmptyBatches())

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> Any:
        """Build a sharding with this package's kernels."""
        kind = TableType.of_name(sharding_infos[0].param_sharding.sharding_type)
        _store_as_planned(sharding_infos)
        sharding = sharding_class(kind, is_sequence=False)
        if kind.base is ShardingType.DATA_PARALLEL:
            return sharding(sharding_infos, env, device)
        extra = {}
        if issubclass(sharding, CwPooledEmbeddingSharding):
            extra["permute_embeddings"] = permute_embeddings
        registry = codecs_registry(kind, sharding_infos, qcomm_codecs_registry)
        return sharding(sharding_infos, env, device, qcomm_codecs_registry=registry, **extra)

    def create_context(self) -> BagContext:
        """Create a batch's context."""
        return BagContext()


def _shapes(of_tables: str, configs: Iterable[BaseEmbeddingConfig]) -> dict[str, list[int]]:
    """Return the shape of each table by its name in a state dict."""
    return {
        f"{of_tables}.{config.name}.weight": [config.num_embeddings, config.embedding_dim]
        for config in configs
    }


def _check_load(
    shapes: Mapping[str, list[int]], state: Mapping[str, Any], prefix: str, metadata: Any
) -> None:
    """Refuse tables that wouldn't be loaded, or only in part, without an error."""
    for name, shape in shapes.items():
        loaded = state.get(f"{prefix}{name}")
        if loaded is not None and metadata.get("assign_to_params_buffers"):
            raise UnsupportedError(
                f"load_state_dict(assign=True) can't replace {name!r}, whose rows are in FBGEMM's "
                "memory; load without assign"
            )
        # A rank without a shard may have nothing to load.
        if loaded is not None and list(loaded.size()) not in (shape, [0]):
            raise CheckpointError(
                f"{name!r} has the shape {list(loaded.size())} in the state dict, and {shape} in "
                "the model; load a table of this shape, or leave it out with strict=False"
            )


def _store_as_planned(sharding_infos: Iterable[Any]) -> None:
    """Tell the tables' kernels how rows are stored; TorchRec builds a kernel for each way."""
    for info in sharding_infos:
        storage = info.param_sharding.stored_as
        if storage is not RowStorage.PLAIN:
            info.fused_params = {**(info.fused_params or {}), STORED_AS: storage.value}


def _averaged_here(configs: Iterable[EmbeddingBagConfig], plan: ModulePlan2D) -> set[str]:
    """Return the tables that TorchRec sums and this package averages.

    They include tables with hot rows: TorchRec averages over the ids it sees, which lack hot ones.
    """
    tables = dict(plan.tables())
    return {
        config.name
        for config in configs
        if config.pooling is PoolingType.MEAN
        and (
            tables[config.name].hot_set is not None
            or _without_transport(tables[config.name]) in _AVERAGED_HERE
        )
    }


def _without_transport(table: ParameterSharding2D) -> TableType:
    return replace(TableType.of_name(table.sharding_type), transport=Transport.FP32)


def _summing(config: EmbeddingBagConfig) -> EmbeddingBagConfig:
    """Return a copy of the table's config with summed bags."""
    summing = copy.copy(config)
    summing.pooling = PoolingType.SUM
    return summing


class SomeTables:
    """Presents an unsharded module with other table configs: only some, or with another pooling.

    Frozen tables are presented without their own optimizer.
    """

    def __init__(
        self, module: Any, configs: Sequence[BaseEmbeddingConfig], *, are_frozen: bool = False
    ) -> None:
        self._module, self._are_frozen = module, are_frozen
        self._configs: list[Any] = list(configs)
        self._names = {config.name for config in configs}

    def embedding_bag_configs(self) -> list[Any]:
        """Return the chosen configs, as `EmbeddingBagCollection` does."""
        return self._configs

    def embedding_configs(self) -> list[Any]:
        """Return the chosen configs, as `EmbeddingCollection` does."""
        return self._configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return output names as if there were no other tables."""
        return get_embedding_names_by_table(self._configs)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the chosen tables' parameters, by name."""
        for name, parameter in self._module.named_parameters():
            if self._has(name) and self._are_frozen:
                # TorchRec takes a table's own optimizer from its parameter.
                yield name, nn.Parameter(parameter.detach(), requires_grad=False)
            elif self._has(name):
                yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the chosen tables' parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the chosen tables' state."""
        state = self._module.state_dict()
        return {key: value for key, value in state.items() if self._has(key)}

    def _has(self, key: str) -> bool:
        return table_of(key) in self._names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class ShardedEmbeddingCollection2D(RunsPlan2D, ColumnWiseSequences):  # pyright: ignore[reportIncompatibleVariableOverride]
    """TorchRec's sharded collection, repeated over a mesh's groups."""

    def __init__(
        self, module: Any, plan: ModulePlan2D, *, replication: Replication, **stock: Any
    ) -> None:
        super().__init__(module, plan, **stock)
        watch_calls(self)
        configs = module.embedding_configs()
        before_loads(self, partial(_check_load, _shapes("embeddings", configs)))
        device = stock["device"] or torch.device("cpu")
        self.order_column_shards(configs, self.module_sharding_plan)
        self.tables = Tables2D(self, module, configs, plan, replication, device, JoinSequences())

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> Any:
        """Build a sharding with this package's kernels."""
        kind = TableType.of_name(sharding_type)
        _store_as_planned(sharding_infos)
        sharding = sharding_class(kind, is_sequence=True)
        if kind.base is ShardingType.DATA_PARALLEL:
            return sharding(sharding_infos, env, device)
        return sharding(
            sharding_infos=sharding_infos,
            env=env,
            device=device,
            qcomm_codecs_registry=codecs_registry(kind, sharding_infos, qcomm_codecs_registry),
        )

    def is_column_wise(self, sharding_type: str) -> bool:
        """Return whether tables of this type are cut by columns."""
        return TableType.of_name(sharding_type).base is ShardingType.COLUMN_WISE

    def create_context(self) -> SequenceContext:
        """Create a batch's context."""
        return SequenceContext()


class JoinBags(Stage):
    """Adds hot rows to TorchRec's sums, and averages where TorchRec can't."""

    def __init__(self, averaged_outputs: Mapping[str, str]) -> None:
        self._averaged_outputs = dict(averaged_outputs)

    def before_ids_travel(self, notes: BatchNotes, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Note bag lengths, hot ids included, for outputs that are averaged here."""
        if self._averaged_outputs:
            lengths = batch.lengths().view(len(batch.keys()), batch.stride())
            # A copy, because a loader may reuse the batch's memory.
            by_feature = dict(zip(batch.keys(), lengths.clamp(min=1), strict=True))
            notes.bag_lengths = {
                output: by_feature[feature] for output, feature in self._averaged_outputs.items()
            }
        return batch

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """Return the complete bags; a feature with hot rows looks up one table, under its name."""
        if not (notes.hot_output or notes.bag_lengths):
            return output
        hot_output, notes.hot_output = notes.hot_output, {}
        cold = cast(KeyedTensor, output)
        names, dims, values = cold.keys(), cold.length_per_key(), cold.values()
        hot = [hot_output[name] for name in names if name in hot_output]
        if len(hot) == len(names):
            values, hot_output = values + torch.cat(hot, dim=1), {}
        if hot_output or notes.bag_lengths:
            bags = []
            for name, sums in zip(names, values.split(dims, dim=1), strict=True):
                if name in hot_output:
                    sums = sums + hot_output[name]
                if name in notes.bag_lengths:
                    sums = sums / notes.bag_lengths[name].to(sums.dtype)[:, None]
                bags.append(sums)
            values = torch.cat(bags, dim=1)
        return KeyedTensor(keys=names, length_per_key=dims, values=values, key_dim=1)


class EmptyBatches(Stage):
    """Replaces a batch without samples by one without ids, and removes its bags from the output.

    FBGEMM's CUDA kernel that sorts ids by row owner fails without samples.
    """

    def before_ids_travel(self, notes: BatchNotes, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return a batch that has samples."""
        notes.is_empty = not batch.variable_stride_per_key() and not batch.stride()
        if not notes.is_empty:
            return batch
        return with_parts(batch, lengths=batch.lengths().new_zeros(len(batch.keys())), stride=1)

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """Return the output without the added sample's bags."""
        if not notes.is_empty:
            return output
        assert isinstance(output, KeyedTensor)
        dims, bags = output.length_per_key(), output.values()[:0]
        return KeyedTensor(keys=output.keys(), length_per_key=dims, values=bags, key_dim=1)


class JoinSequences(Stage):
    """Puts hot and cold rows into the batch's id order."""

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """Return the complete sequences."""
        if notes.hot is None:
            return tied_sequences(output) if len(notes.shardings) > 1 else output
        hot_output, notes.hot_output = notes.hot_output, {}
        joined = {}
        for name, rows in cast(Mapping[str, JaggedTensor], output).items():
            joined[name] = rows
            if name in hot_output:
                joined[name] = _joined(
                    rows,
                    hot_output[name],
                    notes.hot.features[name],
                    notes.hot.ids.by_feature[name],
                )
        return tied_sequences(joined)


def tied_sequences(output: Output) -> dict[str, JaggedTensor]:
    """Return sequences whose tables all get gradients, or zeros, if one does.

    Otherwise a rank whose loss leaves some of them out would skip their collectives.
    """
    sequences = dict(cast(Mapping[str, JaggedTensor], output))
    if not any(rows.values().requires_grad for rows in sequences.values()):
        return sequences
    # Frozen tables' outputs as well: a loss may be computed from them alone.
    values = tied(rows.values() for rows in sequences.values())
    return {
        name: JaggedTensor(
            tensor, rows.weights_or_none(), rows.lengths_or_none(), rows.offsets_or_none()
        )
        for (name, rows), tensor in zip(sequences.items(), values, strict=True)
    }


def _joined(
    cold: JaggedTensor, hot_rows: torch.Tensor, hot: HotFeature, hot_ids: torch.Tensor
) -> JaggedTensor:
    """Return the rows for all of a feature's ids."""
    order = cold_before_hot(hot.is_hot, hot.slots.numel())
    ids = cold.weights_or_none()  # Set if the module is asked for indices.
    if ids is not None:
        ids = torch.cat([ids, hot_ids[hot.slots].to(ids.dtype)])[order]
    return JaggedTensor(
        values=torch.cat([cold.values(), hot_rows])[order],
        lengths=cold.lengths() + hot.lengths.to(cold.lengths().dtype),
        weights=ids,
    )
