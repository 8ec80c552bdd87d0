"""Compare the quality of low-precision rows, and of averaged copies, on MovieLens-100K.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 docs/examples/fewer_bits.py \
    --folder ml-100k --transport int8 --seed 1
OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 docs/examples/fewer_bits.py \
    --folder ml-100k --transport fp32 --copies 4 --average-every 1 --batch-size 64 --seed 1

The folder holds ml-100k.inter, ml-100k.user and ml-100k.item, tab separated, with a header each.
Without --folder, ratings are made up.
"""

import argparse
import csv
import json
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import torchrec_2dsp as tdsp
from torchrec_2dsp.optim import FROM_MESH

DIM = 32
FEATURES = ("user", "age", "gender", "occupation", "item", "year", "genres")
Sample = tuple[list[list[str]], float]
"""The values of each feature, and whether the rating is 4 or 5."""


def read_ratings(folder: Path) -> list[Sample]:
    """Read the ratings with their users' and items' features."""

    def rows(name: str) -> list[list[str]]:
        with (folder / name).open(encoding="utf-8") as file:
            return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]

    users = {
        user: [[age[:-1]], [gender], [job]] for user, age, gender, job, _ in rows("ml-100k.user")
    }
    items = {item: [[year], genres.split()] for item, _, year, genres in rows("ml-100k.item")}
    return [
        ([[user], *users[user], [item], *items[item]], float(float(rating) >= 4))
        for user, item, rating, _ in rows("ml-100k.inter")
    ]


def made_up_ratings(num_ratings: int = 12_000) -> list[Sample]:
    """Make ratings by users who like items with larger numbers than their own."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(0, 40, (num_ratings, 2), generator=generator).tolist()
    return [
        (
            [
                [str(user)],
                [str(user % 7)],
                ["F"],
                [str(user % 3)],
                [str(item)],
                ["1995"],
                ["Drama"],
            ],
            float(item > user),
        )
        for user, item in pairs
    ]


class Model(nn.Module):
    """Concatenates all features' rows under two dense layers."""

    def __init__(self, num_values: list[int]) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            device=torch.device("cpu"),
            tables=[
                EmbeddingBagConfig(
                    name=f"t_{name}", num_embeddings=size, embedding_dim=DIM, feature_names=[name]
                )
                for name, size in zip(FEATURES, num_values, strict=True)
            ],
        )
        self.over = nn.Sequential(nn.Linear(DIM * len(FEATURES), 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features)
        # A sharded collection has its features in another order.
        joined = torch.cat([pooled[name] for name in FEATURES], dim=1)
        return self.over(joined).squeeze(1)


class Log:
    """Splits ratings into batches: nine tenths for training, the rest for evaluation."""

    def __init__(self, samples: list[Sample], batch_size: int) -> None:
        self._batch_size = batch_size
        values = zip(*(values for values, _ in samples), strict=True)
        self.numbers = [
            {value: number for number, value in enumerate(sorted({v for bag in bags for v in bag}))}
            for bags in values
        ]
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
        num_train = len(samples) * 9 // 10
        self.train = [samples[place] for place in order[:num_train]]
        self.held_out = [samples[place] for place in order[num_train:]]

    def batches(
        self, samples: list[Sample], seed: int
    ) -> "list[tuple[KeyedJaggedTensor, torch.Tensor]]":
        """Yield this rank's share of an epoch, shuffled by the seed."""
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
        size = self._batch_size * num_ranks
        return [
            self._batch([samples[place] for place in part[rank::num_ranks].tolist()])
            for part in order[: len(order) // size * size].split(size)
        ]

    def _batch(self, samples: list[Sample]) -> tuple[KeyedJaggedTensor, torch.Tensor]:
        bags = [
            [numbers[value] for value in values[place]]
            for place, numbers in enumerate(self.numbers)
            for values, _ in samples
        ]
        features = KeyedJaggedTensor(
            keys=list(FEATURES),
            values=torch.tensor([number for bag in bags for number in bag]),
            lengths=torch.tensor([len(bag) for bag in bags]),
        )
        return features, torch.tensor([label for _, label in samples])


def mean_over_ranks(values: list[torch.Tensor]) -> float:
    """Return the mean over all ranks' values, the same number on each."""
    mean = torch.stack(values).double().mean()
    dist.all_reduce(mean)
    return float(mean) / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument(
        "--transport", default="int8", choices=[way.value for way in tdsp.Transport]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256, help="samples of a rank")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of the tables")
    parser.add_argument("--copies", type=int, default=1, help="of each table; they stay exact")
    parser.add_argument("--average-every", type=int, help="average copies in so many steps instead")
    parser.add_argument("--moment-scale", type=float, help="c; by default the number of copies")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    samples = read_ratings(arguments.folder) if arguments.folder else made_up_ratings()
    log = Log(samples, arguments.batch_size)

    torch.manual_seed(arguments.seed)
    model = Model([len(numbers) for numbers in log.numbers])
    by_rows = tdsp.ParameterConstraints2D(
        sharding_types=["row_wise"], exchange=["row"], transport=[arguments.transport]
    )
    sync = tdsp.GradientSync()
    if arguments.average_every:
        sync = tdsp.WeightSync(policy=tdsp.every(arguments.average_every))
    scale = FROM_MESH if arguments.moment_scale is None else arguments.moment_scale
    parallel = tdsp.parallelize(
        model,
        batch_size=arguments.batch_size,
        optimizer=tdsp.MomentScaledRowWiseAdaGrad(lr=arguments.lr, moment_scale=scale),
        calibration="emulated_200mbit",
        mesh=tdsp.Mesh2D(arguments.copies, dist.get_world_size() // arguments.copies),
        sync=sync,
        constraints={f"t_{name}": by_rows for name in FEATURES},
    )
    dense_optimizer = torch.optim.Adagrad(parallel.dense_parameters(), lr=0.02)
    optimizer = parallel.combined_optimizer(dense_optimizer)
    judge = nn.functional.binary_cross_entropy_with_logits
    for number in range(arguments.passes):
        losses = []
        for features, labels in log.batches(log.train, seed=1_000 * arguments.seed + number):
            optimizer.zero_grad()
            loss = judge(parallel(features), labels)
            loss.backward()
            parallel.sync()
            optimizer.step()
            losses.append(loss.detach())
        loss = mean_over_ranks(losses)
        if dist.get_rank() == 0:
            print(f"pass {number + 1}: loss {loss:.4f}")

    parallel.eval()
    with torch.no_grad():
        pairs = [(parallel(features), labels) for features, labels in log.batches(log.held_out, 0)]
    loss = mean_over_ranks([judge(scores, labels) for scores, labels in pairs])
    rate = mean_over_ranks([labels.mean() for _, labels in pairs])
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    if dist.get_rank() == 0:
        options = {name: value for name, value in vars(arguments).items() if name != "folder"}
        print(json.dumps({**options, "ne": loss / entropy}))
        print("done")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
