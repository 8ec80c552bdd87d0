"""Position weights work in checkpoints, in pipelines and in models that random cases lack."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.feature_processor_ import FeatureProcessor
from torchrec.modules.fp_embedding_modules import (
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessorDictWrapper,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.batches import make_variable_batch
from tests.support.loops import gap_to_unsharded, shard_tables
from tests.support.models import (
    NUM_POSITIONS,
    BagModel,
    ModelSpec,
    make_batch,
    tables_of,
)
from tests.support.parity import FOUR, LR, ONE, TOLERANCE, TWO, Cell
from tests.support.planning import group_plan_of
from tests.support.ranks import RankPool, error_of
from tests.support.trips import HOT, Trip, check_arrivals, stock
from torchrec_2dsp._compat.fbgemm import EmbOptimType

pytestmark = pytest.mark.dealt_file

COLLECTION = ModelSpec(weighted=True, positions="collection")
MODULES = replace(COLLECTION, positions="modules")
AVERAGES = tdsp.WeightSync(policy=tdsp.every(1))


TRIPS = [
    Trip(Cell(ONE, "table_wise", COLLECTION), Cell(TWO, "row_wise", COLLECTION, exchange="row")),
    Trip(Cell(TWO, "row_wise", MODULES, hot_rows=HOT), Cell(FOUR, "table_wise", MODULES)),
    Trip(Cell(TWO, "table_wise", COLLECTION), stock("table_wise", spec=COLLECTION)),
    Trip(Cell(TWO, exchange="row", spec=MODULES), stock("row_wise", spec=MODULES)),
    Trip(stock("table_wise", spec=MODULES), Cell(FOUR, exchange="row", spec=MODULES)),
    Trip(Cell(TWO, spec=COLLECTION, in_world=("t1",)), Cell(TWO, "table_wise", COLLECTION)),
]


def test_checkpoints(ranks4: RankPool, tmp_path: Path) -> None:
    """Copies are bitwise equal, and TorchRec resumes from a checkpoint."""
    check_arrivals(ranks4, TRIPS, tmp_path)


def gap_of_case(rank: int, world_size: int, case: str) -> float:
    """Train a model from `CASES`; return the largest loss or weight gap to the unsharded one."""
    make, exchange = CASES[case]
    alone, model = make(), make()
    parallel: Any = shard_tables(
        model, ONE, sharders(), dict.fromkeys(TYPES, "row_wise"), dict.fromkeys(TYPES, exchange)
    )
    gap = gap_to_unsharded(alone, parallel, COLLECTION)
    for expected in (alone.state_dict(), make().state_dict()):
        processors = {
            name: value for name, value in parallel.state_dict().items() if "_feat" in name
        }
        for name, value in processors.items():
            gap = max(gap, (value - expected[name]).abs().max().item())
        # What comes from elsewhere is loaded, too.
        own = dict(parallel.state_dict()) | {name: make().state_dict()[name] for name in processors}
        parallel.load_state_dict(own)
    return gap


class TwoBatches(BagModel):
    """Looks up two batches before one backward; the second has other position weights."""

    def joined(self, features: KeyedJaggedTensor) -> torch.Tensor:
        keys = features.keys()
        reverse = features.permute([keys.index(key) for key in reversed(keys)])
        other = KeyedJaggedTensor(keys, reverse.values() % 24, lengths=reverse.lengths())
        return super().joined(features) - 0.5 * super().joined(other)


class Halved(FeatureProcessor):
    """A user's own processor."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        weights = self.factor.expand(features.values().numel())
        return JaggedTensor(features.values(), lengths=features.lengths(), weights=weights)


def model_of(kind: type[BagModel], spec: ModelSpec) -> BagModel:
    torch.manual_seed(0)
    return kind(spec)


def halved(*, trained: bool = False) -> BagModel:
    model = model_of(BagModel, replace(COLLECTION, positions=""))
    processors: Any = {name: Halved().requires_grad_(trained) for name in model.features}
    model.ebc = FeatureProcessedEmbeddingBagCollection(model.ebc, processors)
    return model


def with_frozen_table() -> BagModel:
    model = model_of(BagModel, COLLECTION)
    tables_of(model)["t1"].requires_grad_(False)
    return model


def frozen() -> BagModel:
    model = model_of(BagModel, MODULES)
    model.ebc._feature_processors.requires_grad_(False)
    return model


def wrapped() -> BagModel:
    model = model_of(BagModel, MODULES)
    processors = FeatureProcessorDictWrapper(model.ebc._feature_processors)
    tables = model.ebc._embedding_bag_collection
    model.ebc = FeatureProcessedEmbeddingBagCollection(tables, processors)
    return model


POOLED: dict[str, Any] = {"exchange": "pooled"}
ROW: dict[str, Any] = {"exchange": "row"}
TYPES = ("t0", "t1", "t2")
CASES: dict[str, tuple[Callable[[], BagModel], dict[str, Any]]] = {
    "two batches": (lambda: model_of(TwoBatches, COLLECTION), POOLED),
    "two batches, row exchange": (lambda: model_of(TwoBatches, MODULES), ROW),
    "frozen": (frozen, ROW),
    "wrapped": (wrapped, ROW),
    "frozen, of the user": (halved, POOLED),
}


def sharders() -> list[Any]:
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LR}
    tables = tdsp.EmbeddingBagCollectionSharder2D(params)
    return [tdsp.FeatureProcessedEmbeddingBagCollectionSharder2D(tables)]


@pytest.mark.parametrize("case", CASES)
def test_models(ranks4: RankPool, case: str) -> None:
    assert max(ranks4.run(gap_of_case, case)) < TOLERANCE


def frozen_weights(rank: int, world_size: int) -> list[float]:
    """Return a sharded model's frozen weights, which each rank has drawn by itself."""
    model = frozen()
    for weight in model.ebc._feature_processors.parameters():
        weight.fill_(float(rank + 1))
    plan = group_plan_of(model, ONE, sharders=sharders())
    wrapper = tdsp.LocalDense()
    parallel = tdsp.ModelParallel2D(
        model, plan=plan, sharders=sharders(), data_parallel_wrapper=wrapper
    )
    names = "_feature_processors"
    return [value.sum().item() for name, value in parallel.state_dict().items() if names in name]


def test_the_first_ranks_frozen_weights_count(ranks4: RankPool) -> None:
    for weights in ranks4.run(frozen_weights):
        assert weights == [float(NUM_POSITIONS)] * 4


def refusals(rank: int, world_size: int) -> list[str]:
    """Return the errors for models that can't be trained, and for one rank's bad batch."""
    too_many: Any = model_of(BagModel, COLLECTION)
    weights: Any = too_many.ebc._feature_processors.position_weights
    weights["f0"] = nn.Parameter(torch.empty(2**24, device="meta"))
    unequal: Any = model_of(BagModel, MODULES)
    unequal.ebc._feature_processors["f0"].requires_grad_(rank > 0)

    def sharded(model: BagModel, wrapper: Any = None) -> Any:
        plan = group_plan_of(model_of(BagModel, COLLECTION), ONE, sharders=sharders())
        return tdsp.ModelParallel2D(
            model, plan=plan, sharders=sharders(), data_parallel_wrapper=wrapper
        )

    trained, changed = (sharded(model_of(BagModel, COLLECTION)) for _ in range(2))
    changed.module.ebc._feature_processors.requires_grad_(False)
    without = {name: value for name, value in trained.state_dict().items() if "_feat" not in name}
    long_bag = make_batch(COLLECTION, 0, max_length=4 if rank else NUM_POSITIONS + 5)
    return [
        *(
            error_of(partial(sharded, model))
            for model in (halved(trained=True), with_frozen_table(), too_many, unequal)
        ),
        *(
            error_of(partial(sharded, model_of(BagModel, MODULES), wrapper))
            for wrapper in (tdsp.FullyShardedDense(), tdsp.LocalDense())
        ),
        error_of(lambda: trained(long_bag)),
        error_of(lambda: changed(make_batch(COLLECTION, 0))),
        error_of(lambda: sharded(halved())(make_variable_batch(COLLECTION, 1))),
        error_of(lambda: trained.load_state_dict(without)),
    ]


def test_refusals(ranks4: RankPool) -> None:
    texts = (
        "module 'ebc' trains feature processors that aren't position weights; use",
        "table 't1' of module 'ebc' has requires_grad=False, but trained position weights",
        "module 'ebc' has 16777228 position weights, of which less than 16777216 can be told",
        "the kind of feature processors differs between ranks: rank 0 has [('f0",
        "module 'ebc' trains '_feature_processors.f0.position_weight' beside its tables, which Ful",
        "module 'ebc' trains '_feature_processors.f0.position_weight' beside its tables, which Loc",
        "this rank's batch, but position weights for 6; cut the bag, or give the processor a",
        "requires_grad of a feature processor has changed since the model was sharded; change it",
        "feature processors that aren't position weights know no variable batch sizes; give a",
        'Missing key(s) in state_dict: "_feature_processors.position_weights.f0"',
    )
    for answers in ranks4.run(refusals):
        for text, answer in zip(texts, answers, strict=True):
            assert text in answer, answers


def test_dropped_ids_keep_the_others_places(ranks2: RankPool) -> None:
    for dropped, expected in ranks2.run(with_bad_ids):
        assert dropped == pytest.approx(expected, abs=TOLERANCE)


def with_bad_ids(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Return the scores with a bag's first id dropped, and with its row set to zeros."""
    model = model_of(BagModel, COLLECTION)
    tables = tdsp.EmbeddingBagCollectionSharder2D(EmbOptimType.EXACT_SGD, bad_ids="drop")
    by_drop = [tdsp.FeatureProcessedEmbeddingBagCollectionSharder2D(tables)]
    mesh = tdsp.Mesh2D(1, 2)
    parallel: Any = shard_tables(
        model_of(BagModel, COLLECTION), mesh, by_drop, dict.fromkeys(TYPES, "table_wise")
    )
    lengths = torch.tensor([2, 1, 1, 1])
    ids = torch.tensor([40, 7, 1, 2, 3])
    batch = KeyedJaggedTensor(["f0", "f1", "f2", "f3"], ids, lengths=lengths)
    with torch.no_grad():
        table: Any = tables_of(model)["t0"].weight
        table[0] = 0
    alone = KeyedJaggedTensor(batch.keys(), ids.where(ids < 40, 0), lengths=lengths)
    return parallel(batch).tolist(), model(alone).tolist()
