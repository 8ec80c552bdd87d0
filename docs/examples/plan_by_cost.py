"""Count a log, plan by predicted cost, explain the plan, and train.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 docs/examples/plan_by_cost.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_2dsp as tdsp

ROWS = {"user": 50_000, "item": 20_000, "hour": 24}
BATCH_SIZE, STEPS = 256, 20


class Model(nn.Module):
    """Sums one row per table under a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{name}",
                    num_embeddings=num_rows,
                    embedding_dim=32,
                    feature_names=[name],
                )
                for name, num_rows in ROWS.items()
            ],
        )
        self.over = nn.Linear(32 * len(ROWS), 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)
        return self.over(torch.cat([pooled[name] for name in ROWS], dim=1)).squeeze(1)


def make_batch(step: int, rank: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Make one id per sample and feature, small ids much more often, and a label."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    draws = torch.rand(len(ROWS), BATCH_SIZE, generator=generator)
    sizes = torch.tensor(list(ROWS.values())).unsqueeze(1)
    ids = (sizes**draws).long() - 1
    features = KeyedJaggedTensor(
        keys=list(ROWS),
        values=ids.view(-1),
        lengths=torch.ones(len(ROWS) * BATCH_SIZE, dtype=torch.int64),
    )
    return features, (ids[0] < 100).float()


def count_log(model: nn.Module) -> tdsp.AccessStats:
    """Count row accesses in all ranks' logs."""
    counter = tdsp.RowCounter.for_model(model)
    for step in range(50):
        features, _ = make_batch(step, dist.get_rank())
        counter.update(features)
    return counter.gather()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    parallel = tdsp.parallelize(
        model,
        batch_size=BATCH_SIZE,
        optimizer=tdsp.MomentScaledRowWiseAdaGrad(lr=0.1),
        # As if the network had 1 Gbit/s. Leave it out, and your own ranks are measured.
        calibration="emulated_1gbit",
        access=count_log(model),
    )
    if dist.get_rank() == 0:
        print(parallel.explain())

    dense_optimizer = torch.optim.SGD(parallel.dense_parameters(), lr=0.1)
    optimizer = parallel.combined_optimizer(dense_optimizer)
    for step in range(STEPS):
        features, labels = make_batch(1_000 + step, dist.get_rank())
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(parallel(features), labels)
        loss.backward()
        parallel.sync()
        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if dist.get_rank() == 0:
        print("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
