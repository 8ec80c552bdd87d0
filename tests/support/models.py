"""Small models and batches whose training can be followed number by number."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor


@dataclass(frozen=True)
class TableSpec:
    """A table of a test model."""

    name: str
    num_rows: int
    dim: int
    features: tuple[str, ...]


TABLES = (
    TableSpec("t0", 40, 8, ("f0",)),
    TableSpec("t1", 24, 16, ("f1", "f2")),
    TableSpec("t2", 33, 8, ("f3",)),
)
"""Several dims, several features per table, a row count that no group size divides."""

SEQUENCE_TABLES = (
    TableSpec("t0", 40, 8, ("f0",)),
    TableSpec("t1", 24, 8, ("f1", "f2")),
)


@dataclass(frozen=True)
class ModelSpec:
    """A test model's tables and kind."""

    tables: tuple[TableSpec, ...] = TABLES
    pooling: str = "sum"
    weighted: bool = False
    sequence: bool = False
    leaves_out: bool = False
    """True if each batch's loss leaves out one feature's sequences."""
    data_type: DataType = DataType.FP32
    positions: str = ""
    """Position weights: "collection" for most features, "modules" for each one; none by default."""

    @property
    def features(self) -> list[tuple[str, TableSpec]]:
        """Every feature with its table."""
        return [(feature, table) for table in self.tables for feature in table.features]


MIXED = ModelSpec(
    (
        TableSpec("t0", 9, 4, ("f0", "f1", "f2")),
        TableSpec("t1", 50, 12, ("f3",)),
        TableSpec("t2", 31, 4, ("f4",)),
    )
)
"""Tables of several dimensions, which don't follow one another."""

BAGS = (ModelSpec(), ModelSpec(pooling="mean"), ModelSpec(weighted=True))
SEQUENCES = ModelSpec(SEQUENCE_TABLES, sequence=True)
ONE_TABLE = ModelSpec((TableSpec("t0", 40, 8, ("f0", "f1")),))

HOT_ROWS = (("t0", (0, 1, 5, 39)), ("t1", (0, 2)))
ALL_ROWS = tuple((table.name, tuple(range(table.num_rows))) for table in TABLES)
"""Hot rows: some, and every row."""


class BagModel(nn.Module):
    """Bags, joined by feature name, then one dense layer: `[batch]` scores."""

    def __init__(self, spec: ModelSpec, device: str = "cpu") -> None:
        super().__init__()
        self.features = [feature for feature, _ in spec.features]
        self.ebc: Any = EmbeddingBagCollection(
            device=torch.device(device),
            is_weighted=spec.weighted,
            tables=[
                EmbeddingBagConfig(
                    name=table.name,
                    num_embeddings=table.num_rows,
                    embedding_dim=table.dim,
                    feature_names=list(table.features),
                    pooling=PoolingType(spec.pooling.upper()),
                    data_type=spec.data_type,
                )
                for table in spec.tables
            ],
        )
        if spec.positions:
            self.ebc = FeatureProcessedEmbeddingBagCollection(self.ebc, processors_of(spec))
        self.over = nn.Linear(sum(table.dim for _, table in spec.features), 1)

    def joined(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Concatenate each sample's bags."""
        pooled = self.ebc(features)
        # A sharded collection's output order follows the plan: read it by name.
        return torch.cat([pooled[name] for name in self.features], dim=1).float()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.joined(features)).squeeze(1)


NUM_POSITIONS = 6
"""Position weights of a feature: more than most test batches have ids in a bag."""


def processors_of(spec: ModelSpec) -> Any:
    """Return distinct position weights; in a collection the last feature has none."""
    features = [feature for feature, _ in spec.features]
    if spec.positions == "collection":
        lengths = dict.fromkeys(features[:-1], NUM_POSITIONS)
        processors: Any = PositionWeightedModuleCollection(lengths)
        weights = processors.position_weights.values()
    else:
        processors = {name: PositionWeightedModule(NUM_POSITIONS) for name in features}
        weights = [processor.position_weight for processor in processors.values()]
    with torch.no_grad():
        for weight in weights:
            weight.copy_(0.5 + torch.rand(NUM_POSITIONS))
    return processors


class SequenceModel(nn.Module):
    """Sequences, summed per sample by hand, then one dense layer: `[batch]` scores."""

    def __init__(self, spec: ModelSpec, device: str = "cpu") -> None:
        super().__init__()
        self.features = [feature for feature, _ in spec.features]
        self.leaves_out = spec.leaves_out
        self.ec = EmbeddingCollection(
            device=torch.device(device),
            tables=[
                EmbeddingConfig(
                    name=table.name,
                    num_embeddings=table.num_rows,
                    embedding_dim=table.dim,
                    feature_names=list(table.features),
                    data_type=spec.data_type,
                )
                for table in spec.tables
            ],
        )
        self.over = nn.Linear(sum(table.dim for _, table in spec.features), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        sequences = self.ec(features)
        parts = [summed(sequences[name]) for name in self.features]
        if self.leaves_out:
            place = int(features.values().sum()) % len(parts)
            parts[place] = torch.zeros_like(parts[place])
        return self.over(torch.cat(parts, dim=1)).squeeze(1)


def summed(sequences: JaggedTensor) -> torch.Tensor:
    """Sum each sample's vectors."""
    lengths, values = sequences.lengths(), sequences.values()
    sample = torch.arange(lengths.numel(), device=lengths.device).repeat_interleave(lengths)
    total = values.new_zeros(lengths.numel(), values.shape[1])
    return total.index_add(0, sample, values.tanh())


Model = BagModel | SequenceModel


def build(spec: ModelSpec, seed: int = 0, device: str = "cpu") -> Model:
    """Build the model of ``spec``, with the same weights for the same seed."""
    torch.manual_seed(seed)
    return (SequenceModel if spec.sequence else BagModel)(spec, device)


def tables_of(model: nn.Module) -> nn.ModuleDict:
    """Return an unsharded or sharded model's embedding modules, by table."""
    if hasattr(model, "ebc"):
        ebc: Any = model.ebc
        return getattr(ebc, "_embedding_bag_collection", ebc).embedding_bags
    return model.ec.embeddings  # type: ignore[union-attr]


def make_batch(
    spec: ModelSpec, seed: int, batch_size: int = 6, max_length: int = 4
) -> KeyedJaggedTensor:
    """Draw a batch with skewed ids, empty bags and duplicate ids inside bags."""
    generator = torch.Generator().manual_seed(seed)
    keys = [feature for feature, _ in spec.features]
    lengths = torch.randint(0, max_length + 1, (len(keys) * batch_size,), generator=generator)
    values = []
    for index, (_, table) in enumerate(spec.features):
        count = int(lengths[index * batch_size : (index + 1) * batch_size].sum())
        skew = 1.0 / torch.arange(1, table.num_rows + 1).float()
        values.append(torch.multinomial(skew, max(count, 1), True, generator=generator)[:count])
    ids = torch.cat(values)
    weights = torch.rand(ids.numel(), generator=generator) if spec.weighted else None
    return KeyedJaggedTensor(keys=keys, values=ids, lengths=lengths, weights=weights)
