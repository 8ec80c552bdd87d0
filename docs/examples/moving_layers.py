"""Move a pipeline's layers while one rank's machine is slower than the others.

torchrec-2dsp cluster --hosts 4 --ranks-per-host 1 --link 1gbit --processor-per-rank -- \
    docs/examples/moving_layers.py --rounds 8

Prints a step's milliseconds while the last machine is slower and has as many layers as the others,
after `recut`, and with all machines alike.
"""

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_2dsp as tdsp

NUM_ROWS, DIM = 1_000, 64


class Block(nn.Module):
    """A residual layer, which a slower machine computes several times."""

    times = 1

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = torch.stack([self.layers(inputs) for _ in range(self.times)])
        return inputs + outputs.mean(dim=0)


class Model(nn.Module):
    """A table under blocks that can be cut."""

    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        item = EmbeddingBagConfig(
            name="t_item", num_embeddings=NUM_ROWS, embedding_dim=DIM, feature_names=["item"]
        )
        self.ebc = EmbeddingBagCollection(device=torch.device("cpu"), tables=[item])
        blocks: list[nn.Module] = [Block(width) for _ in range(num_blocks)]
        blocks[0] = nn.Sequential(nn.Linear(DIM, width), blocks[0])
        blocks[-1] = nn.Sequential(blocks[-1], nn.Linear(width, 1), nn.Flatten(0))
        self.stack = tdsp.LayerStack(blocks, nn.BCEWithLogitsLoss(reduction="none"))

    def forward(self, ids: KeyedJaggedTensor, labels: torch.Tensor) -> torch.Tensor:
        return self.stack(self.ebc(ids)["item"], labels).mean()


def batch(size: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    ids = torch.randint(0, NUM_ROWS, (size,))
    lengths = torch.ones(size, dtype=torch.int64)
    return KeyedJaggedTensor(["item"], ids, lengths=lengths), (ids % 2).float()


def seconds_per_step(model: Any, optimizer: torch.optim.Optimizer, steps: int, size: int) -> float:
    """Train, and return a step's mean time."""
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(steps):
        model(*batch(size)).backward()
        optimizer.step()
        optimizer.zero_grad()  # Layers move without gradients.
    dist.barrier()
    return (time.perf_counter() - start_s) / steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=256, help="samples of a rank")
    parser.add_argument("--times", type=int, default=2, help="as long takes the slower machine")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="of a round, for each way")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    dense = tdsp.PipelinedDense(num_ranks, num_micro_batches=4 * num_ranks)
    model: Any = tdsp.parallelize(
        Model(options.blocks, options.width),
        batch_size=options.batch_size,
        optimizer=tdsp.MomentScaledRowWiseAdaGrad(lr=0.05),
        mesh=tdsp.Mesh2D(1, num_ranks),
        calibration="emulated_1gbit",
        data_parallel_wrapper=dense,
    )
    optimizer = torch.optim.SGD(model.dense_parameters(), lr=0.005)
    even = cuts = dense.cuts["stack"]
    own_times = options.times if rank == num_ranks - 1 else 1
    ways: dict[str, list[float]] = {"one slower": [], "one slower, recut": [], "all alike": []}
    for _ in range(options.rounds):
        for name, seconds in ways.items():
            Block.times = 1 if name == "all alike" else own_times
            dense.recut(optimizer, cuts=even)
            # How long a layer takes on another machine isn't known before it has run there.
            for _ in range(2 if name.endswith("recut") else 0):
                seconds_per_step(model, optimizer, 2, options.batch_size)
                dense.recut(optimizer)
                cuts = dense.cuts["stack"]
            seconds.append(seconds_per_step(model, optimizer, options.steps, options.batch_size))
    if rank == 0:
        for name, seconds in ways.items():
            slower = zip(ways["one slower"], seconds, strict=True)
            faster = [before / after for before, after in slower]
            print(
                f"{name}: {1e3 * statistics.median(seconds):.0f} ms [{1e3 * min(seconds):.0f}, "
                f"{1e3 * max(seconds):.0f}], {statistics.median(faster):.2f} times as fast as "
                f"before [{min(faster):.2f}, {max(faster):.2f}]"
            )
        print(f"cut before layers {even}, at last {cuts}")
        print("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
