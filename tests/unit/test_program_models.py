"""The models and dense optimizers that programs build from a config."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torchrec.models.dlrm import DLRM, DLRM_DCN

from torchrec_2dsp.dense.thresholded import Thresholded
from torchrec_2dsp.programs.config.sections import ModelConfig, OptimizerConfig, SplitConfig
from torchrec_2dsp.programs.data.synthetic import SparseFeature, SyntheticConfig, make_batch
from torchrec_2dsp.programs.models.model import build_model, split_
from torchrec_2dsp.programs.models.optimizer import dense_optimizer

DATA = SyntheticConfig(
    num_dense=3,
    features=(SparseFeature(name="user", num_rows=20), SparseFeature(name="page", num_rows=30)),
)
DCN = ModelConfig(kind="dcn", dim=8, dcn_layers=2, dcn_low_rank=5)


def test_the_kind_says_how_features_interact() -> None:
    assert type(build_model(DATA, ModelConfig()).model) is DLRM
    model = build_model(DATA, DCN).model
    assert type(model) is DLRM_DCN
    cross_layers: Any = model.inter_arch.crossnet
    # The dense features' vector and one for each of the two sparse features.
    assert [weight.shape for weight in cross_layers.W_kernels] == [(24, 5)] * 2


def test_equal_configs_give_equal_weights_wherever_tables_are() -> None:
    first, second = build_model(DATA, DCN).state_dict(), build_model(DATA, DCN).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    without_tables = build_model(DATA, DCN, tables_device="meta").state_dict()
    dense = [name for name in first if "embedding_bags" not in name]
    assert len(dense) > 6
    assert all(torch.equal(first[name], without_tables[name]) for name in dense)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("sgd", torch.optim.SGD), ("adagrad", torch.optim.Adagrad), ("adam", torch.optim.Adam)],
)
def test_dense_optimizers_are_those_of_torch(name: str, kind: Any) -> None:
    config = OptimizerConfig.model_validate({"dense_optimizer": name, "dense_lr": 0.03})
    losses = []
    for wraps in (True, False):
        model: Any = build_model(DATA, ModelConfig())
        named = dict(model.model.over_arch.named_parameters())
        ours = dense_optimizer(config, named)
        optimizer = ours if wraps else kind(named.values(), lr=0.03)
        for step in range(3):
            loss, _ = model(make_batch(DATA, step=step, global_batch_size=16))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert sorted(ours.params) == sorted(named)


@pytest.mark.parametrize("field", ["dcn_layers", "dcn_low_rank"])
def test_options_of_cross_layers_need_them(field: str) -> None:
    message = f"{field}=7 is for cross layers, which kind='dlrm' has none of; set kind='dcn', or"
    with pytest.raises(ValidationError, match=message):
        ModelConfig.model_validate({field: 7})
    assert getattr(ModelConfig.model_validate({"kind": "dcn", field: 7}), field) == 7


@pytest.mark.parametrize("model", [ModelConfig(dim=8), DCN], ids=["dlrm", "dcn"])
def test_what_leaves_a_split_is_thresholded(model: ModelConfig) -> None:
    split: Any = build_model(DATA, model)
    whole: Any = build_model(DATA, model)
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
    whole, split, laplace = (build_model(DATA, DCN) for _ in range(3))
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
