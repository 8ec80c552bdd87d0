"""The planning and sharding that all programs share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_2dsp.access.stats import AccessStats
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D
from torchrec_2dsp.parallel.pipelines import AnyPipeline
from torchrec_2dsp.plan.parameter_sharding import (
    IN_8_BITS,
    ROW_EXCHANGES,
    Exchange,
    Pipeline,
    RowStorage,
    ShardingType2D,
    base_type,
    kinds_of,
)
from torchrec_2dsp.plan.plan2d import Plan2D, pin
from torchrec_2dsp.plan.sync import SyncConfig
from torchrec_2dsp.planner.planner2d import plan_on_rank_0
from torchrec_2dsp.planner.torchrec.enumerator import search_as_torchrec
from torchrec_2dsp.programs.config.sections import ExchangeConfig, OptimizerConfig
from torchrec_2dsp.programs.data.dataset import Dataset
from torchrec_2dsp.programs.data.synthetic import SparseFeature, SyntheticConfig
from torchrec_2dsp.programs.models.model import table_name, tables_of
from torchrec_2dsp.shard.initial_tables import configs_of, draw_part_

RESERVED = 0.15
"""The share of memory that isn't for tables."""


class ReservedShare(FixedPercentageStorageReservation):
    """Keeps a share of each rank's memory from the tables, also on CPUs, where TorchRec's doesn't.

    Example:
        >>> from torch import nn
        >>> from torchrec.distributed.planner.types import Topology
        >>> from torchrec_2dsp.programs.models.planned import ReservedShare
        >>> cpus = Topology(world_size=1, compute_device="cpu", ddr_cap=1000)
        >>> reserved = ReservedShare(0.25).reserve(cpus, 8, nn.Module(), [])
        >>> reserved.devices[0].storage.ddr
        750
    """

    def __init__(self, share: float) -> None:
        super().__init__(share)
        self._share = share

    def reserve(self, topology: Topology, *arguments: Any, **named: Any) -> Topology:
        """Copy the topology, with the memory left for tables."""
        reserved = super().reserve(topology, *arguments, **named)
        for device in reserved.devices if topology.compute_device == "cpu" else ():
            device.storage.ddr = int((1 - self._share) * device.storage.ddr)
        return reserved


def planner_arguments(
    model: nn.Module,
    data: Dataset,
    sharding_types: Sequence[str],
    topology: Topology,
    batch_size: int,
) -> dict[str, Any]:
    """Return the arguments common to TorchRec's planner and this package's."""
    mean_ids = {feature.name: feature.mean_ids for feature in data.features}
    return {
        "topology": topology,
        "batch_size": batch_size,
        "constraints": {
            table.name: ParameterConstraints(
                sharding_types=list(sharding_types) or None,
                pooling_factors=[mean_ids.get(name, 1.0) for name in table.feature_names],
            )
            for table in tables_of(model)
        },
        "storage_reservation": ReservedShare(RESERVED),
    }


def pinned_plan(
    model: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    pins: ExchangeConfig,
    data: Dataset,
    arguments: Mapping[str, Any],
    *,
    mesh: Mesh2D,
    sync: SyncConfig,
    access: AccessStats | None = None,
) -> Plan2D:
    """Plan one sharding group by TorchRec's search, and pin a config's exchange in the plan.

    Args:
        model: the unsharded model.
        sharders: this package's.
        pins: the config with the exchange.
        data: the features, with synthetic ones' distributions.
        arguments: from `planner_arguments`.
        mesh: the ranks that repeat the plan.
        sync: keeps replicas equal.
        access: counted rows, for ``hot_rows``.

    Collectives:
        One broadcast of a pickled object from rank 0 of the world.
    """
    plan = plan_on_rank_0(
        lambda: search_as_torchrec(model, sharders, mesh=mesh, sync=sync, **arguments),
        world_group(),
    )
    return pinned(model, plan, pins, data, access)


_DATA_PARALLEL = ShardingType2D.DATA_PARALLEL.base.value


def pinned(
    model: nn.Module,
    plan: Plan2D,
    config: ExchangeConfig,
    data: Dataset,
    access: AccessStats | None = None,
) -> Plan2D:
    """Pin a config's exchange and pipeline in a plan, as far as its sharding types allow."""
    if config.prefetch_rows and config.exchange not in ROW_EXCHANGES:
        raise ConfigError("prefetch_rows is for an exchange of rows; set exchange='row'")
    types = {
        name: base_type(table.sharding_type)
        for _, part in plan.modules()
        for name, table in part.tables()
    }
    fitting = [name for name, kind in types.items() if kind in kinds_of(config.exchange)]
    if config.exchange is not Exchange.POOLED and not fitting:
        raise ConfigError(
            f"exchange={config.exchange.value!r} is for tables sharded "
            f"{', '.join(kinds_of(config.exchange))}, and the plan has none: set sharding_types"
        )
    for name in fitting:
        travels = types[name] != _DATA_PARALLEL
        plan = pin(
            plan,
            name,
            exchange=config.exchange,
            owners=config.owners,
            transport=config.row_transport if travels else None,
        )
    if config.stored_as is not RowStorage.PLAIN:
        whole_rows = [name for name, kind in types.items() if ShardingType(kind) in IN_8_BITS]
        if not whole_rows:
            kinds = ", ".join(kind.value for kind in IN_8_BITS)
            raise ConfigError(
                f"stored_as={config.stored_as.value!r} is for tables sharded {kinds}, and the plan "
                "has none: set sharding_types"
            )
        for name in whole_rows:
            plan = pin(plan, name, stored_as=config.stored_as)
    for table in tables_of(model) if config.hot_rows else ():
        if types.get(table.name, _DATA_PARALLEL) == _DATA_PARALLEL:
            continue  # It isn't sharded, or all its rows are on every rank already.
        hot_rows = _hottest(table, config.hot_rows, data, access)
        plan = pin(plan, table.name, hot_rows=hot_rows)
    pipeline = Pipeline.ROW_PREFETCH if config.prefetch_rows else Pipeline.SPARSE_DIST
    return replace(plan, pipeline=pipeline)


def _hottest(
    table: BaseEmbeddingConfig, num_rows: int, data: Dataset, access: AccessStats | None
) -> list[int]:
    """Return a table's most used rows."""
    if access is not None:
        return access[table.name].rows[:num_rows].tolist()
    rows, lookups = [], []
    for feature in data.features:
        if feature.name in table.feature_names and feature.ids is not None:
            # A row that isn't among a feature's hottest has few lookups of it.
            ranks = np.arange(1, min(num_rows, feature.num_rows) + 1)
            rows.append(feature.ids.row_of_rank(ranks))
            lookups.append(feature.mean_ids * feature.ids.probability(ranks))
    if not rows:
        raise ConfigError(
            f"hot_rows={num_rows} needs to know which rows of table {table.name!r} are used most; "
            "give access statistics"
        )
    used, places = np.unique(np.concatenate(rows), return_inverse=True)
    by_use = np.argsort(-np.bincount(places, np.concatenate(lookups)), kind="stable")
    return used[by_use[:num_rows]].tolist()


_LOG_LENGTH = 1e9
"""Lookups of a log so long that each row's count matches its probability."""


def true_access(data: SyntheticConfig, max_rows: int = 2_000_000) -> AccessStats:
    """Return a synthetic log's access statistics, by its own probabilities."""
    # One feature stands for all equal ones: all their rows would fill the memory.
    alike: dict[tuple[float, ...], TableAccess] = {}
    tables: dict[str, TableAccess] = {}
    for feature in data.features:
        key = feature.num_rows, feature.skew, feature.mean_ids
        if key not in alike:
            alike[key] = _of_feature(data, feature, max_rows)
        tables[table_name(feature.name)] = alike[key]
    return AccessStats(tables)


def _of_feature(data: SyntheticConfig, feature: SparseFeature, max_rows: int) -> TableAccess:
    zipf = data.distribution(feature)
    ranks = np.arange(1, min(feature.num_rows, max_rows) + 1)
    counts = zipf.probability(ranks) * _LOG_LENGTH
    tail_rows = feature.num_rows - len(ranks)
    return TableAccess.of_rows(
        feature.num_rows,
        _LOG_LENGTH / feature.mean_ids,
        zipf.row_of_rank(ranks),
        counts,
        tail_rows=tail_rows,
        tail_lookups=_LOG_LENGTH - float(counts.sum()) if tail_rows else 0.0,
    )


class StockSequenceSharder(EmbeddingCollectionSharder):
    """TorchRec's sharder of sequences, without data-parallel tables on CPU.

    FBGEMM's dense CPU lookup returns bags instead of sequences, and TorchRec's planner chooses it
    for small tables all the same.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the types that work on a device."""
        kinds = super().sharding_types(compute_device_type)
        is_on_cpu = compute_device_type == "cpu"
        return [kind for kind in kinds if not (is_on_cpu and kind == _DATA_PARALLEL)]


def stock_sharders(
    optimizer: OptimizerConfig,
    bags: type[EmbeddingBagCollectionSharder] = EmbeddingBagCollectionSharder,
    **arguments: Any,
) -> list[ModuleSharder[Any]]:
    """Build TorchRec's sharders for bags and sequences, with fused row-wise AdaGrad.

    Args:
        optimizer: the config with the rates.
        bags: the class of the sharder for bags.
        arguments: further arguments of both sharders.
    """
    fused_params: dict[str, Any] = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": optimizer.lr,
        "eps": optimizer.eps,
        # FBGEMM's kernels for GPUs round tables in 16 bits at random by default.
        "stochastic_rounding": False,
    }
    return [
        cast(ModuleSharder[Any], kind(fused_params=dict(fused_params), **arguments))
        for kind in (bags, StockSequenceSharder)
    ]


def table_configs(model: nn.Module) -> dict[str, Any]:
    """Return an unsharded model's table configs by their weights' names in its state dict."""
    tables: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            is_bags = isinstance(module, EmbeddingBagCollection)
            kind = "embedding_bags" if is_bags else "embeddings"
            for config in configs_of(module):
                tables[f"{path}.{kind}.{config.name}.weight".lstrip(".")] = config
    return tables


def draw_sharded_tables_(model: nn.Module, tables: Mapping[str, Any], seed: int) -> None:
    """Draw this rank's parts of a sharded model's tables, in place.

    They equal this package's sharders' draws with the same seed, for any sharding. ``tables``
    are the unsharded model's `table_configs`.
    """
    state = model.state_dict()
    with torch.random.fork_rng(devices=[]):
        for key, config in tables.items():
            for part, row, column in local_shards(state[key]):
                draw_part_(part, config, seed, row, column)


def local_shards(value: Any) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Return a table's parts on this rank, with their first row and column."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            yield shard.tensor, row, column
    elif isinstance(value, DTensor):
        local: Any = value.to_local()
        # A rank without a shard has an offset all the same.
        for shard, (row, column) in zip(local.local_shards(), local.local_offsets(), strict=False):
            yield shard, row, column
    else:
        yield value, 0, 0


def make_pipeline(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> AnyPipeline:
    """Build the plan's pipeline, or TorchRec's for a TorchRec model."""
    if isinstance(model, ModelParallel2D):
        return model.pipeline(optimizer)
    return TrainPipelineSparseDist(model, optimizer, device)
