"""A model behind id maps, its twin on all ranks' batches, and batches whose ids drift."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
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
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.support.cells import Cell
from tests.support.hash_zch import OneThreadHashZch, at_hour
from tests.support.models import BagModel, ModelSpec, SequenceModel, TableSpec, summed
from tests.support.oracle import local_loss, row_wise_adagrad_, sgd_
from tests.support.parity import LR
from torchrec_2dsp.shard.initial_tables import configs_of, drawn_rows

TABLES = (TableSpec("t0", 12, 8, ("f0",)), TableSpec("t1", 17, 8, ("f1", "f2")))
"""Fewer rows than a few batches have ids."""
BAGS, SEQUENCES = ModelSpec(TABLES), ModelSpec(TABLES, sequence=True)
FAR = 2**40 + 1
"""The distance between two raw ids."""
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
"""The policies of maps that hash ids, and their options."""


def hashed_map(policy: str, config: Any, kind: Any = HashZchManagedCollisionModule) -> Any:
    """Return a map that hashes ids, which live for no further hour, or 0, 1, ... by feature."""
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


def hour_of(num_batches: int) -> int:
    """Return the time at which a batch is seen, after so many others."""
    return 1_000 + num_batches


def halved(ids: torch.Tensor, size: int) -> torch.Tensor:
    """Hash ids, some of which collide."""
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
    """Return a collection behind an id map for each table, made from its config."""
    is_bags, configs = isinstance(collection, EmbeddingBagCollection), configs_of(collection)
    kinds = (ManagedCollisionEmbeddingCollection, ManagedCollisionEmbeddingBagCollection)
    maps: Any = {config.name: id_map(config) for config in configs}
    return kinds[is_bags](collection, ManagedCollisionCollection(maps, configs), **options)


class Head(nn.Module):
    """Scores of bags, or of sequences that are summed by hand. Pipelines don't trace it."""

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
    """Bags or sequences behind id maps, and one dense layer: a loss, and scores."""

    def __init__(self, case: Case, kind: Any = HashZchManagedCollisionModule) -> None:
        super().__init__()
        torch.manual_seed(0)
        spec = case.cell.spec
        collection: Any = SequenceModel(spec).ec if spec.sequence else BagModel(spec).ebc

        def id_map(config: Any) -> ManagedCollisionModule:
            if case.policy in HASHED:
                return hashed_map(case.policy, config, kind)
            return MCHManagedCollisionModule(
                zch_size=config.num_embeddings,
                device=torch.device("cpu"),
                eviction_policy=POLICIES[case.policy](),
                eviction_interval=case.interval,
                input_hash_size=1_000,
                input_hash_func=halved if case.hashed else None,
            )

        self.mc = behind_maps(collection, id_map, return_remapped_features=True)
        self.head = Head(spec)
        self.remapped: Any = None

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, self.remapped = self.mc(features)
        scores = self.head(rows)
        return local_loss(scores), scores.detach()


def batch_of(case: Case, step: int, rank: int, size: int = 4) -> KeyedJaggedTensor:
    """Draw a batch whose ids drift, some of them often, so that rows are evicted."""
    generator = torch.Generator().manual_seed(100 * step + rank + 1)
    keys = [feature for feature, _ in case.cell.spec.features]
    longest = 0 if rank in case.empty_on else 3
    lengths = torch.randint(0, longest + 1, (len(keys) * size,), generator=generator)
    num_ids = int(lengths.sum())
    new = torch.randint(3 * step, 3 * step + 12, (num_ids,), generator=generator)
    often = torch.randint(0, 4, (num_ids,), generator=generator)
    ids = torch.where(torch.rand(num_ids, generator=generator) < 0.4, often, new)
    return KeyedJaggedTensor(keys=keys, values=ids * FAR, lengths=lengths)


def together(batches: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Join batches sample by sample, those of rank 0 first."""
    keys = batches[0].keys()
    by_key = [[batch[key] for batch in batches] for key in keys]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([jagged.values() for parts in by_key for jagged in parts]),
        lengths=torch.cat([jagged.lengths() for parts in by_key for jagged in parts]),
    )


@dataclass
class Twin:
    """TorchRec's unsharded module, which resets evicted rows by hand, on all ranks' batches."""

    case: Case
    model: Any = None
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    num_evicted: int = 0
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.model = ManagedModel(self.case, OneThreadHashZch)
        self.moments = {name: torch.zeros(table.shape[0]) for name, table in self.tables().items()}

    def tables(self) -> dict[str, nn.Parameter]:
        collection = self.model.mc._embedding_module
        is_sequence = self.case.cell.spec.sequence
        tables = collection.embeddings if is_sequence else collection.embedding_bags
        return {name: table.weight for name, table in tables.items()}

    def batches(self, step: int) -> list[KeyedJaggedTensor]:
        """Return all ranks' batches."""
        return [batch_of(self.case, step, rank) for rank in range(self.case.cell.mesh.world_size)]

    def step(self, step: int) -> list[float]:
        """Train on a step's batches; return each rank's loss."""
        self.model.zero_grad()
        sizes = [batch.stride() for batch in self.batches(step)]
        scores = self.model.head(self.model.mc._embedding_module(self.see(step)))
        losses = [local_loss(part) for part in scores.split(sizes)]
        torch.stack(losses).mean().backward()
        with torch.no_grad():
            for param in self.model.head.parameters():
                param -= LR * param.grad
            for name, table in self.tables().items():
                self.update(name, table)
        return [loss.item() for loss in losses]

    def see(self, step: int) -> KeyedJaggedTensor:
        """Let the maps see a step's batches, reset what they evict, and return the row ids."""
        maps = self.model.mc._managed_collision_collection
        with at_hour(hour_of(self.num_steps)):
            features = maps(together(self.batches(step)))
        self.num_steps += 1
        for name, rows in maps.evict().items():
            if rows is not None and self.case.resets:
                self.reset(name, rows, maps)
        return features

    @torch.no_grad()
    def reset(self, name: str, rows: torch.Tensor, maps: Any) -> None:
        (config,) = (config for config in maps.embedding_configs() if config.name == name)
        self.num_evicted += rows.numel()
        self.tables()[name][rows] = drawn_rows(config, 0, self.num_steps, rows.numel())
        self.moments[name][rows] = 0

    def update(self, name: str, table: nn.Parameter) -> None:
        assert table.grad is not None
        if self.case.cell.optimizer == "sgd":
            sgd_(table, table.grad, lr=LR)
        else:
            moment, eps = self.moments[name], self.case.cell.eps
            row_wise_adagrad_(table, table.grad, moment, lr=LR, eps=eps)
