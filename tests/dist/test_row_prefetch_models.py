"""Rows that come early in models with several exchanges, and whose lookups give other types."""

from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.cells import EPS
from tests.support.devices import rank_device
from tests.support.loops import largest_gap, make_stream
from tests.support.oracle import local_loss
from tests.support.parity import LR, TOLERANCE, Cell
from tests.support.prefetching import STEPS, Trained, run
from tests.support.ranks import RankPool
from torchrec_2dsp._compat.fbgemm import EmbOptimType

pytestmark = pytest.mark.dealt_file

CELL = Cell(tdsp.Mesh2D(1, 4))
EXCHANGES = {"t0": "row", "t1": "row_per_host", "t2": "pooled", "s0": "row", "s1": "row"}


class ManyModel(nn.Module):
    """Two collections of bags and one of sequences, which want the same features."""

    def __init__(self) -> None:
        super().__init__()
        device = rank_device()
        bags = {"t0": (40, ["f0", "f3"]), "t1": (24, ["f1"]), "t2": (33, ["f2"])}
        configs = [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=8, feature_names=features
            )
            for name, (rows, features) in bags.items()
        ]
        self.mixed = EmbeddingBagCollection(device=device, tables=configs[1:])
        self.rows = EmbeddingBagCollection(device=device, tables=configs[:1])
        self.sequences = EmbeddingCollection(
            device=device,
            tables=[
                EmbeddingConfig(
                    name="s0", num_embeddings=40, embedding_dim=8, feature_names=["f0"]
                ),
                EmbeddingConfig(
                    name="s1", num_embeddings=33, embedding_dim=8, feature_names=["f3"]
                ),
            ],
        )
        self.over = nn.Linear(32, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, mixed, sequences = self.rows(features), self.mixed(features), self.sequences(features)
        pooled = [rows["f0"], rows["f3"], mixed["f1"], mixed["f2"]]
        scores = self.over(torch.cat(pooled, dim=1).float()).squeeze(1)
        spread = torch.cat([sequences[name].values().view(-1) for name in ("f0", "f3")]).float()
        loss = local_loss(scores) + spread.tanh().pow(2).sum()
        return loss, loss.detach()


def sharded(output: DataType = DataType.FP32) -> Any:
    torch.manual_seed(0)
    model = ManyModel()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    params = {"learning_rate": LR, "eps": EPS, "output_dtype": output}
    kinds = (tdsp.EmbeddingBagCollectionSharder2D, tdsp.EmbeddingCollectionSharder2D)
    sharders: Any = [kind(EmbOptimType.EXACT_ADAGRAD, fused_params=dict(params)) for kind in kinds]
    constraints = {name: ParameterConstraints(sharding_types=["row_wise"]) for name in EXCHANGES}
    planner = tdsp.Planner2D(batch_size=8, constraints=constraints, mesh=CELL.mesh)
    plan = planner.plan(model, sharders)
    for name, exchange in EXCHANGES.items():
        plan = tdsp.pin(plan, name, exchange=exchange)
    parallel: Any = tdsp.ModelParallel2D(
        module=model, device=rank_device(), plan=plan, sharders=sharders
    )
    parallel.load_state_dict(weights)
    return parallel


def both(rank: int, world_size: int, output: DataType) -> tuple[Trained, Trained, float]:
    """By TorchRec's pipeline, by this one, and their largest gap."""
    batches = [step[rank] for step in make_stream(CELL, STEPS)]
    expected = run(sharded(output), batches, TrainPipelineSparseDist)
    found = run(sharded(output), batches)
    return expected, found, largest_gap(found.tensors, expected.tensors)


def losses_of_oracle() -> list[list[float]]:
    """Of each rank's batch in each step, by the unsharded model on the batches of all ranks."""
    torch.manual_seed(0)
    model, losses = ManyModel(), []
    tables = [param for name, param in model.named_parameters() if not name.startswith("over")]
    optimizers = [
        torch.optim.Adagrad(tables, lr=LR, eps=EPS),
        torch.optim.SGD(model.over.parameters(), lr=LR),
    ]
    for batches in make_stream(CELL, STEPS):
        by_rank = [model(batch)[0] for batch in batches]
        losses.append([loss.item() for loss in by_rank])
        model.zero_grad()
        (sum(by_rank, torch.zeros(())) / len(batches)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return losses


@pytest.mark.parametrize(("output", "bound"), [(DataType.FP32, TOLERANCE), (DataType.FP16, 1e-3)])
def test_models_with_several_exchanges_train_as_without_and_as_unsharded(
    two_hosts: RankPool, output: DataType, bound: float
) -> None:
    answers = two_hosts.run(both, output)
    oracle = zip(*losses_of_oracle(), strict=True)
    largest = 0.0
    for (expected, found, gap), unsharded in zip(answers, oracle, strict=True):
        assert gap == 0.0
        assert found.losses == expected.losses
        assert min(found.counts) > 0
        gaps = [abs(a - b) / (1 + b) for a, b in zip(found.losses, unsharded, strict=True)]
        largest = max(largest, *gaps)
    # Half precision is seen, and nothing beyond it.
    assert (TOLERANCE if output is DataType.FP16 else 0.0) < largest < bound
