"""How many samples each rank gets, by how fast it is. Pure."""

from collections.abc import Sequence

import numpy as np

from torchrec_2dsp.errors import ConfigError


def share_samples(num_samples: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """The number of samples of each rank: in proportion to speeds, at least one, in total all.

    Args:
        num_samples: at least as many as ranks.
        speeds: above 0; only ratios count.

    Example:
        >>> from torchrec_2dsp.samples.shares import share_samples
        >>> share_samples(16, [1.0, 1.0, 0.5, 1.0])
        (5, 5, 2, 4)
    """
    num_ranks = len(speeds)
    if num_samples < num_ranks:
        raise ConfigError(
            f"{num_samples} samples can't be shared by {num_ranks} ranks; each needs at least one"
        )
    check_speeds(speeds)
    # Shares beyond the one that each rank has anyway, so that no share falls below it.
    total = sum(speeds)
    exact = [max(1.0, num_samples * speed / total) for speed in speeds]
    counts = [int(share) for share in exact]
    while (missing := num_samples - sum(counts)) != 0:
        # The rank that is farthest below its share gets one more, or farthest above one less.
        step = 1 if missing > 0 else -1
        gaps = [step * (share - count) for share, count in zip(exact, counts, strict=True)]
        eligible = [rank for rank in range(num_ranks) if counts[rank] + step >= 1]
        best = max(eligible, key=lambda rank: (gaps[rank], -rank))
        counts[best] += step
    return tuple(counts)


def check_speeds(speeds: Sequence[float]) -> None:
    """Raise unless all speeds are finite and above 0."""
    wrong = [speed for speed in speeds if not (np.isfinite(speed) and speed > 0)]
    if wrong:
        raise ConfigError(f"rank_speeds: {wrong[0]!r} is no speed; use finite numbers above 0")


class RankSpeeds:
    """The speed of each rank, from what its batches cost and how long it computed them.

    All ranks are told the same numbers, so they have the same speeds.

    Example:
        >>> from torchrec_2dsp.samples.shares import RankSpeeds
        >>> speeds = RankSpeeds(2, smoothing=0.5)
        >>> speeds.update([8.0, 8.0], [0.1, 0.2])
        >>> [round(speed, 3) for speed in speeds.speeds()]
        [1.333, 0.667]
    """

    def __init__(self, num_ranks: int, smoothing: float) -> None:
        """
        Args:
            num_ranks: how many ranks there are.
            smoothing: what the newest batch counts for, above 0, at most 1.
        """
        self._keep = 1 - smoothing
        self._costs, self._seconds = [0.0] * num_ranks, [0.0] * num_ranks

    def update(self, costs: Sequence[float], seconds: Sequence[float]) -> None:
        """Take in what each rank has computed; zeros of a rank say nothing."""
        for rank, (cost, time) in enumerate(zip(costs, seconds, strict=True)):
            if cost > 0 and time > 0:
                self._costs[rank] = self._keep * self._costs[rank] + cost
                self._seconds[rank] = self._keep * self._seconds[rank] + time

    def speeds(self) -> list[float]:
        """The speeds, 1 on average; ranks that have said nothing are as fast as the average."""
        rates = [
            cost / time if time else 0.0
            for cost, time in zip(self._costs, self._seconds, strict=True)
        ]
        heard = [rate for rate in rates if rate]
        mean = sum(heard) / len(heard) if heard else 1.0
        return [rate / mean if rate else 1.0 for rate in rates]
