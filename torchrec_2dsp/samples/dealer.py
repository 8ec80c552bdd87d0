"""`Dealer`: deals one global batch after the other, and reports how even the work was."""

import enum
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchrec_2dsp.comms.alarm import agree
from torchrec_2dsp.comms.failure_detection import name_of
from torchrec_2dsp.errors import ConfigError, RankError
from torchrec_2dsp.samples.deal import (
    Ranks,
    RankSpeeds,
    SampleIds,
    bring_together,
    deal_samples,
    loads_of,
)
from torchrec_2dsp.samples.sample_rows import SampleRows, send_samples


@dataclass(frozen=True, kw_only=True)
class BalanceReport:
    """The balance of all ranks' batches, equal on all ranks, except for the bytes.

    Example:
        >>> from torchrec_2dsp.samples.dealer import BalanceReport
        >>> step = BalanceReport(num_batches=1, mean_time=10.0, time_before=15.0, time_after=10.5)
        >>> (step + step).imbalance_before, (step + step).imbalance_after
        (1.5, 1.05)
    """

    num_batches: int = 0
    """Global batches dealt."""

    num_samples: int = 0
    num_moved: int = 0
    """Samples given to another rank."""

    num_dropped: int = 0
    """Samples of last batches that had fewer of them than there are ranks."""

    num_bytes: int = 0
    """Bytes of samples that this rank has sent to others."""

    mean_time: float = 0.0
    """The batches' cost divided by all ranks' speeds."""

    time_before: float = 0.0
    """The slowest rank's time with its own samples, added up over the batches."""

    time_after: float = 0.0
    """The slowest rank's time with the samples dealt to it."""

    num_ids_before: int = 0
    """Distinct ids in each rank's own samples, added up, with `shared_ids`."""

    num_ids_after: int = 0
    """Distinct ids in the samples dealt to each rank."""

    @property
    def imbalance_before(self) -> float:
        """The slowest rank's time before, relative to the mean; 1 is even."""
        return self.time_before / self.mean_time if self.mean_time else 1.0

    @property
    def imbalance_after(self) -> float:
        """The slowest rank's time after, relative to the mean."""
        return self.time_after / self.mean_time if self.mean_time else 1.0

    def __add__(self, other: "BalanceReport") -> "BalanceReport":
        return BalanceReport(
            **{name: value + getattr(other, name) for name, value in vars(self).items()}
        )


class _State(enum.IntEnum):
    """A rank's part in a global batch."""

    BATCH = 0
    ENDED = 1
    """Its batches have ended."""
    NEVER = 2
    """It never had a batch."""
    FAILED = 3


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A rank's contribution to a global batch."""

    rows: SampleRows | None = None
    """`None` without a batch."""

    costs: torch.Tensor | None = None
    ids: SampleIds | None = None
    """Given if samples with equal ids are brought together."""

    error: Exception | None = None
    """The error when the rank took its batch."""

    computed: tuple[float, float] = (0.0, 0.0)
    """The cost computed since the last offer, and its seconds."""


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """A rank's share of a global batch."""

    batch: Any
    """`None` if there were fewer samples than ranks."""

    loss_weight: float
    cost: float
    report: BalanceReport


class Dealer:
    """Deals global batches, in step with the other ranks."""

    def __init__(
        self, group: dist.ProcessGroup, speeds: RankSpeeds | list[float], tolerance: float
    ) -> None:
        self._group, self._speeds, self._tolerance = group, speeds, tolerance
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._last: SampleRows | None = None

    def deal(self, offer: Offer) -> Dealt | None:
        """Deal one global batch; return `None` when no rank has a batch left.

        Collectives:
            All-gathers: 48 bytes, costs, and ids if they matter; then two all-to-alls of
            samples. All are waited for.
        """
        headers = self._gather(self._header(offer))
        states = headers[:, 0].tolist()
        self._raise_if_failed(states, offer)
        if all(state == _State.ENDED or state == _State.NEVER for state in states):
            return None
        self._check_forms(headers, offer)
        own = offer.rows if offer.rows is not None else self._forms_last().none()
        self._last = own
        counts = headers[:, 1].tolist()
        speeds = self._new_speeds(headers)
        total = sum(counts)
        if total < self._num_ranks:
            return Dealt(
                batch=None, loss_weight=0.0, cost=0.0, report=BalanceReport(num_dropped=total)
            )
        costs = offer.costs if offer.costs is not None else torch.empty(0, dtype=torch.float64)
        all_costs = torch.cat(self._gather_ragged(costs, counts)).numpy()
        before = np.repeat(np.arange(self._num_ranks), counts)
        ranks = deal_samples(all_costs, self._num_ranks, speeds)
        num_ids = (0, 0)
        if self._tolerance:
            samples = self._gather_ids(offer, counts, headers[:, 2].tolist())
            ranks = bring_together(ranks, all_costs, samples, self._num_ranks, self._tolerance)
            num_ids = (samples.num_distinct(before), samples.num_distinct(ranks))
        start = sum(counts[: self._rank])
        receivers = torch.from_numpy(ranks[start : start + own.num_samples])
        arriving = np.bincount(before[ranks == self._rank], minlength=self._num_ranks).tolist()
        batch, num_bytes = send_samples(own, receivers, arriving, self._group)
        loads = loads_of(ranks, all_costs, self._num_ranks)
        return Dealt(
            batch=batch,
            loss_weight=sum(arriving) * self._num_ranks / total,
            cost=loads[self._rank],
            report=BalanceReport(
                num_batches=1,
                num_samples=total,
                num_moved=int((ranks != before).sum()),
                num_bytes=num_bytes,
                mean_time=float(all_costs.sum()) / sum(speeds),
                time_before=_slowest(before, all_costs, speeds),
                time_after=_slowest(ranks, all_costs, speeds),
                num_ids_before=num_ids[0],
                num_ids_after=num_ids[1],
            ),
        )

    def _header(self, offer: Offer) -> torch.Tensor:
        """Return what the others must know first, in six numbers."""
        state = _State.BATCH
        if offer.error is not None:
            state = _State.FAILED
        elif offer.rows is None:
            state = _State.NEVER if self._last is None else _State.ENDED
        rows = offer.rows if offer.rows is not None else self._last
        form = hashlib.sha256(rows.form.encode()).digest() if rows is not None else bytes(7)
        num_ids = len(offer.ids.ids) if offer.ids is not None else 0
        num_samples = offer.rows.num_samples if offer.rows is not None else 0
        numbers = [int(state), num_samples, num_ids, int.from_bytes(form[:7], "big")]
        computed = torch.tensor(offer.computed, dtype=torch.float64).view(torch.int64)
        return torch.cat([torch.tensor(numbers), computed])

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        """Stack equally large tensors from all ranks."""
        gathered = own.new_empty(self._num_ranks * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own, group=self._group)
        return gathered.view(self._num_ranks, *own.shape)

    def _gather_ragged(self, own: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        """Gather tensors with these sizes from all ranks."""
        padded = own.new_zeros(max(counts))
        padded[: len(own)] = own
        gathered = self._gather(padded)
        return [part[:count] for part, count in zip(gathered, counts, strict=True)]

    def _gather_ids(self, offer: Offer, counts: list[int], num_ids: list[int]) -> SampleIds:
        ids = torch.from_numpy(offer.ids.ids if offer.ids else np.empty(0, np.int64))
        lengths = torch.from_numpy(offer.ids.lengths if offer.ids else np.empty(0, np.int64))
        return SampleIds(
            torch.cat(self._gather_ragged(ids.int(), num_ids)).long().numpy(),
            torch.cat(self._gather_ragged(lengths.int(), counts)).long().numpy(),
        )

    def _raise_if_failed(self, states: list[int], offer: Offer) -> None:
        if _State.FAILED in states:
            failed = tuple(rank for rank, state in enumerate(states) if state == _State.FAILED)
            error = None
            if offer.error is not None:
                kind = type(offer.error).__name__
                ranks = dist.get_process_group_ranks(self._group)
                name = name_of(ranks[self._rank])
                text = f"{name} failed as it took its next batch: {kind}: {offer.error}"
                error = RankError(text, tuple(ranks[rank] for rank in failed))
            agree(self._group, error=error)
        if _State.NEVER in states and _State.BATCH in states:
            ranks = dist.get_process_group_ranks(self._group)
            without = [ranks[rank] for rank, state in enumerate(states) if state == _State.NEVER]
            raise ConfigError(
                f"{name_of(*without)} had no batch at all, so the form of a batch is unknown "
                "there; give each rank at least one"
            )

    def _check_forms(self, headers: torch.Tensor, offer: Offer) -> None:
        if len(set(headers[:, 3].tolist())) > 1:
            rows = offer.rows if offer.rows is not None else self._forms_last()
            agree(self._group, facts={"the form of the batches of BalancedBatches": rows.form})

    def _forms_last(self) -> SampleRows:
        assert self._last is not None
        return self._last

    def _new_speeds(self, headers: torch.Tensor) -> list[float]:
        if not isinstance(self._speeds, RankSpeeds):
            return self._speeds
        computed = headers[:, 4:].contiguous().view(torch.float64)
        self._speeds.update(computed[:, 0].tolist(), computed[:, 1].tolist())
        return self._speeds.speeds()


def _slowest(ranks: Ranks, costs: Any, speeds: list[float]) -> float:
    """Return the slowest rank's time."""
    loads = loads_of(ranks, costs, len(speeds))
    return max(load / speed for load, speed in zip(loads, speeds, strict=True))
