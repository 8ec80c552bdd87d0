"""Train the unsharded model on the global batch, and the sharded model beside it on every mesh.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 docs/examples/exactness.py
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_2dsp as tdsp
from torchrec_2dsp.optim import MomentScaledRowWiseAdaGradOptimizer

NUM_ROWS, BATCH_SIZE, STEPS, LR = 200, 32, 8, 0.1
FEATURES = ("user", "item")


class Model(nn.Module):
    """Two bags and a dense layer, with weights that can be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{feature}",
                    num_embeddings=NUM_ROWS,
                    embedding_dim=16,
                    feature_names=[feature],
                )
                for feature in FEATURES
            ]
        )
        self.over = nn.Linear(32, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)
        return self.over(torch.cat([pooled[name] for name in FEATURES], dim=1)).squeeze(1)


def make_batch(step: int, ranks: range) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Make the batches of these ranks, concatenated in rank order."""
    ids_of_ranks = []
    for rank in ranks:
        generator = torch.Generator().manual_seed(1_000 * step + rank)
        shape = (len(FEATURES), BATCH_SIZE)
        ids_of_ranks.append(torch.randint(0, NUM_ROWS, shape, generator=generator))
    ids = torch.cat(ids_of_ranks, dim=1)
    lengths = torch.ones(ids.numel(), dtype=torch.int64)
    features = KeyedJaggedTensor(list(FEATURES), ids.flatten(), lengths=lengths)
    return features, (ids[0] % 2).float()


def loss_of(model: nn.Module, batch: tuple[KeyedJaggedTensor, torch.Tensor]) -> torch.Tensor:
    features, labels = batch
    return nn.functional.binary_cross_entropy_with_logits(model(features), labels)


def train_unsharded(model: Model, world_size: int) -> list[float]:
    """Train the oracle: one process, the global batch, eager optimizers."""
    tables = MomentScaledRowWiseAdaGradOptimizer(model.ebc.parameters(), lr=LR, moment_scale=1.0)
    dense = torch.optim.SGD(model.over.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        model.zero_grad()
        loss = loss_of(model, make_batch(step, range(world_size)))
        loss.backward()
        tables.step()
        dense.step()
        losses.append(loss.item())
    return losses


def shard(model: Model, mesh: tdsp.Mesh2D, sync: Any, optimizer: Any) -> tdsp.ModelParallel2D:
    """Shard the model over a mesh; its tables keep their weights."""
    return tdsp.parallelize(
        model,
        batch_size=BATCH_SIZE,
        optimizer=optimizer,
        calibration="emulated_1gbit",  # Leave it out, and your own ranks are measured.
        exchange="row",  # Tables as small as these would be whole on each rank.
        mesh=mesh,
        sync=sync,
    )


def train_sharded(model: tdsp.ModelParallel2D, rank: int) -> list[float]:
    """Train on this rank's part of each batch; return losses that are means over all ranks."""
    optimizer = torch.optim.SGD(model.dense_parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, make_batch(step, range(rank, rank + 1)))
        loss.backward()
        model.sync()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def full_tables(model: tdsp.ModelParallel2D) -> dict[str, torch.Tensor]:
    """Assemble whole tables on every rank from the shards in all ranks' state dicts."""
    parts = []
    for name, value in model.state_dict().items():
        if hasattr(value, "to_local"):  # A DTensor: a table.
            local = value.to_local()
            shards = zip(local.local_shards(), local.local_offsets(), strict=False)
            parts += [(name, value.shape, part, tuple(start)) for part, start in shards]
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, parts)
    tables: dict[str, torch.Tensor] = {}
    for name, shape, part, (row, column) in (part for parts in of_ranks for part in parts):
        table = tables.setdefault(name, torch.full(shape, torch.nan))
        table[row : row + part.shape[0], column : column + part.shape[1]] = part
    return tables


def largest_difference(unsharded: Model, sharded: tdsp.ModelParallel2D) -> float:
    """Return the largest difference over all weights; NaN if the shards don't cover a table."""
    tables = full_tables(sharded)
    state = unsharded.state_dict()
    assert len(tables) == len(FEATURES)
    differences = [(table - state[name]).abs().max() for name, table in tables.items()]
    return torch.stack(differences).max().item()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    start = Model()
    unsharded = copy.deepcopy(start)
    losses = train_unsharded(unsharded, world_size)
    exact = tdsp.MomentScaledRowWiseAdaGrad(lr=LR)
    averaged = tdsp.MomentScaledRowWiseAdaGrad(lr=LR, moment_scale=1.0)
    cases: list[tuple[tdsp.Mesh2D, Any, Any]] = [
        (tdsp.Mesh2D.for_world(world_size, group_size=size), tdsp.GradientSync(), exact)
        for size in (4, 2, 1)
    ]
    # A comparison that can't fail says nothing: averages are another algorithm, and must differ.
    cases.append((tdsp.Mesh2D.for_world(world_size, group_size=2), tdsp.WeightSync(), averaged))
    for mesh, sync, optimizer in cases:
        sharded = shard(copy.deepcopy(start), mesh, sync, optimizer)
        pairs = zip(losses, train_sharded(sharded, rank), strict=True)
        of_losses = max(abs(loss - mean) for loss, mean in pairs)
        of_weights = largest_difference(unsharded, sharded)
        if rank == 0:
            print(f"{mesh}, {sync}: losses differ by {of_losses:.1e}, weights by {of_weights:.1e}")
        assert (of_weights < 1e-5) == (sync == tdsp.GradientSync()), of_weights
    if rank == 0:
        print("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
