"""Count a log, replicate its most used rows on every rank, and send no empty bags.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 docs/examples/hot_lists.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_2dsp as tdsp

NUM_ROWS, BATCH_SIZE, STEPS = 10_000, 256, 20


class Model(nn.Module):
    """Sums a user's history under a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name="t_history",
                    num_embeddings=NUM_ROWS,
                    embedding_dim=16,
                    feature_names=["history"],
                )
            ],
        )
        self.over = nn.Linear(16, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features)["history"]).squeeze(1)


def make_batch(step: int, rank: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Make lists with none to three ids, small ids much more often, and a label by their number."""
    generator = torch.Generator().manual_seed(1_000 * step + rank)
    lengths = torch.randint(0, 4, (BATCH_SIZE,), generator=generator)
    draws = torch.rand(int(lengths.sum()), generator=generator)
    ids = (NUM_ROWS**draws).long() - 1  # Each tenfold of ids is drawn as often as the next.
    features = KeyedJaggedTensor(keys=["history"], values=ids, lengths=lengths)
    return features, (lengths > 1).float()


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
    stats = count_log(model)
    hot = tdsp.HotSet.from_stats(stats, "t_history", share=0.5)
    if dist.get_rank() == 0:
        distinct = stats.expected_distinct_rows("t_history", BATCH_SIZE)
        print(f"{len(hot)} of {NUM_ROWS} rows take half of the lookups")
        print(f"a batch of {BATCH_SIZE} samples has {distinct:.0f} distinct rows")
    # Without this constraint the search chooses whether, and how many, rows are hot.
    constraint = tdsp.ParameterConstraints2D(
        sharding_types=["table_wise"], exchange=["nonempty"], hot_rows=len(hot)
    )
    parallel = tdsp.parallelize(
        model,
        batch_size=BATCH_SIZE,
        optimizer=tdsp.MomentScaledRowWiseAdaGrad(lr=0.1),
        calibration="emulated_200mbit",  # Leave it out, and your own ranks are measured.
        mesh=tdsp.Mesh2D(1, dist.get_world_size()),
        constraints={"t_history": constraint},
        access=stats,
    )

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
