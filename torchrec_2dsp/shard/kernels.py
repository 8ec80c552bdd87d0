"""Fused embedding kernels whose backward can be captured, with their optimizer and lookups.

They are TorchRec's kernels: storage, state names and the fused update are stock.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import data_type_to_sparse_type
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.fbgemm import (
    Tbe,
    adopt_lookup,
    adopt_optimizer,
    has_own_rows,
    last_lookup,
    learning_rate_of,
    output_dtype,
    params_to_build,
    replace_weights,
    set_learning_rate,
    table_tensors,
    tbe_shape,
    tell_empty_tables_apart,
    updates_by_rule,
    without_update,
    write_counts,
)
from torchrec_2dsp._compat.shardings import ShardingFacts, replace_optimizer, return_type_of_others
from torchrec_2dsp._compat.tensors import Unwritten
from torchrec_2dsp._compat.torchrec import (
    BaseEmbedding,
    BatchedFusedEmbedding,
    BatchedFusedEmbeddingBag,
    EmbeddingComputeKernel,
    EmbeddingFusedOptimizer,
    GroupedEmbeddingConfig,
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec_2dsp.codecs.rows import RowCodec
from torchrec_2dsp.comms.groups import Peers
from torchrec_2dsp.errors import SyncError
from torchrec_2dsp.optim import to_kernel_units
from torchrec_2dsp.plan.parameter_sharding import RowStorage
from torchrec_2dsp.replicas.capture import RowCapture
from torchrec_2dsp.replicas.synced_shard import TableShard
from torchrec_2dsp.rows.eight_bits import EightBitRows, RowStore
from torchrec_2dsp.rows.update import (
    DirectLookup,
    rule_for,
)

MOMENT_SCALE = "moment_scale"
ROUNDING_SEED = "rounding_seed"
STORED_AS = "stored_as"
OWN_PARAMS = (MOMENT_SCALE, ROUNDING_SEED, STORED_AS)
"""The fused parameters that the kernels take in addition to FBGEMM's."""
_IN_HOST_MEMORY = EmbeddingComputeKernel.FUSED_UVM


class ScaledFusedOptimizer(EmbeddingFusedOptimizer):
    """TorchRec's fused optimizer with a moment scale, in the user's units."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        tbe: Tbe,
        pg: dist.ProcessGroup | None,
        *,
        moment_scale: float,
        lr: float,
    ) -> None:
        super().__init__(config, tbe, pg)
        self._tbe = tbe
        self._moment_scale = moment_scale
        (self._group,) = cast(list[dict[str, Any]], self.param_groups)
        self._group["lr"] = lr

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Pass the learning rate to the kernel, as TorchRec's optimizer does here."""
        self._set_learning_rate()

    def step(self, closure: Any = None) -> None:
        """Pass the learning rate to the kernel; the update itself ran in the backward."""
        self._set_learning_rate()

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Change the running kernel's hyper-parameters."""
        scaled = {"lr", "eps"}
        super().update_hyper_parameters(
            {
                name: to_kernel_units(value, self._moment_scale) if name in scaled else value
                for name, value in params_dict.items()
            }
        )

    def _set_learning_rate(self) -> None:
        set_learning_rate(self._tbe, to_kernel_units(self._group["lr"], self._moment_scale))


class _CapturingKernel:
    """Adds the moment scale and a capturable backward to both kinds of kernels."""

    _stored_as = RowStorage.PLAIN

    def _storing(self, config: GroupedEmbeddingConfig) -> AbstractContextManager[object]:
        """Return the context for TorchRec's constructor, in which weights may stay unwritten."""
        named = (config.fused_params or {}).get(STORED_AS, RowStorage.PLAIN.value)
        vars(self)["_stored_as"] = storage = RowStorage(named)
        sizes = [table.local_rows * table.local_cols for table in config.embedding_tables]
        return nullcontext() if storage is RowStorage.PLAIN else Unwritten(sum(sizes))

    @torch.no_grad()
    def init_parameters(self) -> None:
        """Draw the tables as TorchRec does, in the rows' storage format."""
        if self._stored_as is RowStorage.INT8:
            specs, device = self.tbe.embedding_specs, torch.device(self.tbe.current_device)
            stores = [RowStore.zeros(num_rows, dim, device) for num_rows, dim, *_ in specs]
            replace_weights(self.tbe, [EightBitRows(store) for store in stores])
        super().init_parameters()  # pyright: ignore[reportAttributeAccessIssue]

    def named_parameters_by_table(self) -> Iterator[tuple[str, Any]]:
        """Yield each table's weight, as TorchRec does."""
        if self._stored_as is RowStorage.PLAIN:
            yield from super().named_parameters_by_table()  # pyright: ignore
            return
        named = cast("Kernel", self).named_parameters()
        for (_, weight), table in zip(named, self.table_configs, strict=True):
            yield table.name, weight

    def _init_capture(self, pg: dist.ProcessGroup | None, user_params: dict[str, Any]) -> None:
        self.moment_scale = float(user_params.get(MOMENT_SCALE, 1.0))
        self._capture: RowCapture | None = None
        self._update_watchers: list[Callable[[Callable[[], list[torch.Tensor]]], None]] = []
        has_rows = [table.local_rows > 0 for table in self.table_configs]
        self._has_no_rows = not any(has_rows)
        if not all(has_rows):
            tell_empty_tables_apart(self.tbe)
        kernel = cast("Kernel", self)
        adopt_lookup(self.tbe)
        has_new_states = adopt_optimizer(self.tbe, user_params)
        config = _with_grids_of_one_row(kernel.config)
        if has_new_states or has_own_rows(self.tbe) or config is not kernel.config:
            replace_optimizer(kernel, EmbeddingFusedOptimizer(config, self.tbe, pg))
        if self.moment_scale != 1.0:
            scale, lr = self.moment_scale, user_params["learning_rate"]
            scaled = ScaledFusedOptimizer(config, self.tbe, pg, moment_scale=scale, lr=lr)
            replace_optimizer(kernel, scaled)

    def capture_rows(
        self, peers: Peers | None, codec: RowCodec, *, may_send_tables: bool = False
    ) -> RowCapture:
        """Capture backwards from now on, and merge them over ``peers``, if any."""
        tables = [table.name for table in self.table_configs]
        self._capture = RowCapture(
            self.tbe, tables, peers=peers, codec=codec, may_send_tables=may_send_tables
        )
        return self._capture

    @property
    def tbe(self) -> Tbe:
        """The kernel's FBGEMM module."""
        return cast("Kernel", self).emb_module

    @property
    def table_configs(self) -> list[ShardedEmbeddingTable]:
        """The table shards' configs, in the lookup's order."""
        return cast("Kernel", self).config.embedding_tables

    def shards(self) -> list[TableShard]:
        """Return the kernel's table shards."""
        shards = []
        for table, tensors in zip(self.table_configs, table_tensors(self.tbe), strict=True):
            assert table.local_metadata is not None
            row, column = table.local_metadata.shard_offsets
            shards.append(TableShard(table.name, row, column, tensors))
        return shards

    @property
    def user_learning_rate(self) -> float:
        """The kernel's learning rate in the user's units."""
        return learning_rate_of(self.tbe) / to_kernel_units(1.0, self.moment_scale)

    def _lookup(self, run: Callable[[], torch.Tensor], features: KeyedJaggedTensor) -> torch.Tensor:
        if self._has_no_rows:
            return self._zeros(features)
        is_training = self.tbe.training and torch.is_grad_enabled()
        run = without_update(self.tbe, run, is_training=is_training)
        if not torch.is_grad_enabled():
            return run()
        look_up = self._updating if self._capture is None else self._capture.lookup
        output = look_up(run, features.weights_or_none())
        if self._update_watchers and output.requires_grad:
            self._announce_update(output, features)
        return output

    @cached_property
    @torch.inference_mode(mode=False)
    def _direct(self) -> DirectLookup | None:
        """A lookup that a rule updates, created on first use, on the kernel's device."""
        rule = rule_for(self.tbe)
        return None if rule is None else DirectLookup(self.tbe, rule)

    def _updating(
        self, run: Callable[[], torch.Tensor], weights: torch.Tensor | None
    ) -> torch.Tensor:
        """Run a forward whose backward updates immediately."""
        if self._direct is not None and updates_by_rule(self.tbe):
            return self._direct.lookup(run, weights)
        output = run()
        if self._update_watchers and output.requires_grad:
            counts = write_counts(self.tbe)

            def check(grad: torch.Tensor) -> None:
                if write_counts(self.tbe) != counts:
                    raise SyncError(
                        "tables were averaged or written between this lookup and its backward, "
                        "which updates what it has read; with WeightSync, call sync() after all "
                        "backwards of a step"
                    )

            output.register_hook(check)
        return output

    def _zeros(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return the output for no rows, which FBGEMM's CPU kernels can't look up."""
        shape = tbe_shape(self.tbe)
        dims = [shape.table_dims[table] for table in shape.feature_tables]
        size = (0, dims[0]) if shape.is_sequence else (features.stride(), sum(dims))
        where = {"device": features.device(), "dtype": output_dtype(self.tbe)}
        return torch.zeros(size, requires_grad=torch.is_grad_enabled(), **where)

    def tell_updates(self, watcher: Callable[[Callable[[], list[torch.Tensor]]], None]) -> None:
        """Call ``watcher`` before each immediate update, with a function that returns its rows."""
        self._update_watchers.append(watcher)

    def tell_write(self, rows: list[torch.Tensor]) -> None:
        """Tell the update watchers which rows of each table are about to be written."""
        for watcher in self._update_watchers:
            watcher(lambda: rows)

    def _announce_update(self, output: torch.Tensor, features: KeyedJaggedTensor) -> None:
        ids, _ = last_lookup(self.tbe)
        shape = tbe_shape(self.tbe)

        def rows() -> list[torch.Tensor]:
            by_feature = ids.split(features.length_per_key())
            return [
                torch.cat([by_feature[feature] for feature in shape.features_of(table)])
                for table in range(shape.num_tables)
            ]

        def tell(grad: torch.Tensor) -> None:
            for watcher in self._update_watchers:
                watcher(rows)

        # Autograd runs it when the output's gradient is known, before the kernel's update.
        output.register_hook(tell)


class EmbeddingBagKernel(_CapturingKernel, BatchedFusedEmbeddingBag):
    """Pooled lookups."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        sharding_type: ShardingType | None = None,
        env: ShardingEnv | None = None,
    ) -> None:
        with self._storing(config):
            BatchedFusedEmbeddingBag.__init__(
                self, _kernel_config(config, device), pg, device, sharding_type, env
            )
        self._init_capture(pg, config.fused_params or {})

    def forward(self, features: KeyedJaggedTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return one row per bag."""
        return self._lookup(
            lambda: BatchedFusedEmbeddingBag.forward(self, features, *args, **kwargs), features
        )


class EmbeddingKernel(_CapturingKernel, BatchedFusedEmbedding):
    """Sequence lookups."""

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        pg: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        with self._storing(config):
            BatchedFusedEmbedding.__init__(self, _kernel_config(config, device), pg, device)
        self._init_capture(pg, config.fused_params or {})

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return one row per id."""
        return self._lookup(lambda: BatchedFusedEmbedding.forward(self, features), features)


Kernel = EmbeddingBagKernel | EmbeddingKernel


def _kernel_config(
    config: GroupedEmbeddingConfig, device: torch.device | None
) -> GroupedEmbeddingConfig:
    """Return ``config`` with fused parameters that FBGEMM knows, in FBGEMM's units."""
    precision = data_type_to_sparse_type(config.data_type)
    params = params_to_build(dict(config.fused_params or {}), precision, device)
    scale = params.get(MOMENT_SCALE, 1.0)
    params = {name: value for name, value in params.items() if name not in OWN_PARAMS}
    if scale != 1.0:
        for name in ("learning_rate", "eps"):
            params[name] = to_kernel_units(params[name], scale)
    if any(table.compute_kernel is _IN_HOST_MEMORY for table in config.embedding_tables):
        # The driver moves managed memory, and may request more than a GPU can bring back.
        params.setdefault("uvm_host_mapped", True)
    return replace(config, fused_params=params)


def _with_grids_of_one_row(config: GroupedEmbeddingConfig) -> GroupedEmbeddingConfig:
    """Return ``config`` changed so that TorchRec's fused optimizer recognises grids.

    TorchRec takes a shard as a grid's if it has neither all columns nor all rows. With one row,
    one shard per column block has all rows, and would number its moments unlike ranks without rows.
    """
    tables = []
    for table in config.embedding_tables:
        shards = table.global_metadata.shards_metadata if table.global_metadata else []
        blocks = {shard.shard_offsets[1] for shard in shards}
        if table.num_embeddings == 1 and 1 < len(blocks) < len(shards):
            # TorchRec doesn't use the row count for anything else there.
            table = replace(table, num_embeddings=2)
        tables.append(table)
    return config if tables == config.embedding_tables else replace(config, embedding_tables=tables)


class PooledLookup(GroupedPooledEmbeddingsLookup):
    """A lookup over `EmbeddingBagKernel`s."""

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, device: Any, pg: Any, sharding_type: Any, env: Any
    ) -> BaseEmbedding:
        return EmbeddingBagKernel(config, pg, device, sharding_type, env)


class SequenceLookup(GroupedEmbeddingsLookup):
    """A lookup over `EmbeddingKernel`s."""

    kernel_class: ClassVar[type[EmbeddingKernel]] = EmbeddingKernel

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, pg: Any, device: Any, env: Any = None
    ) -> BaseEmbedding:
        return self.kernel_class(config, pg, device)


Lookup = TypeVar("Lookup", PooledLookup, SequenceLookup)


def make_lookup(
    kind: type[Lookup], facts: ShardingFacts, device: torch.device | None, **of_kind: Any
) -> Lookup:
    """Build a sharding's lookup on this rank; ``of_kind`` are further arguments for its kind."""
    device = facts.device if device is None else device
    lookup = kind(
        grouped_configs=facts.configs, pg=facts.group, device=device, env=facts.env, **of_kind
    )
    return_type_of_others(lookup, facts)
    return lookup


def kernels_of(lookups: Iterable[nn.Module]) -> Iterator[Kernel]:
    """Yield the lookups' fused kernels.

    TorchRec keeps lookups in plain lists, where `modules()` doesn't find them.
    """
    for lookup in lookups:
        for module in lookup.modules():
            if isinstance(module, (EmbeddingBagKernel, EmbeddingKernel)):
                yield module
