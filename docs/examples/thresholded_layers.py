"""Compare a pipeline of layers with one that sends the largest activations and gradients alone.

torchrec-2dsp cluster --hosts 4 --ranks-per-host 1 --link 200mbit --processor-per-rank -- \
    docs/examples/thresholded_layers.py --rounds 8

Two pipelines of two stages train one dense model on clicks that are made up, beside TorchRec with
DDP. Prints each way's milliseconds, bytes of gradients, and loss on held-out samples.
"""

import argparse
import math
import statistics
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

import torchrec_2dsp as tdsp

NUM_DENSE, NUM_ROWS, DIM, DEPTH = 32, 1_000, 32, 6


class Batch(NamedTuple):
    ids: KeyedJaggedTensor
    dense: torch.Tensor
    labels: torch.Tensor


class Clicks:
    """Draws samples, and their clicks by layers that nobody knows."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randn(NUM_ROWS, 8, generator=generator)
        self._first = torch.randn(NUM_DENSE + 8, 32, generator=generator) / 4
        self._second = torch.randn(32, generator=generator)

    def batch(self, seed: int, size: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, NUM_ROWS, (size,), generator=generator)
        dense = torch.randn(size, NUM_DENSE, generator=generator)
        known = torch.cat([dense, self._rows[ids]], dim=1)
        odds = torch.relu(known @ self._first) @ self._second
        labels = torch.bernoulli(torch.sigmoid(odds), generator=generator)
        features = KeyedJaggedTensor(["item"], ids, lengths=torch.ones(size, dtype=torch.int64))
        return Batch(features, dense, labels)


class Model(nn.Module):
    """A table and dense features under layers that can be cut."""

    def __init__(self, width: int, density: float) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            device=torch.device("cpu"),
            tables=[
                EmbeddingBagConfig(
                    name="t_item",
                    num_embeddings=NUM_ROWS,
                    embedding_dim=DIM,
                    feature_names=["item"],
                )
            ],
        )
        layers: list[nn.Module] = [nn.Sequential(nn.Linear(NUM_DENSE + DIM, width), nn.ReLU())]
        for number in range(DEPTH):
            layers.append(nn.Sequential(nn.Linear(width, width), nn.ReLU()))
            if number == DEPTH // 2 - 1 and density < 1:
                layers.append(tdsp.Thresholded(density))
        self.stack = tdsp.LayerStack(
            [*layers, nn.Sequential(nn.Linear(width, 1), nn.Flatten(0))],
            nn.BCEWithLogitsLoss(reduction="none"),
        )
        self.cut = len(layers) - DEPTH // 2

    def forward(self, batch: Batch) -> torch.Tensor:
        inputs = torch.cat([self.ebc(batch.ids)["item"], batch.dense], dim=1)
        return self.stack(inputs, batch.labels).mean()


class Way:
    """A model that is trained in one way, and its times."""

    gradients: tdsp.ThresholdedDataParallel | None = None
    model: Any

    def __init__(self, options: argparse.Namespace, densities: tuple[float, float] | None) -> None:
        torch.manual_seed(0)
        self.seconds: list[float] = []
        if densities is None:
            model = Model(options.width, 1.0)
            self.model = DistributedModelParallel(model, device=torch.device("cpu"))
            dense: Any = [param for name, param in self.model.named_parameters() if "stack" in name]
            self.optimizer = torch.optim.SGD(dense, lr=options.lr)
            return
        activations, gradients = densities
        model = Model(options.width, activations)
        if gradients < 1:
            self.gradients = tdsp.ThresholdedDataParallel(gradients, warm_up=options.warm_up)
        wrapper = tdsp.PipelinedDense(
            2,
            num_micro_batches=4,
            cuts=[model.cut],
            values="bf16" if activations < 1 else "fp32",
            gradients=self.gradients,
        )
        adagrad = tdsp.EmbeddingBagCollectionSharder2D(tdsp.MomentScaledRowWiseAdaGrad(lr=0.05))
        self.model = tdsp.parallelize(
            model,
            batch_size=options.batch_size,
            sharders=[adagrad],
            mesh=tdsp.Mesh2D(1, dist.get_world_size()),
            calibration="emulated_1gbit",
            data_parallel_wrapper=wrapper,
        )
        self.optimizer = torch.optim.SGD(self.model.dense_parameters(), lr=options.lr)

    def train(self, batches: list[Batch]) -> None:
        """Train on some batches, and note a step's mean time."""
        self.model.train()
        dist.barrier()
        start_s = time.perf_counter()
        for batch in batches:
            self.optimizer.zero_grad()
            self.model(batch).backward()
            self.optimizer.step()
        dist.barrier()
        self.seconds.append((time.perf_counter() - start_s) / len(batches))

    def held_out(self, batches: list[Batch]) -> float:
        """Return the mean loss of all ranks' held-out batches."""
        self.model.eval()
        with torch.no_grad():
            loss = torch.stack([self.model(batch) for batch in batches]).mean()
        dist.all_reduce(loss)
        return float(loss) / dist.get_world_size()

    def gradient_share(self) -> float:
        """Return the share of the gradients' bytes that were sent."""
        total = self.gradients.total if self.gradients else None
        return total.num_bytes / total.dense_bytes if total else 1.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=256, help="samples of a rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--activations", type=float, default=0.05)
    parser.add_argument("--gradients", type=float, default=0.01)
    parser.add_argument("--warm-up", type=int, default=20, help="steps that send all gradients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of a round")
    options = parser.parse_args()
    first = math.ceil(options.warm_up / options.steps)
    if options.rounds <= first:
        parser.error(f"{first} rounds warm up, and aren't timed; give more --rounds")
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    few, clicks = (options.activations, options.gradients), Clicks()
    densities = {
        "ddp": None,
        "all": (1.0, 1.0),
        "activations": (few[0], 1.0),
        "gradients": (1.0, few[1]),
        "both": few,
    }
    ways = {name: Way(options, both) for name, both in densities.items()}
    for round_number in range(options.rounds):
        numbers = range(round_number * options.steps, (round_number + 1) * options.steps)
        batches = [clicks.batch(num_ranks * n + rank, options.batch_size) for n in numbers]
        for way in ways.values():
            way.train(batches)
    held_out = [clicks.batch(-1 - num_ranks * n - rank, 1_024) for n in range(8)]
    losses = {name: way.held_out(held_out) for name, way in ways.items()}
    if rank == 0:
        timed = {name: way.seconds[first:] for name, way in ways.items()}
        for name, seconds in timed.items():
            shorter = [1 - own / whole for own, whole in zip(seconds, timed["all"], strict=True)]
            faster = [ddp / own for own, ddp in zip(seconds, timed["ddp"], strict=True)]
            print(
                f"{name}: {1e3 * statistics.median(seconds):.0f} ms, "
                f"{statistics.median(shorter):.0%} less [{min(shorter):.0%}, {max(shorter):.0%}], "
                f"{statistics.median(faster):.2f} times as fast as TorchRec with DDP "
                f"[{min(faster):.2f}, {max(faster):.2f}], "
                f"gradients {ways[name].gradient_share():.2%}, loss {losses[name]:.4f}"
            )
        print("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
