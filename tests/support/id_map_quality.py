"""Measure the benefit of id maps over hashing, on a stream of drifting ids.

    python -m tests.support.id_map_quality [--steps 25000] [--seeds 3]

Clicks depend on each id's weight. Twice as many ids are in use as the table has rows, and half
the ids change every twentieth of the stream. Each batch is predicted before it is trained. Prints
the normalised entropy over the last four fifths, for each way to map ids to rows: a hash function
that spends the map's memory on more rows, TorchRec's maps with each policy, and one row per id.
"""

import argparse
from collections.abc import Callable

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.support.drifting_ids import Stream
from tests.support.oracle import row_wise_adagrad_
from torchrec_2dsp.programs.train.record import normalized_entropy

NUM_ROWS, DIM, BATCH = 50_000, 16, 256
RATES = (0.002, 0.005, 0.01, 0.02, 0.05)
"""Learning rates, of which each way gets its best."""
MAP_BYTES, ROW_BYTES = 24, 4 * DIM + 4
POLICIES = {
    "LFU": LFU_EvictionPolicy,
    "LRU": LRU_EvictionPolicy,
    "DistanceLFU": lambda: DistanceLFU_EvictionPolicy(decay_exponent=1.0),
}
Rows = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Gives rows to a batch's ids, and says which rows now belong to other ids."""


def mixed(ids: torch.Tensor) -> torch.Tensor:
    """Hash ids to pseudorandom numbers below 2**31."""
    ids = (ids ^ (ids >> 31)) * 0x7FB5D329728EA185
    ids = (ids ^ (ids >> 27)) * 0x1B03738712FAD5C9
    return (ids ^ (ids >> 33)) & (2**31 - 1)


def hashed(ids: torch.Tensor) -> tuple[torch.Tensor, None]:
    return mixed(ids) % (NUM_ROWS * (ROW_BYTES + MAP_BYTES) // ROW_BYTES), None


def mapped(policy: str, interval: int) -> Rows:
    """Return a function that maps ids to rows by one of TorchRec's maps."""
    id_map = MCHManagedCollisionModule(
        zch_size=NUM_ROWS,
        device=torch.device("cpu"),
        eviction_policy=POLICIES[policy](),
        eviction_interval=interval,
    )

    def rows_of(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        features = {"t": JaggedTensor(ids, lengths=torch.ones_like(ids))}
        features = id_map.preprocess(features)
        id_map.profile(features)
        return id_map.remap(features)["t"].values(), id_map.evict()

    return rows_of


def entropy(stream: Stream, rows_of: Rows, num_rows: int, seed: int, lr: float) -> float:
    """Train on the stream; return the normalised entropy of predictions before each update."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(num_rows, DIM, generator=generator) * 0.01
    moment, head = torch.zeros(num_rows), torch.randn(DIM, generator=generator)
    bias, losses, num_clicks = torch.zeros(()), [], 0.0
    for step in range(stream.num_steps):
        ids = stream.ids(step, step * 1_000 + seed, BATCH)
        rates = torch.sigmoid(mixed(ids ^ seed) / 2**31 * 6 - 4.5)
        clicks = (torch.rand(BATCH, generator=generator) < rates).float()
        rows, evicted = rows_of(ids)
        if evicted is not None and evicted.numel():
            table[evicted] = torch.randn(evicted.numel(), DIM, generator=generator) * 0.01
            moment[evicted] = 0
        distinct, places = rows.unique(return_inverse=True)
        weights = table[distinct]
        logits = weights[places] @ head + bias
        if step >= stream.num_steps // 5:
            losses.append(binary_cross_entropy_with_logits(logits, clicks).item())
            num_clicks += clicks.sum().item()
        errors = (logits.sigmoid() - clicks) / BATCH
        grads = torch.zeros_like(weights).index_add_(0, places, errors.unsqueeze(1) * head)
        moments = moment[distinct]
        row_wise_adagrad_(weights, grads, moments, lr=lr, eps=1e-8)
        table[distinct], moment[distinct] = weights, moments
        head = head - lr * (errors.unsqueeze(1) * weights[places]).sum(0)
        bias = bias - lr * errors.sum()
    return normalized_entropy(sum(losses) / len(losses), num_clicks / len(losses) / BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=25_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--interval", type=int, default=50, help="steps between evictions")
    arguments = parser.parse_args()
    stream = Stream(arguments.steps, NUM_ROWS, arguments.interval)
    for name in ("hashing", *POLICIES, "a row for every id"):
        by_rate = {}
        for rate in RATES:
            by_rate[rate] = values = []
            for seed in range(arguments.seeds):
                rows_of = {"hashing": hashed, "a row for every id": lambda ids: (ids, None)}.get(
                    name
                )
                rows_of = rows_of or mapped(name, arguments.interval)
                values.append(entropy(stream, rows_of, stream.num_ids, seed, rate))
        best = min(by_rate, key=lambda rate: sum(by_rate[rate]))
        print(f"{name}, lr {best}:", *(f"{value:.5f}" for value in by_rate[best]), flush=True)


if __name__ == "__main__":
    main()
