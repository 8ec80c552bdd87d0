"""A model behind id maps, sharded and unsharded, on batches with drifting ids."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
    average_threshold_filter,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.batches import first_bags, written_out
from tests.support.hash_zch import OneThreadHashZch, at_hour, set_clock
from tests.support.loops import drain, plain_loop
from tests.support.models import BagModel, ModelSpec, SequenceModel, TableSpec, summed
from tests.support.oracle import Oracle, local_loss
from tests.support.parity import (
    LR,
    Cell,
    column_blocks,
    expected_moment,
    group_plan,
    local_shards,
    make_optimizer,
    make_sharder,
    relative_gap,
    shards_of,
)
from torchrec_2dsp.shard.initial_tables import configs_of, drawn_rows
from torchrec_2dsp.shard.managed_collisions import managed_collisions
from torchrec_2dsp.shard.parted import sharded_tables

TABLES = (TableSpec("t0", 12, 8, ("f0",)), TableSpec("t1", 17, 8, ("f1", "f2")))
"""Fewer rows than a few batches have ids."""
BAGS, SEQUENCES = ModelSpec(TABLES), ModelSpec(TABLES, sequence=True)
FAR = 2**40 + 1
"""The distance between two raw ids."""
HotIds = tuple[tuple[str, tuple[int, ...]], ...]
"""Raw ids to make hot, by table."""
HOT_IDS: HotIds = tuple(
    (table, tuple(FAR * number for number in numbers))
    for table, numbers in (("t0", (0, 3, 6, 11, 14)), ("t1", (1, 2, 8, 13, 900)))
)
"""The last id never occurs."""
LATER_HOT_IDS: HotIds = tuple((table, tuple(id_ + FAR for id_ in ids)) for table, ids in HOT_IDS)
"""Other hot ids, for a refresh."""
STEPS = 7
TOLERANCE = 2e-6
"""A few float32 rounding errors, through seven steps."""
POLICIES = {
    "lfu": LFU_EvictionPolicy,
    "lru": LRU_EvictionPolicy,
    "distance": lambda: DistanceLFU_EvictionPolicy(
        decay_exponent=0.5, threshold_filtering_func=average_threshold_filter
    ),
}
_EVICTS = HashZchEvictionPolicyName
HASHED: dict[str, tuple[HashZchEvictionPolicyName | None, dict[str, Any]]] = {
    "hash": (None, {}),
    "hash ttl": (_EVICTS.SINGLE_TTL_EVICTION, {}),
    "hash ttls": (_EVICTS.PER_FEATURE_TTL_EVICTION, {}),
    "hash lru": (_EVICTS.LRU_EVICTION, {}),
    "hash reserved": (
        _EVICTS.SINGLE_TTL_EVICTION,
        {"opt_in_prob": 100, "percent_reserved_slots": 20},
    ),
}
"""Eviction policies for maps that hash ids, with their options."""


def hashed_map(policy: str, config: Any, kind: Any = HashZchManagedCollisionModule) -> Any:
    """Return a map that hashes ids; they live for 0 more hours, or 0, 1, ... by feature."""
    chosen, options = HASHED[policy]
    hours = list(range(len(config.feature_names)))
    return kind(
        zch_size=config.num_embeddings,
        device=torch.device("cpu"),
        total_num_buckets=1 + (config.num_embeddings % 2 == 0),
        max_probe=5,
        eviction_policy_name=chosen,
        eviction_config=HashZchEvictionConfig(
            features=config.feature_names, single_ttl=0, per_feature_ttl=hours
        ),
        **options,
    )


def sorting_map(
    config: Any, policy: str = "lfu", interval: int = 1, **options: Any
) -> MCHManagedCollisionModule:
    """Return a map that sorts ids, and evicts by a policy every ``interval`` batches."""
    return MCHManagedCollisionModule(
        zch_size=config.num_embeddings,
        device=torch.device("cpu"),
        eviction_policy=POLICIES[policy](),
        eviction_interval=interval,
        **options,
    )


def hour_of(num_batches: int) -> int:
    """Return the hour at which a batch is seen after ``num_batches`` others."""
    return 1_000 + num_batches


def halved(ids: torch.Tensor, size: int) -> torch.Tensor:
    """Hash ids so that some collide."""
    return (ids // FAR * 3 // 2) % size


@dataclass(frozen=True)
class Case:
    """A way to shard and train a model with managed collisions."""

    cell: Cell
    policy: str = "lfu"
    interval: int = 1
    loop: str = "plain"
    hashed: bool = False
    resets: bool = True
    empty_on: tuple[int, ...] = ()
    """The ranks whose batches have no ids."""

    def __str__(self) -> str:
        kept = "" if self.resets else " kept"
        return f"{self.cell} {self.policy} {self.interval} {self.loop}{kept}"


def behind_maps(
    collection: Any, id_map: Callable[[Any], ManagedCollisionModule], **options: Any
) -> Any:
    """Wrap a collection in id maps, each built from its table's config."""
    is_bags, configs = isinstance(collection, EmbeddingBagCollection), configs_of(collection)
    kinds = (ManagedCollisionEmbeddingCollection, ManagedCollisionEmbeddingBagCollection)
    maps: Any = {config.name: id_map(config) for config in configs}
    return kinds[is_bags](collection, ManagedCollisionCollection(maps, configs), **options)


class Head(nn.Module):
    """Scores bags, or sequences summed by hand. Pipelines don't trace it."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.features = [feature for feature, _ in spec.features]
        self.is_sequence = spec.sequence
        self.over = nn.Linear(sum(table.dim for _, table in spec.features), 1)

    def forward(self, rows: Any) -> torch.Tensor:
        return self.over(torch.cat([self.bags(rows[f]) for f in self.features], 1)).squeeze(1)

    def bags(self, rows: Any) -> torch.Tensor:
        return summed(rows) if self.is_sequence else rows


class ManagedModel(nn.Module):
    """Bags or sequences behind id maps, and one dense layer; returns the loss and scores."""

    def __init__(self, case: Case, kind: Any = HashZchManagedCollisionModule) -> None:
        super().__init__()
        torch.manual_seed(0)
        spec = case.cell.spec
        collection: Any = SequenceModel(spec).ec if spec.sequence else BagModel(spec).ebc

        def id_map(config: Any) -> ManagedCollisionModule:
            if case.policy in HASHED:
                return hashed_map(case.policy, config, kind)
            hash_func = halved if case.hashed else None
            options = {"input_hash_size": 1_000, "input_hash_func": hash_func}
            return sorting_map(config, case.policy, case.interval, **options)

        self.mc = behind_maps(collection, id_map, return_remapped_features=True)
        self.head = Head(spec)
        self.remapped: Any = None

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, self.remapped = self.mc(features)
        scores = self.head(rows)
        return local_loss(scores), scores.detach()


class StayingBatch(KeyedJaggedTensor):
    """A batch that returns itself when moved to its own device, as tensors do."""

    def to(self, device: torch.device, *args: Any, **kwargs: Any) -> KeyedJaggedTensor:
        return self if self.device() == device else super().to(device, *args, **kwargs)


def batch_of(case: Case, step: int, rank: int, size: int = 4) -> KeyedJaggedTensor:
    """Draw a batch of drifting and some frequent ids, so that rows are evicted."""
    generator = torch.Generator().manual_seed(100 * step + rank + 1)
    keys = [feature for feature, _ in case.cell.spec.features]
    longest = 0 if rank in case.empty_on else 3
    lengths = torch.randint(0, longest + 1, (len(keys) * size,), generator=generator)
    num_ids = int(lengths.sum())
    new = torch.randint(3 * step, 3 * step + 12, (num_ids,), generator=generator)
    often = torch.randint(0, 4, (num_ids,), generator=generator)
    ids = torch.where(torch.rand(num_ids, generator=generator) < 0.4, often, new)
    batch = StayingBatch(keys=keys, values=ids * FAR, lengths=lengths)
    if not case.cell.variable:
        return batch
    sizes = [size - n for n in range(len(keys))]
    bags = [torch.arange(size) % num_bags for num_bags in sizes]
    return first_bags(batch, sizes, dict(zip(keys, bags, strict=True)))


def together(batches: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Join batches by samples, rank 0's first."""
    keys = batches[0].keys()
    by_key = [[batch[key] for batch in batches] for key in keys]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([jagged.values() for parts in by_key for jagged in parts]),
        lengths=torch.cat([jagged.lengths() for parts in by_key for jagged in parts]),
    )


@dataclass
class Twin:
    """TorchRec's unsharded module on all ranks' batches, with evicted rows reset by hand."""

    case: Case
    model: Any = None
    oracle: Any = None
    """Updates the model."""
    num_evicted: int = 0
    num_steps: int = 0
    hot_rows: dict[tuple[str, int], int] = field(default_factory=dict)
    """The rows that hot ids have now."""
    num_cooled: int = 0
    """The times that a hot id has lost its row."""
    num_back: int = 0
    """The times that it has got one again."""

    def __post_init__(self) -> None:
        self.model, cell = ManagedModel(self.case, OneThreadHashZch), self.case.cell
        name = "ec" if cell.spec.sequence else "ebc"
        parts = {name: self.model.mc._embedding_module, "over": self.model.head.over}
        self.oracle = Oracle(
            cell.spec,
            optimizer=cell.optimizer,
            lr=LR,
            eps=cell.eps,
            column_blocks={table.name: column_blocks(cell, table.dim) for table in TABLES},
            model=cast(Any, nn.ModuleDict(parts)),
        )
        self._hot_ids: HotIds = cell.hot_rows
        self._lost: set[tuple[str, int]] = set()

    def tables(self) -> dict[str, nn.Parameter]:
        collection = self.model.mc._embedding_module
        is_sequence = self.case.cell.spec.sequence
        tables = collection.embeddings if is_sequence else collection.embedding_bags
        return {name: table.weight for name, table in tables.items()}

    def batches(self, step: int) -> list[KeyedJaggedTensor]:
        """Return all ranks' batches, with one bag per sample."""
        ranks = range(self.case.cell.mesh.world_size)
        return [written_out(batch_of(self.case, step, rank)) for rank in ranks]

    def step(self, step: int, features: KeyedJaggedTensor | None = None) -> list[float]:
        """Train on a step's batches, or on row ids if maps have seen them; return the losses."""
        return self.step_twice([step], features)

    def step_twice(
        self, numbers: Sequence[int], features: KeyedJaggedTensor | None = None
    ) -> list[float]:
        """Train on the batches with these numbers, looked up one after the other in one forward."""
        self.model.zero_grad()
        seen, losses = [], torch.zeros(self.case.cell.mesh.world_size)
        for number in numbers:
            sizes = [batch.stride() for batch in self.batches(number)]
            seen.append(self.see(number) if features is None else features)
            scores = self.model.head(self.model.mc._embedding_module(seen[-1]))
            losses = losses + torch.stack([local_loss(part) for part in scores.split(sizes)])
        losses.mean().backward()
        self.oracle.apply_(seen)
        return losses.tolist()

    def see(self, step: int) -> KeyedJaggedTensor:
        """Let the maps see a step's batches, reset what they evict, and return the row ids."""
        maps = self.model.mc._managed_collision_collection
        with at_hour(hour_of(self.num_steps)):
            features = maps(together(self.batches(step)))
        self.num_steps += 1
        for name, rows in maps.evict().items():
            if rows is not None and self.case.resets:
                self.reset(name, rows, maps)
        self._follow_hot_ids()
        return features

    def name_hot_ids(self, hot_ids: HotIds) -> None:
        """Make these ids hot from the next step on."""
        self._hot_ids = hot_ids

    def _follow_hot_ids(self) -> None:
        before, self.hot_rows = self.hot_rows, dict(self._rows_of_hot_ids())
        lost = before.keys() - self.hot_rows.keys()
        self.num_cooled += len(lost)
        self.num_back += len(self._lost & self.hot_rows.keys())
        self._lost = (self._lost | lost) - self.hot_rows.keys()

    def _rows_of_hot_ids(self) -> Iterator[tuple[tuple[str, int], int]]:
        maps = self.model.mc._managed_collision_collection._managed_collision_modules
        for table, raw_ids in self._hot_ids:
            id_map = maps[table]
            if self.case.policy in HASHED:
                slots = enumerate(id_map._hash_zch_identities[:, 0].tolist())
                yield from (((table, id_), row) for row, id_ in slots if id_ in raw_ids)
                continue
            ids = JaggedTensor(torch.tensor(raw_ids), lengths=torch.tensor([len(raw_ids)]))
            rows = id_map.remap(id_map.preprocess({table: ids}))[table].values().tolist()
            for raw_id, row in zip(raw_ids, rows, strict=True):
                # The last row is for ids without a row.
                if row < id_map.output_size() - 1:
                    yield (table, raw_id), row

    @torch.no_grad()
    def reset(self, name: str, rows: torch.Tensor, maps: Any) -> None:
        (config,) = (config for config in maps.embedding_configs() if config.name == name)
        self.num_evicted += rows.numel()
        self.tables()[name][rows] = drawn_rows(config, 0, self.num_steps, rows.numel())
        self.oracle.moments[name][rows] = 0
        self.oracle.averages[name][rows] = 0


def sharder_of(case: Case) -> Any:
    """Return a case's sharder."""
    tables = make_sharder(case.cell)
    kind: Any = (
        tdsp.ManagedCollisionEmbeddingCollectionSharder2D
        if case.cell.spec.sequence
        else tdsp.ManagedCollisionEmbeddingBagCollectionSharder2D
    )
    return kind(tables, reset_evicted_rows=case.resets)


def plan_of(case: Case, sharder: Any) -> tdsp.Plan2D:
    """Plan the tables as if there were no id maps, which TorchRec's planner would split."""
    tables = nn.ModuleDict({"mc": ManagedModel(Case(case.cell)).mc._embedding_module})
    return group_plan(case.cell, tables, sharder.tables)


def sharded(case: Case, kind: type[ManagedModel] = ManagedModel) -> tdsp.ModelParallel2D:
    """Shard the model with seed 0."""
    model, sharder = kind(case), sharder_of(case)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    plan = plan_of(case, sharder)
    # TorchRec's own wrapper trains the same.
    wrapper: Any = DistributedModelParallel if case.cell.stock_wrapper else tdsp.ModelParallel2D
    parallel = wrapper(module=model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    parallel.load_state_dict(weights)  # type: ignore[arg-type]
    set_clock_by_batches(parallel)
    return parallel


def set_clock_by_batches(parallel: nn.Module) -> None:
    """Advance the clock by an hour per batch; at times all clocks but the first rank's are fast."""
    (shards,) = managed_collisions(parallel)
    (id_map, *_) = shards._maps.values()
    fast = 100 * dist.get_rank()
    set_clock(lambda: hour_of(id_map.batches_seen) + fast * (id_map.batches_seen % 2))


def train(case: Case, parallel: tdsp.ModelParallel2D, rank: int, steps: range) -> list[float]:
    """Train these steps by the case's loop; return each step's loss."""
    optimizer = make_optimizer(parallel)
    batches = [batch_of(case, step, rank) for step in steps]
    if case.loop == "plain":
        return plain_loop(parallel, optimizer, batches)
    kinds: dict[str, Any] = {
        "sparse dist": TrainPipelineSparseDist,
        "prefetch": tdsp.TrainPipelineRowPrefetch,
    }
    pipeline = kinds[case.loop](parallel, optimizer, torch.device("cpu"))
    return [local_loss(scores).item() for scores in drain(pipeline, batches)]


def train_beside_twin(
    rank: int, world_size: int, case: Case
) -> tuple[float, float, tuple[int, ...], list[bytes]]:
    """Train beside the twin; return the loss and state gaps.

    Also return counts (evicted rows, hot ids that lost or regained rows), and hot rows' bits.
    """
    twin, parallel = Twin(case), sharded(case)
    losses = train(case, parallel, rank, range(STEPS))
    gap = relative_gap(losses, [twin.step(step)[rank] for step in range(STEPS)])
    counts = twin.num_evicted, twin.num_cooled, twin.num_back
    bits = replicas_of(parallel, twin) if case.cell.hot_rows else []
    return gap, state_gap(parallel, twin), counts, bits


def replicas_of(parallel: tdsp.ModelParallel2D, twin: Twin) -> list[bytes]:
    """Return this rank's hot rows as bytes; check that they are the hot ids' rows."""
    bits = []
    for part in sharded_tables(parallel):
        if part.hot_rows is None:
            continue
        for table, held in part.hot_sets.held.by_table.items():
            rows = {row for (of_table, _), row in twin.hot_rows.items() if of_table == table}
            assert held.tolist() == sorted(rows)
            for shard, slots, _ in part.hot_rows.replicas({table: held}):
                bits += [tensor[slots].numpy().tobytes() for tensor in shard.tensors.values()]
    return bits


def state_gap(parallel: tdsp.ModelParallel2D, twin: Twin) -> float:
    """Check that maps are equal; return the largest weight or moment gap."""
    expected, gap = twin.model.state_dict(), 0.0
    state = parallel.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        if "_managed_collision_modules" in name:
            assert torch.equal(value, expected[name]), name
            continue
        for part, (row, column) in local_shards(value):
            wanted = expected[name]
            if wanted.dim() == 2:
                wanted = wanted[row : row + part.shape[0], column : column + part.shape[1]]
            gap = max(gap, largest_gap(part, wanted))
    for shard in shards_of(parallel):
        for name, moment in shard.tensors.items():
            if name != "weight":
                wanted = expected_moment(twin.oracle, name, shard, moment)
                gap = max(gap, largest_gap(moment, wanted))
    return gap


def largest_gap(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference between two elements."""
    return (actual - expected).abs().max().item() if actual.numel() else 0.0
