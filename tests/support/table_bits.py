"""Measure how storing tables in fewer bits affects held-out NE, unsharded, in one process.

After each update the changed rows are rounded to their storage type. Every type sees the same
samples, so its NE is compared with fp32's seed by seed.

    nice -n 10 python -m tests.support.table_bits --seeds 5 --steps 400
"""

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torchrec.datasets.utils import Batch

from torchrec_2dsp.optim import RuleArguments, row_wise_adagrad_step
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.config.sections import ModelConfig
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig, make_batch
from torchrec_2dsp.programs.models.model import build_model
from torchrec_2dsp.programs.models.planned import true_access
from torchrec_2dsp.programs.study import Gap
from torchrec_2dsp.programs.train.record import normalized_entropy
from torchrec_2dsp.report.table import Table
from torchrec_2dsp.rows.eight_bits import decoded, encoded
from torchrec_2dsp.rows.rounding import RoundedTable, rounded

BATCH_SIZE, EVAL_STEPS, LR, DENSE_LR, EPS = 1024, 100, 0.05, 0.02, 1e-8
NAMES = ("user", "item", "page", "query", "city", "device", "history", "terms")
HOT_SHARE = 0.05

Draws = torch.Tensor | None
Store = Callable[[torch.Tensor, Draws], torch.Tensor]
"""Returns float32 rows as a type stores them, rounded to the nearest or by 16 random bits each."""


def as_half(dtype: torch.dtype) -> Store:
    """Return a `Store` for a 16-bit floating-point type."""
    return lambda rows, draws: (
        rows.to(dtype) if draws is None else rounded(rows, draws, dtype)
    ).float()


def as_int8(rows: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Store rows in 8 bits."""
    return decoded(encoded(rows, draws))


@dataclass(frozen=True)
class Variant:
    """A way to store tables."""

    name: str
    store: Store | None = None
    is_random: bool = False
    keeps_hot: bool = False
    """True if the hottest rows stay in fp32."""

    is_reversed: bool = False
    """True if a batch's samples come in reverse, which only changes the order of additions."""


VARIANTS = (
    Variant("fp32"),
    Variant("fp32, samples in reverse", is_reversed=True),
    *(
        Variant(f"{name}, {'at random' if is_random else 'to the nearest'}", store, is_random)
        for name, store in (
            ("fp16", as_half(torch.float16)),
            ("bf16", as_half(torch.bfloat16)),
            ("int8", as_int8),
        )
        for is_random in (False, True)
    ),
    *(
        Variant(f"int8, {way}; hottest 5 % in fp32", as_int8, is_random, keeps_hot=True)
        for way, is_random in (("to the nearest", False), ("at random", True))
    ),
)


def data_with(seed: int) -> SyntheticConfig:
    """Return clicks on eight Zipf-distributed features, from a planted logistic model."""
    features = [
        {"name": name, "num_rows": 20_000, "skew": 1.05, "max_ids": 3 if name == "terms" else 1}
        for name in NAMES
    ]
    return make_config(SyntheticConfig, {"num_dense": 4, "features": features, "seed": seed})


class Trained:
    """A DLRM whose tables are stored in a variant's way."""

    def __init__(self, data: SyntheticConfig, variant: Variant, seed: int) -> None:
        self._variant, self._seed, self._step = variant, seed, 0
        model = ModelConfig(dim=32, dense_layers=(32,), over_layers=(64,), seed=seed)
        self.model = build_model(data.dataset(), model)
        named = dict(self.model.named_parameters())
        self._tables = {
            name.split(".")[-2]: weight
            for name, weight in named.items()
            if "embedding_bags" in name
        }
        dense = [weight for name, weight in named.items() if "embedding_bags" not in name]
        self._dense = torch.optim.Adagrad(dense, lr=DENSE_LR)
        self._moments = {name: torch.zeros(len(rows)) for name, rows in self._tables.items()}
        access = true_access(data)
        self._is_hot = {}
        for name, weight in self._tables.items():
            num_hot = int(HOT_SHARE * len(weight)) if variant.keeps_hot else 0
            is_hot = torch.zeros(len(weight), dtype=torch.bool)
            is_hot[torch.as_tensor(access[name].rows[:num_hot].copy())] = True
            self._is_hot[name] = is_hot
            self._write(name, torch.arange(len(weight)), weight.detach().clone())

    @torch.no_grad()
    def _write(self, name: str, rows: torch.Tensor, values: torch.Tensor) -> None:
        variant, stored = self._variant, values
        if variant.store is not None:
            table = RoundedTable(name, 0, lambda numbers: numbers)
            key = {"seed": self._seed, "step": self._step}
            draws = table.draws(rows, values.shape[1], **key) if variant.is_random else None
            stored = torch.where(
                self._is_hot[name][rows, None], values, variant.store(values, draws)
            )
        self._tables[name].index_copy_(0, rows, stored)

    def train(self, batch: Batch) -> None:
        """Train one step."""
        self._step += 1
        self.model.zero_grad()
        self.model(batch)[0].backward()
        self._dense.step()
        args = RuleArguments(
            lr=LR, eps=EPS, beta1=0.0, beta2=0.0, weight_decay=0.0, iteration=self._step
        )
        for number, (name, weight) in enumerate(self._tables.items()):
            assert weight.grad is not None
            rows = batch.sparse_features[NAMES[number]].values().unique()
            moments, values = self._moments[name][rows], weight.detach()[rows]
            change = row_wise_adagrad_step(
                weight.grad[rows], moments, weights=lambda values=values: values, args=args
            )
            self._moments[name][rows] = moments
            self._write(name, rows, values - change)

    @torch.no_grad()
    def entropy(self, batches: list[Batch]) -> float:
        """Return the normalised entropy on held-out batches."""
        losses = [float(self.model(batch)[0]) for batch in batches]
        rate = float(torch.cat([batch.labels for batch in batches]).mean())
        return normalized_entropy(statistics.fmean(losses), rate)


def batches_of(
    data: SyntheticConfig, split: Split, count: int, *, reverse: bool
) -> Iterator[Batch]:
    """Yield batches; with ``reverse``, each has its samples in reverse order."""
    for step in range(count):
        batch = make_batch(data, step=step, global_batch_size=BATCH_SIZE, split=split)
        if reverse:
            order = torch.arange(BATCH_SIZE - 1, -1, -1)
            features = batch.sparse_features
            places = torch.cat([order + BATCH_SIZE * key for key in range(len(features.keys()))])
            bags = features.values().split(features.lengths().tolist())
            batch = Batch(
                batch.dense_features[order],
                type(features)(
                    keys=features.keys(),
                    values=torch.cat([bags[place] for place in places.tolist()]),
                    lengths=features.lengths()[places],
                ),
                batch.labels[order],
            )
        yield batch


def entropies(seed: int, num_steps: int) -> dict[str, float]:
    """Train all variants on the same samples, side by side."""
    data = data_with(seed)
    trained = {variant: Trained(data, variant, seed) for variant in VARIANTS}
    streams = [batches_of(data, Split.TRAIN, num_steps, reverse=way) for way in (False, True)]
    for batches in zip(*streams, strict=True):
        for variant, run in trained.items():
            run.train(batches[variant.is_reversed])
    held_out = list(batches_of(data, Split.EVAL, EVAL_STEPS, reverse=False))
    return {variant.name: run.entropy(held_out) for variant, run in trained.items()}


def main() -> None:
    """Print a table, and write each seed's NE."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    by_seed = []
    for seed in range(1, arguments.seeds + 1):
        by_seed.append(entropies(seed, arguments.steps))
        print(seed, by_seed[-1], file=sys.stderr, flush=True)
    rows = []
    for name in by_seed[0]:
        values = [entropy[name] for entropy in by_seed]
        gaps = [
            100 * (value / base["fp32"] - 1) for value, base in zip(values, by_seed, strict=True)
        ]
        gap = Gap(name, tuple(values), tuple(gaps))
        low, high = gap.interval
        text = f"{gap.mean:+.3f} [{low:+.3f}, {high:+.3f}]"
        rows.append([name, text, f"{min(gaps):+.3f} to {max(gaps):+.3f}"])
    print(Table(("tables", "NE, %", "smallest to largest"), rows, words={"tables"}).markdown())
    if arguments.output is not None:
        with arguments.output.open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["tables", *(f"seed {seed + 1}" for seed in range(len(by_seed)))])
            lines.writerows([name, *(ne[name] for ne in by_seed)] for name in by_seed[0])


if __name__ == "__main__":
    main()
