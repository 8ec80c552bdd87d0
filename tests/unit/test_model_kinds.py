"""Every model kind is built from its section, the same on all ranks; so are users' models."""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torchrec.distributed.planner.types import Topology
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

import torchrec_2dsp as tdsp
from tests.support.planning import SHARDERS
from torchrec_2dsp.dense.thresholded import Thresholded
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.planner.torchrec.enumerator import search_as_torchrec
from torchrec_2dsp.programs.config.sections import (
    ExchangeConfig,
    ModelConfig,
    OptimizerConfig,
    SplitConfig,
)
from torchrec_2dsp.programs.data.dataset import DatasetFeature, Split
from torchrec_2dsp.programs.data.negatives import WithNegatives
from torchrec_2dsp.programs.data.synthetic import SparseFeature, SyntheticConfig, make_batch
from torchrec_2dsp.programs.data.synthetic_sequences import SyntheticSequencesConfig
from torchrec_2dsp.programs.models.kinds import (
    ModelSection,
    build_any_model,
    dataset_for,
    has_clicks,
    ranking_of,
)
from torchrec_2dsp.programs.models.model import build_model, split_
from torchrec_2dsp.programs.models.optimizer import plain_dense_optimizer
from torchrec_2dsp.programs.models.own_model import OwnModelConfig
from torchrec_2dsp.programs.models.planned import StockSequenceSharder, pinned, planner_arguments
from torchrec_2dsp.programs.models.sequence import NextItemModel, SequenceModelConfig
from torchrec_2dsp.programs.models.two_tower import TwoTowerConfig, TwoTowerModel

DATA = SyntheticConfig(
    num_dense=3,
    features=(SparseFeature(name="user", num_rows=20), SparseFeature(name="item", num_rows=30)),
)
CLICKS = DATA.dataset()
NO_MODEL = "a text"


class SharedTable(nn.Module):
    """A model whose only table has two features, and isn't named after either."""

    def __init__(self) -> None:
        super().__init__()
        features = ["user", "item"]
        table = EmbeddingBagConfig(32, 8, name="both", feature_names=features)
        self.bags = EmbeddingBagCollection(device=torch.device("meta"), tables=[table])


def planned_table(types: list[str], **exchange: Any) -> tdsp.ParameterSharding2D:
    """Plan the shared table with sharding types, pin an exchange, and return its sharding."""
    model, topology = SharedTable(), Topology(world_size=2, compute_device="cpu")
    arguments = planner_arguments(model, CLICKS, types, topology, 8)
    mesh, sync = tdsp.Mesh2D(1, 2), tdsp.GradientSync()
    plan = search_as_torchrec(model, SHARDERS, mesh=mesh, sync=sync, **arguments)
    plan = pinned(model, plan, ExchangeConfig(**exchange), CLICKS)
    ((_, table),) = next(part for _, part in plan.modules()).tables()
    return table


def test_an_own_models_tables_are_planned_by_their_names() -> None:
    for kind in ("row_wise", "table_wise"):
        table = planned_table([kind], hot_rows=3)
        assert table.sharding_type == f"2d_{kind}"
        lookups: defaultdict[int, float] = defaultdict(float)
        for feature in DATA.features:
            zipf, ranks = DATA.distribution(feature), np.arange(1, feature.num_rows + 1)
            shares = zipf.probability(ranks).tolist()
            for row, share in zip(zipf.row_of_rank(ranks).tolist(), shares, strict=True):
                lookups[row] += share
        assert table.hot_set is not None
        by_use = sorted(lookups, key=lambda row: -lookups[row])
        assert table.hot_set.row_ids == tuple(sorted(by_use[:3]))


def test_rows_in_8_bits_need_a_type_that_fits() -> None:
    assert planned_table(["row_wise"], stored_as="int8").stored_as.value == "int8"
    with pytest.raises(ConfigError, match=r"stored_as='int8' is for tables sharded table_wise, ro"):
        planned_table(["data_parallel"], stored_as="int8")


def test_stock_sequences_have_no_data_parallel_tables_on_cpu() -> None:
    assert "data_parallel" not in StockSequenceSharder().sharding_types("cpu")
    assert "data_parallel" in StockSequenceSharder().sharding_types("cuda")


class OwnModel(nn.Module):
    """A linear layer as wide as the options say."""

    def __init__(self, num_features: int, num_dense: int, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(num_features + num_dense, width)


def make_model(
    features: Sequence[DatasetFeature], num_dense: int, options: Mapping[str, Any]
) -> nn.Module:
    return OwnModel(len(features), num_dense, options["width"])


def make_nothing(features: Any, num_dense: int, options: Any) -> str:
    return NO_MODEL


def make_of_two(features: Any, num_dense: int) -> nn.Module:
    return nn.Identity()


DCN = ModelConfig(kind="dcn", dim=8, dcn_layers=2, dcn_low_rank=5)
OWN = OwnModelConfig(factory=f"{__name__}:make_model", options={"width": 7})
KINDS: dict[str, tuple[ModelSection, type[nn.Module], bool]] = {
    "dlrm": (ModelConfig(), DLRMTrain, False),
    "dcn": (DCN, DLRMTrain, False),
    "sequence": (SequenceModelConfig(dim=8), NextItemModel, True),
    "two towers": (
        TwoTowerConfig(user_features=("user",), item_features=("item",)),
        TwoTowerModel,
        False,
    ),
    "own": (OWN, OwnModel, False),
}


@pytest.mark.parametrize("name", KINDS)
def test_equal_configs_give_equal_weights(name: str) -> None:
    section, kind, has_places = KINDS[name]
    before = torch.random.get_rng_state()
    first, second = (build_any_model(CLICKS, section) for _ in range(2))
    assert type(first) is kind
    weights, again = first.state_dict(), second.state_dict()
    assert weights
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    other = build_any_model(CLICKS, section.model_copy(update={"seed": 1})).state_dict()
    assert not any(
        torch.equal(weights[key], other[key])
        for key in weights
        if "weight" in key and "norm" not in key and "layers.3" not in key
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert has_clicks(section) != has_places
    assert (ranking_of(section).among == "all") == has_places


@pytest.mark.parametrize("name", ["dcn", "sequence", "two towers"])
def test_dense_weights_are_equal_wherever_tables_are(name: str) -> None:
    section = KINDS[name][0]
    weights = build_any_model(CLICKS, section).state_dict()
    without = build_any_model(CLICKS, section, tables_device="meta").state_dict()
    dense = [key for key in weights if "embedding" not in key]
    assert len(dense) > 6
    assert all(torch.equal(weights[key], without[key]) for key in dense)
    assert [key for key in weights if without[key].is_meta] == [
        key for key in weights if key not in dense
    ]


def test_only_sequences_need_negatives() -> None:
    data = SyntheticSequencesConfig(num_items=50).dataset()
    for section in (ModelConfig(), OWN):
        assert dataset_for(section, data) is data
    for options, held_out in (({}, 6), ({"eval_negatives": 9}, 9)):
        section = SequenceModelConfig.model_validate({"num_negatives": 6} | options)
        fitting = dataset_for(section, data)
        assert isinstance(fitting, WithNegatives)
        for split, count in ((Split.TRAIN, 6), (Split.EVAL, held_out)):
            batch = next(fitting.batches(split, global_batch_size=2, rank=0, world_size=1))
            assert batch.sparse_features["item_negatives"].lengths().tolist() == [count] * 2


def test_places_are_scores_of_a_softmax_in_the_batch() -> None:
    section = TwoTowerConfig(user_features=("user",), item_features=("item",), loss="in_batch")
    assert not has_clicks(section)
    assert ranking_of(section).among == "none"


def test_splits_are_for_clicks() -> None:
    with pytest.raises(ConfigError, match="are places of a DLRM or a DCN, and the model is a Own"):
        split_(build_any_model(CLICKS, OWN), {"over": 0.5}, "exact")
    split_(build_any_model(CLICKS, OWN), {}, "exact")


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("make_model", "is not of the form 'package.module:function'"),
        (":make_model", "is not of the form"),
        ("no_such_package.models:make_model", "'no_such_package.models' can't be imported: No mod"),
        (f"{__name__}:make_no_model", f"'{__name__}' has no 'make_no_model'"),
        (f"{__name__}:NO_MODEL", "is a str, which can't be called; name a function"),
        (f"{__name__}:make_nothing", "gives a str, which is no torch.nn.Module; return the model"),
        (f"{__name__}:make_of_two", r"doesn't take \(features, num_dense, options\): too many"),
    ],
)
def test_factories_that_make_no_model_are_refused(factory: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        build_any_model(CLICKS, OwnModelConfig(factory=factory))
    assert f"factory={factory!r}" in str(raised.value)


def test_a_module_that_fails_while_it_is_imported_is_named(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_models.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="'broken_models' can't be imported: No module named 'no"):
        build_any_model(CLICKS, OwnModelConfig(factory="broken_models:make"))
    assert "broken_models" not in sys.modules


def test_the_kind_says_how_features_interact() -> None:
    assert type(build_model(CLICKS, ModelConfig()).model) is DLRM
    model = build_model(CLICKS, DCN).model
    assert type(model) is DLRM_DCN
    cross_layers: Any = model.inter_arch.crossnet
    # The dense features' vector and one per sparse feature.
    assert [weight.shape for weight in cross_layers.W_kernels] == [(24, 5)] * 2


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sgd", torch.optim.SGD), ("adagrad", torch.optim.Adagrad), ("adam", torch.optim.Adam)],
)
def test_dense_optimizers_are_those_of_torch(name: str, kind: Any) -> None:
    config = OptimizerConfig.model_validate({"dense_optimizer": name, "dense_lr": 0.03})
    weights = [nn.Parameter(torch.zeros(2))]
    optimizer = plain_dense_optimizer(config, weights)
    assert type(optimizer) is kind
    assert optimizer.defaults == kind(weights, lr=0.03).defaults


@pytest.mark.parametrize("field", ["dcn_layers", "dcn_low_rank"])
def test_options_of_cross_layers_need_them(field: str) -> None:
    message = f"{field}=7 is for cross layers, which kind='dlrm' has none of; set kind='dcn', or"
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate({field: 7})
    assert getattr(ModelConfig.model_validate({"kind": "dcn", field: 7}), field) == 7


@pytest.mark.parametrize("model", [ModelConfig(dim=8), DCN], ids=["dlrm", "dcn"])
def test_what_leaves_a_split_is_thresholded(model: ModelConfig) -> None:
    split: Any = build_model(CLICKS, model)
    whole: Any = build_model(CLICKS, model)
    split_(split, {"embeddings": 0.25, "dense": 0.1, "over": 0.2}, "exact")
    batch = make_batch(DATA, step=0, global_batch_size=16)

    vectors = split.model.sparse_arch(batch.sparse_features)
    expected = Thresholded(0.25)(whole.model.sparse_arch(batch.sparse_features))
    assert torch.equal(vectors, expected)
    assert ((vectors != 0).sum(dim=2) == 2).all()

    hidden = split.model.dense_arch.model._mlp[0](batch.dense_features)
    # A tenth of 64; a sample may have fewer numbers that the ReLU lets through.
    assert ((hidden != 0).sum(dim=1) <= 7).all()
    assert (whole.model.dense_arch.model._mlp[0](batch.dense_features) != 0).sum() > 16 * 7

    over: list[torch.Tensor] = []
    split.model.over_arch.model[1].register_forward_pre_hook(
        lambda module, inputs: over.append(inputs[0])
    )
    split(batch)
    # The only hidden layer, so that its numbers go into the last one.
    assert ((over[0] != 0).sum(dim=1) <= 13).all()
    assert over[0].any()


def test_splits_leave_the_names_of_a_checkpoint_alone() -> None:
    whole, split, laplace = (build_model(CLICKS, DCN) for _ in range(3))
    split_(split, {"embeddings": 0.25, "dense": 0.1, "over": 0.2}, "exact")
    split_(laplace, {"dense": 0.1}, "laplace")

    assert list(split.state_dict()) == list(whole.state_dict())
    split.load_state_dict(whole.state_dict())
    added = set(laplace.state_dict()) - set(whole.state_dict())
    assert added == {"model.dense_arch.model._mlp.0.split.running_threshold"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"splits": {"dense": 0}}, "splits.dense"),
        ({"splits": {"over": 1.5}}, "splits.over"),
        ({"splits": {"inter": 0.5}}, "'embeddings', 'dense' or 'over'"),
        ({"split_threshold": "laplace"}, "split_threshold='laplace' is for splits; name some, or"),
    ],
)
def test_wrong_splits_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        SplitConfig.model_validate(changes)
    assert message in str(raised.value)
