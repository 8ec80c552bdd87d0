"""The models and dense optimizers that programs build from a config."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torchrec.models.dlrm import DLRM, DLRM_DCN

from torchrec_2dsp.programs.config.sections import ModelConfig, OptimizerConfig
from torchrec_2dsp.programs.data.synthetic import SparseFeature, SyntheticConfig, make_batch
from torchrec_2dsp.programs.models.model import build_model
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
