"""Train in a loop that can be killed at any moment and resumes with the same losses.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 \
    --max-restarts 3 docs/examples/resumable.py FOLDER

Without a folder it trains 10 steps, begins again from its newest checkpoint as a new process would,
and trains 10 more.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_2dsp as tdsp

NUM_ROWS, BATCH_SIZE = 1_000, 64
STEPS, SAVE_EVERY, KEEP = 20, 4, 2
BATCHES_PER_EPOCH = 8


class Model(nn.Module):
    """A bag and two dense layers, with dropout that differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t_item", num_embeddings=NUM_ROWS, embedding_dim=16, feature_names=["item"]
        )
        self.ebc = EmbeddingBagCollection(device=torch.device("meta"), tables=[table])
        self.over = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(features)["item"]).squeeze(1)


def make_batch(position: dict[str, int], rank: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Make a rank's batch at a position in the data, the same at every call."""
    seed = 1_000_000 * position["epoch"] + 1_000 * position["batch"] + rank
    generator = torch.Generator().manual_seed(seed)
    ids = (NUM_ROWS ** torch.rand(BATCH_SIZE, generator=generator)).long() - 1
    lengths = torch.ones(BATCH_SIZE, dtype=torch.int64)
    features = KeyedJaggedTensor(keys=["item"], values=ids, lengths=lengths)
    return features, (ids % 2).float()


def train(folder: Path, steps: int) -> None:
    """Run everything from the model to the last step, in each life of the process."""
    torch.manual_seed(0)
    model = Model()
    counter = tdsp.RowCounter.for_model(model, half_life=100)
    sharders = [tdsp.EmbeddingBagCollectionSharder2D(tdsp.MomentScaledRowWiseAdaGrad(lr=0.1))]
    planner = tdsp.Planner2D(
        mesh=tdsp.Mesh2D.for_world(dist.get_world_size(), group_size=2),
        sync=tdsp.GradientSync(),
        batch_size=BATCH_SIZE,
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    plan = tdsp.pin(plan, "t_item", hot_rows=range(20))
    parallel = tdsp.ModelParallel2D(model, plan=plan, sharders=sharders)

    dense_optimizer = torch.optim.Adam(parallel.dense_parameters(), lr=0.01)
    optimizer = parallel.combined_optimizer(dense_optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.98**step)
    refresh = tdsp.HotSetRefresh(parallel, counter, every=5)
    torch.manual_seed(1 + dist.get_rank())  # From here on each rank draws its own numbers.

    position = {"epoch": 0, "batch": 0}
    state = tdsp.TrainState(
        parallel,
        optimizer,
        refresh=refresh,
        counter=counter,
        scheduler=scheduler,
        position=position,
    )
    if (newest := tdsp.latest_checkpoint(folder)) is not None:
        tdsp.load_checkpoint(newest, parallel, optimizer, train_state=state)
        if dist.get_rank() == 0:
            print(f"going on at step {state.step}")

    while state.step < steps:
        features, labels = make_batch(position, dist.get_rank())
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(parallel(features), labels)
        loss.backward()
        parallel.sync()
        optimizer.step()
        scheduler.step()
        counter.update(features)
        refresh.step()

        position["batch"] += 1
        if position["batch"] == BATCHES_PER_EPOCH:
            position["epoch"], position["batch"] = position["epoch"] + 1, 0
        state.step += 1
        if dist.get_rank() == 0 and state.step % 5 == 0:
            print(f"step {state.step}: loss {loss.item():.4f}")
        if state.step % SAVE_EVERY == 0:
            path = folder / str(state.step)
            tdsp.save_checkpoint(path, parallel, optimizer, train_state=state)
            tdsp.drop_old_checkpoints(folder, keep=KEEP)


def main() -> None:
    dist.init_process_group("gloo")
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), STEPS)
    else:
        with tempfile.TemporaryDirectory() as own:
            folders = [own]
            dist.broadcast_object_list(folders, src=0)
            train(Path(folders[0]), STEPS // 2)
            train(Path(folders[0]), STEPS)
            dist.barrier()
    if dist.get_rank() == 0:
        print("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
