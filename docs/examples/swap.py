"""A stock TorchRec training script after the swap: 4 ranks as 2 groups of 2.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 docs/examples/swap.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_2dsp as tdsp

NUM_ROWS, BATCH_SIZE, STEPS = 1_000, 64, 20


class Model(nn.Module):
    """Two bags and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{feature}",
                    num_embeddings=NUM_ROWS,
                    embedding_dim=16,
                    feature_names=[feature],
                )
                for feature in ("user", "item")
            ],
        )
        self.over = nn.Linear(32, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)
        return self.over(torch.cat([pooled["user"], pooled["item"]], dim=1)).squeeze(1)


def make_batch(step: int, rank: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Make ids, and a label that depends on them."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    ids = torch.randint(0, NUM_ROWS, (2 * BATCH_SIZE,), generator=generator)
    lengths = torch.ones(2 * BATCH_SIZE, dtype=torch.int64)
    features = KeyedJaggedTensor(keys=["user", "item"], values=ids, lengths=lengths)
    return features, (ids[:BATCH_SIZE] % 2).float()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    sharders = [tdsp.EmbeddingBagCollectionSharder2D(tdsp.MomentScaledRowWiseAdaGrad(lr=0.1))]
    planner = tdsp.Planner2D(
        mesh=tdsp.Mesh2D.for_world(dist.get_world_size(), group_size=2),
        sync=tdsp.GradientSync(),
        batch_size=BATCH_SIZE,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    # The ten most used users live on every rank.
    plan = tdsp.pin(plan, "t_user", hot_rows=range(10))
    parallel = tdsp.ModelParallel2D(model, plan=plan, sharders=sharders)

    dense_optimizer = torch.optim.SGD(parallel.dense_parameters(), lr=0.1)
    optimizer = parallel.combined_optimizer(dense_optimizer)
    batches = (make_batch(step, dist.get_rank()) for step in range(STEPS))
    # If a rank fails in here, all ranks say which one, and where.
    with tdsp.failing_together(parallel) as loop:
        for step, (features, labels) in enumerate(loop.batches(batches)):
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(parallel(features), labels)
            loss.backward()
            parallel.sync()
            optimizer.step()
            if dist.get_rank() == 0 and step % 5 == 0:
                rows = parallel.sync_total.num_rows
                print(f"step {step}: loss {loss.item():.4f}, {rows} rows synced so far")
    if dist.get_rank() == 0:
        print("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
