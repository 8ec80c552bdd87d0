"""Define a custom model for the training program, and train it in a plain loop.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 docs/examples/own_model.py

In a config of the program it is named like this, with this folder in PYTHONPATH:

[model]
kind = "module:factory"
factory = "own_model:make_model"
options = { dim = 16 }
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.datasets.utils import Batch

import torchrec_2dsp as tdsp
from torchrec_2dsp.programs.data.dataset import DatasetFeature
from torchrec_2dsp.programs.data.synthetic import SparseFeature, SyntheticConfig, make_batch
from torchrec_2dsp.programs.models.own_model import OwnModelConfig, build_own_model

GLOBAL_BATCH, STEPS = 256, 20


class FactorizationMachine(nn.Module):
    """A factorization machine: dot products of feature pairs, and weights for dense features."""

    def __init__(self, features: Sequence[DatasetFeature], num_dense: int, dim: int) -> None:
        super().__init__()
        self.names = [feature.name for feature in features]
        self.embeddings = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{feature.name}",
                    num_embeddings=feature.num_rows,
                    embedding_dim=dim,
                    feature_names=[feature.name],
                )
                for feature in features
            ]
        )
        self.linear = nn.Linear(num_dense + dim * len(self.names), 1)

    def forward(
        self, batch: Batch
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        pooled = self.embeddings(batch.sparse_features)
        vectors = torch.stack([pooled[name] for name in self.names], dim=1)
        pairs = (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1) / 2
        inputs = torch.cat([batch.dense_features, vectors.flatten(1)], dim=1)
        logits = self.linear(inputs).squeeze(1) + pairs
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


def make_model(
    features: Sequence[DatasetFeature], num_dense: int, options: Mapping[str, Any]
) -> nn.Module:
    """Make the model; the config names this function. Called on every rank with the same seed."""
    return FactorizationMachine(features, num_dense, options.get("dim", 16))


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = SyntheticConfig(
        features=tuple(SparseFeature(name=name, num_rows=1_000) for name in ("user", "item"))
    )
    config = OwnModelConfig(factory=f"{__name__}:make_model", options={"dim": 8})
    model = build_own_model(config, data.features, data.num_dense)
    parallel = tdsp.parallelize(
        model,
        batch_size=GLOBAL_BATCH // world_size,
        optimizer=tdsp.MomentScaledRowWiseAdaGrad(lr=0.1),
        calibration="emulated_1gbit",  # Leave it out, and your own ranks are measured.
    )
    dense_optimizer = torch.optim.SGD(parallel.dense_parameters(), lr=0.1)
    optimizer = parallel.combined_optimizer(dense_optimizer)
    for step in range(STEPS):
        batch = make_batch(
            data, step=step, global_batch_size=GLOBAL_BATCH, rank=rank, world_size=world_size
        )
        optimizer.zero_grad()
        loss, _ = parallel(batch)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if rank == 0:
        print("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
