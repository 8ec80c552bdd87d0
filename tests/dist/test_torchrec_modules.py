"""The guide lists all TorchRec modules, and supported ones equal their unsharded versions."""

import importlib
import inspect
import pkgutil
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec.modules
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import LazyAwaitable
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.debug_embedding_modules import (
    DebugEmbeddingBagCollection,
    DebugEmbeddingCollection,
)
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.feature_processor_ import FeatureProcessor, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_adapter import (
    McEmbeddingBagCollectionAdapter,
    McEmbeddingCollectionAdapter,
)
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import gap_to_unsharded, plain_loop
from tests.support.managed_collisions import sorting_map
from tests.support.models import SEQUENCES, BagModel, ModelSpec, SequenceModel, make_batch, summed
from tests.support.parity import TWO, make_optimizer
from tests.support.ranks import RankPool
from torchrec_2dsp._compat.fbgemm import EmbOptimType
from torchrec_2dsp.plan.fits_module import is_left_whole
from torchrec_2dsp.shard.default_sharders import all_sharders
from torchrec_2dsp.shard.initial_tables import configs_of

BAGS, WEIGHTED = ModelSpec(), ModelSpec(weighted=True)
FEATURES = ("f0", "f1", "f2", "f3")
LR = 0.01
PAGE = Path("docs/guides/torchrec_modules.md")


def test_every_module_is_on_the_page() -> None:
    listed = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    missing = []
    for info in pkgutil.iter_modules(torchrec.modules.__path__):
        module = importlib.import_module(f"torchrec.modules.{info.name}")
        for name, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__ and issubclass(kind, nn.Module):
                missing += [] if name.startswith("_") or name in listed else [name]
    assert not missing


class Scored(nn.Module):
    """Scores ``sparse``'s output: pooled bags, sequences, or a tensor."""

    def __init__(self, sparse: nn.Module, width: int = 0) -> None:
        super().__init__()
        self.sparse = sparse
        self.features = FEATURES if width != 24 else FEATURES[:3]
        self.over = nn.Linear(width or 48, 1)

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        given = self.sparse(batch)
        if not isinstance(given, torch.Tensor):
            given = torch.cat([bags_of(given[name]) for name in self.features], dim=1)
        return self.over(given).squeeze(1)


def bags_of(rows: Any) -> torch.Tensor:
    """Sum a sequence's rows; return bags unchanged."""
    rows = rows.wait() if isinstance(rows, LazyAwaitable) else rows
    return rows if isinstance(rows, torch.Tensor) else summed(rows)


class Interaction(nn.Module):
    """Maps some bags or sequences to four columns."""

    def __init__(self, features: Sequence[str], width: int) -> None:
        super().__init__()
        self.features, self.layer = features, nn.Linear(width, 4)

    def forward(self, rows: Any) -> torch.Tensor:
        return self.layer(torch.cat([bags_of(rows[name]) for name in self.features], dim=1))


def bags() -> Any:
    return BagModel(BAGS).ebc


def sequences() -> Any:
    """Return a collection whose tables have other names than `bags`' tables."""
    renamed = [
        type(table)(f"s_{table.name}", table.num_rows, table.dim, table.features)
        for table in SEQUENCES.tables
    ]
    return SequenceModel(ModelSpec(tuple(renamed), sequence=True)).ec


def bags_tower() -> EmbeddingTower:
    return EmbeddingTower(bags(), Interaction(FEATURES, 48))


def towers() -> nn.Module:
    """Return a bag tower beside a sequence tower, with shared features."""
    of_sequences = EmbeddingTower(sequences(), Interaction(FEATURES[:3], 24))
    return Scored(EmbeddingTowerCollection([bags_tower(), of_sequences]), 8)


def frozen_processors() -> nn.Module:
    processors = PositionWeightedModuleCollection(dict.fromkeys(FEATURES, 4)).requires_grad_(False)
    with torch.no_grad():
        for weights in processors.position_weights.values():
            weights.copy_(torch.linspace(0.5, 2, len(weights)))
    return Scored(FeatureProcessedEmbeddingBagCollection(BagModel(WEIGHTED).ebc, processors))


def debugged_bags() -> nn.Module:
    sparse = DebugEmbeddingBagCollection(
        tables=bags().embedding_bag_configs(), device=torch.device("cpu")
    )
    return Scored(sparse)


def debugged_sequences() -> nn.Module:
    sparse = DebugEmbeddingCollection(
        tables=sequences().embedding_configs(), device=torch.device("cpu")
    )
    return Scored(sparse, 24)


class TwoHolders(nn.Module):
    """A collection held by two modules."""

    def __init__(self) -> None:
        super().__init__()
        ebc = bags()
        self.first, self.second = nn.ModuleDict({"ebc": ebc}), nn.ModuleDict({"ebc": ebc})

    def forward(self, batch: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        first, second = self.first["ebc"](batch), self.second["ebc"](batch)
        return {name: first[name] + 2 * second[name] for name in FEATURES}


class TwoBatches(nn.Module):
    """A collection that looks up two batches in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags()

    def forward(self, batch: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        next_ids = (batch.values() + 1) % 24
        shifted = KeyedJaggedTensor(batch.keys(), next_ids, lengths=batch.lengths())
        here, there = self.ebc(batch), self.ebc(shifted)
        return {name: here[name] - there[name] for name in FEATURES}


class Regrouped(nn.Module):
    """Two collections, regrouped by TorchRec's module."""

    def __init__(self) -> None:
        super().__init__()
        first = [table for table in bags().embedding_bag_configs() if table.name != "t2"]
        second = [table for table in bags().embedding_bag_configs() if table.name == "t2"]
        self.collections = nn.ModuleList(
            torchrec.EmbeddingBagCollection(tables=tables) for tables in (first, second)
        )
        self.regroup = KTRegroupAsDict([["f1", "f3"], ["f0", "f2"]], ["items", "users"])

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        regrouped = self.regroup([collection(batch) for collection in self.collections])
        return torch.cat([regrouped["items"], regrouped["users"].tanh()], dim=1)


class Scripted(nn.Module):
    """Bags under a scripted layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.layer = torch.jit.script(nn.Sequential(nn.Linear(48, 4), nn.Tanh()))

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(batch)
        return self.layer(torch.cat([pooled[name] for name in FEATURES], dim=1))


class BesideQuantized(nn.Module):
    """Bags beside a quantised collection, which isn't trained."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = bags()
        holder = nn.ModuleDict({"ebc": bags()})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.quantized: Any = quantize_embeddings(holder, torch.qint8, inplace=False)
        assert isinstance(self.quantized["ebc"], QuantEmbeddingBagCollection)

    def forward(self, batch: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        pooled, fixed = self.trained(batch), self.quantized["ebc"](batch)
        return {name: pooled[name] + fixed[name] for name in FEATURES}


class MappedByHand(nn.Module):
    """Bags behind id maps that were trained before, and stay fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags()
        configs = self.ebc.embedding_bag_configs()
        id_maps: Any = {config.name: sorting_map(config) for config in configs}
        self.maps = ManagedCollisionCollection(id_maps, configs)
        for step in range(3):
            self.maps(raw_ids(make_batch(BAGS, step)))
        tdsp.leave_whole(self.maps.eval())

    def forward(self, batch: KeyedJaggedTensor) -> Any:
        return self.ebc(self.maps(raw_ids(batch)))


def raw_ids(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return a batch whose ids are far above the row counts."""
    return KeyedJaggedTensor(batch.keys(), 7_919 * batch.values() + 2**40, lengths=batch.lengths())


class Halving(FeatureProcessor):
    """A user's own trained feature processor."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, features: Any) -> Any:
        weights = self.factor * torch.ones_like(features.values(), dtype=torch.float32)
        return JaggedTensor(features.values(), weights, features.lengths())


class BesideProcessed(nn.Module):
    """Sequences beside bags that are trained on each rank, with a user's own processors."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded = sequences()
        processors: Any = {feature: Halving() for feature in FEATURES}
        self.whole = FeatureProcessedEmbeddingBagCollection(BagModel(WEIGHTED).ebc, processors)
        tdsp.leave_whole(self.whole)

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        pooled, rows = self.whole(batch), self.sharded(batch)
        parts = [pooled[name] for name in FEATURES]
        return torch.cat([*parts, *(bags_of(rows[name]) for name in FEATURES[:3])], dim=1)


CASES: dict[str, tuple[Callable[[], nn.Module], ModelSpec]] = {
    "mapped_by_hand": (lambda: Scored(MappedByHand()), BAGS),
    "beside_processed": (lambda: Scored(BesideProcessed(), 72), BAGS),
    "tower": (lambda: Scored(bags_tower(), 4), BAGS),
    "towers": (towers, BAGS),
    "frozen_processors": (frozen_processors, BAGS),
    "debugged_bags": (debugged_bags, BAGS),
    "debugged_sequences": (debugged_sequences, BAGS),
    "prioritized": (lambda: Scored(PECEmbeddingCollection(sequences()), 24), BAGS),
    "two_holders": (lambda: Scored(TwoHolders()), BAGS),
    "two_batches": (lambda: Scored(TwoBatches()), BAGS),
    "regrouped": (lambda: Scored(Regrouped(), 48), BAGS),
    "nested": (lambda: Scored(nn.Sequential(nn.ModuleList([bags()])[0])), BAGS),
    "scripted": (lambda: Scored(Scripted(), 4), BAGS),
    "beside_quantized": (lambda: Scored(BesideQuantized()), BAGS),
}


def sharders() -> list[Any]:
    fused_params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR}
    tables = (
        tdsp.EmbeddingBagCollectionSharder2D(fused_params),
        tdsp.EmbeddingCollectionSharder2D(fused_params),
    )
    return [*tables, tdsp.ManagedCollisionEmbeddingCollectionSharder2D(tables[1])]


@dataclass(frozen=True)
class Way:
    """A way to shard all a model's tables, in exact copies."""

    sharding_type: str
    exchange: str = "pooled"

    def plan(self, model: nn.Module) -> tdsp.Plan2D:
        """Make a plan by TorchRec's planner, which doesn't check models."""
        topology = Topology(world_size=TWO.group_size, compute_device="cpu")
        constraint = ParameterConstraints(sharding_types=[self.sharding_type])
        names = [
            config.name
            for module in model.modules()
            if hasattr(module, "embedding_bag_configs") or hasattr(module, "embedding_configs")
            if not isinstance(module, ManagedCollisionCollection)
            for config in configs_of(module)
        ]
        planner = EmbeddingShardingPlanner(topology, constraints=dict.fromkeys(names, constraint))
        stock = planner.plan(model, sharders())
        whole = [path for path, module in model.named_modules() if is_left_whole(module)]
        for path in [path for path in stock.plan if path.startswith(tuple(whole))]:
            del stock.plan[path]
        plan = tdsp.Plan2D.from_stock(stock, TWO)
        for _, tables in plan.modules():
            for name in tables:
                plan = tdsp.pin(plan, name, exchange=self.exchange)
        return plan


WAYS = (Way("table_wise"), Way("row_wise", "row"))


def largest_loss_gaps(rank: int, world_size: int, case: str) -> list[float]:
    """Return each way's loss gap to the unsharded model on all ranks' batches."""
    return [loss_gap(case, way) for way in WAYS]


def loss_gap(case: str, way: Way) -> float:
    make, spec = CASES[case]
    torch.manual_seed(0)
    alone = make()
    torch.manual_seed(0)
    model = make()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    parallel = tdsp.ModelParallel2D(model, plan=way.plan(model), sharders=sharders())
    parallel.load_state_dict(OrderedDict(weights))
    return gap_to_unsharded(alone, parallel, spec, lr=LR)


@pytest.mark.dealt
@pytest.mark.parametrize("case", CASES)
def test_models_train_as_unsharded_ones(ranks4: RankPool, case: str) -> None:
    for gaps in ranks4.run(largest_loss_gaps, case, timeout_s=60):
        assert max(gaps) < 1e-5, gaps


class RowsOnly(nn.Module):
    """Returns only the first output of a collection behind id maps."""

    def __init__(self, sparse: nn.Module) -> None:
        super().__init__()
        self.sparse = sparse

    def forward(self, batch: KeyedJaggedTensor) -> Any:
        rows, _ = self.sparse(batch)
        return rows


def adapted_losses(rank: int, world_size: int, *, is_bags: bool) -> list[list[float]]:
    """Return the losses behind TorchRec's adapter, and behind the module that it builds."""
    kind = McEmbeddingBagCollectionAdapter if is_bags else McEmbeddingCollectionAdapter
    losses: list[list[float]] = []
    for is_adapted in (True, False):
        adapter: Any = kind(
            configs_of(bags() if is_bags else sequences()),
            input_hash_size=1_000,
            device=torch.device("cpu"),
            world_size=world_size,
            zch_method="sort_zch",
        )
        torch.manual_seed(0)
        (managed,) = adapter.children()
        model = Scored(adapter if is_adapted else RowsOnly(managed), 0 if is_bags else 24)
        seeded = all_sharders(
            tdsp.EmbeddingBagCollectionSharder2D(EmbOptimType.EXACT_SGD, init_seed=3),
            tdsp.EmbeddingCollectionSharder2D(EmbOptimType.EXACT_SGD, init_seed=3),
        )
        topology = Topology(world_size=world_size, compute_device="cpu")
        plan = tdsp.Planner2D(topology, mesh=TWO).collective_plan(model, seeded)
        parallel = tdsp.ModelParallel2D(model, plan=plan, sharders=seeded)
        batches = [make_batch(BAGS, 10 * step + rank) for step in range(4)]
        losses.append(plain_loop(parallel, make_optimizer(parallel, lr=LR), batches))
    return losses


@pytest.mark.parametrize("is_bags", [False, True])
def test_an_adapter_trains_as_the_module_that_it_makes(ranks4: RankPool, is_bags: bool) -> None:
    run = partial(adapted_losses, is_bags=is_bags)
    for adapted, direct in ranks4.run(run, timeout_s=60):
        assert adapted == direct
        assert len(set(adapted)) == 4
