"""Balance and distinct ids per rank for several deals.

    python -m tests.support.sample_balance

prints the table of docs/guides/balanced_batches.md: 4 ranks, 1,024 samples each, drawn from seed 0.
Nothing is trained, and no step is timed.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_2dsp.samples.deal import Ranks, SampleIds, bring_together, deal_samples, loads_of

NUM_RANKS, NUM_SAMPLES = 4, 4096
TOLERANCES = (0.01, 0.05, 0.2)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Data:
    """Samples of one kind."""

    name: str
    costs: npt.NDArray[np.float64]
    samples: SampleIds


def zipf(rng: np.random.Generator, count: int, num_rows: int, exponent: float) -> Ints:
    """Draw rows by popularity."""
    weights = 1 / np.arange(1, num_rows + 1) ** exponent
    return rng.choice(num_rows, count, p=weights / weights.sum())


def clicks(rng: np.random.Generator) -> Data:
    """Draw 26 features with one id each; all samples cost the same."""
    ids = [zipf(rng, NUM_SAMPLES, 20_000, 1.05) + number * 10**6 for number in range(26)]
    samples = SampleIds(np.stack(ids, axis=1).reshape(-1), np.full(NUM_SAMPLES, 26))
    return Data("26 one-hot features, Zipf 1.05", np.ones(NUM_SAMPLES), samples)


def sessions(rng: np.random.Generator, *, grow: bool) -> Data:
    """Draw eight samples per user with the user's history, which may grow by sample."""
    num_users = NUM_SAMPLES // 8
    users = rng.permutation(np.repeat(np.arange(num_users), 8))
    most = np.minimum(rng.zipf(1.4, num_users) * 4, 200) if not grow else np.full(num_users, 60)
    histories = [zipf(rng, count, 100_000, 0.8) for count in most]
    seen = np.zeros(num_users, dtype=int)
    parts = []
    for user in users:
        seen[user] += 1
        history = histories[user]
        parts.append(history[: 4 + 6 * seen[user]] if grow else history)
    lengths = np.array([len(part) for part in parts])
    costs = lengths + lengths**2 / 50
    name = "sessions whose history grows" if grow else "sessions, one history for each user"
    return Data(name, costs.astype(float), SampleIds(np.concatenate(parts), lengths))


def imbalance(ranks: Ranks, data: Data) -> float:
    """Return the most loaded rank's load relative to the mean."""
    loads = loads_of(ranks, data.costs, NUM_RANKS)
    return max(loads) / (sum(loads) / NUM_RANKS)


def timed(call: Callable[[], Ranks]) -> tuple[Ranks, float]:
    """Return a call's result, and its processor time in milliseconds."""
    start = time.process_time()
    ranks = call()
    return ranks, 1000 * (time.process_time() - start)


def rows_of(data: Data) -> list[str]:
    """Return lines of the table."""
    as_read = np.repeat(np.arange(NUM_RANKS), NUM_SAMPLES // NUM_RANKS)
    dealt, milliseconds = timed(lambda: deal_samples(data.costs, NUM_RANKS))
    deals = [("as read", as_read, 0.0), ("dealt", dealt, milliseconds)]
    for tolerance in TOLERANCES:
        together, milliseconds = timed(
            lambda tolerance=tolerance: bring_together(
                dealt, data.costs, data.samples, NUM_RANKS, tolerance
            )
        )
        deals.append((f"ids shared, {tolerance:.0%}", together, milliseconds))
    lines = []
    for name, ranks, milliseconds in deals:
        per_rank = data.samples.num_distinct(ranks) / NUM_RANKS
        lines.append(
            f"| {data.name} | {name} | {imbalance(ranks, data):.3f} | {per_rank:,.0f} | "
            f"{milliseconds:.0f} |"
        )
    return lines


def main() -> None:
    """Print the table."""
    rng = np.random.default_rng(0)
    print("| samples | deal | most loaded / mean | distinct ids per rank | CPU ms |")
    print("| --- | --- | --- | --- | --- |")
    for data in (clicks(rng), sessions(rng, grow=False), sessions(rng, grow=True)):
        print("\n".join(rows_of(data)))


if __name__ == "__main__":
    main()
