"""`BalanceReport`: how even the work of the ranks was, and what it took to make it so."""

import enum
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchrec_2dsp.comms.alarm import agree
from torchrec_2dsp.comms.notice import name_of
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
    """What became of the batches of all ranks, equal on all of them, but for the bytes.

    Example:
        >>> from torchrec_2dsp.samples.dealer import BalanceReport
        >>> step = BalanceReport(num_batches=1, mean_time=10.0, time_before=15.0, time_after=10.5)
        >>> (step + step).imbalance_before, (step + step).imbalance_after
        (1.5, 1.05)
    """

    num_batches: int = 0
    """How many global batches were dealt."""

    num_samples: int = 0
    """How many samples they had."""

    num_moved: int = 0
    """How many samples were given to another rank."""

    num_dropped: int = 0
    """Samples of last batches that had fewer of them than there are ranks."""

    num_bytes: int = 0
    """The bytes of samples that this rank has sent to others."""

    mean_time: float = 0.0
    """The cost of the batches, divided by the speeds of all ranks."""

    time_before: float = 0.0
    """What the slowest rank would have taken with its own samples, added up over the batches."""

    time_after: float = 0.0
    """What the slowest rank takes with the samples that it was given."""

    num_ids_before: int = 0
    """The distinct ids of each rank's own samples, added up, if `shared_ids` looks at them."""

    num_ids_after: int = 0
    """The distinct ids of the samples that each rank was given."""

    @property
    def imbalance_before(self) -> float:
        """How many times the mean the slowest rank would have taken; 1 is even."""
        return self.time_before / self.mean_time if self.mean_time else 1.0

    @property
    def imbalance_after(self) -> float:
        """How many times the mean the slowest rank takes."""
        return self.time_after / self.mean_time if self.mean_time else 1.0

    def __add__(self, other: "BalanceReport") -> "BalanceReport":
        return BalanceReport(
            **{name: value + getattr(other, name) for name, value in vars(self).items()}
        )


class _State(enum.IntEnum):
    """What a rank has for a global batch."""

    BATCH = 0
    ENDED = 1
    """It has had batches, and has none left."""
    NEVER = 2
    """It has had none at all."""
    FAILED = 3


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a rank gives to a global batch."""

    rows: SampleRows | None = None
    """The rank's samples; `None` if it has no batch."""

    costs: torch.Tensor | None = None
    """What each of them costs."""

    ids: SampleIds | None = None
    """The samples' ids, if samples with the same ones are brought together."""

    error: Exception | None = None
    """What happened when the rank took its batch."""

    computed: tuple[float, float] = (0.0, 0.0)
    """The cost that the rank has computed since its last offer, and in how many seconds."""


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """What a rank gets of a global batch."""

    batch: Any
    """The batch; `None` if there were fewer samples than ranks."""

    loss_weight: float
    """What the rank's mean loss counts for."""

    cost: float
    """What the batch costs to compute."""

    report: BalanceReport
    """How the global batch was dealt."""


class Dealer:
    """Deals global batches, in step with the other ranks."""

    def __init__(
        self, group: dist.ProcessGroup, speeds: RankSpeeds | list[float], tolerance: float
    ) -> None:
        self._group, self._speeds, self._tolerance = group, speeds, tolerance
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._last: SampleRows | None = None

    def deal(self, offer: Offer) -> Dealt | None:
        """Deal one global batch; `None` when no rank has a batch left.

        Collectives:
            All-gathers of 48 bytes, of costs, and of ids if they are looked at; then two
            all-to-alls of samples. All are waited for.
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
        """What the others have to know first, in six numbers."""
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
        """Equally large tensors of all ranks, stacked."""
        gathered = own.new_empty(self._num_ranks * len(own), *own.shape[1:])
        dist.all_gather_into_tensor(gathered, own, group=self._group)
        return gathered.view(self._num_ranks, *own.shape)

    def _gather_ragged(self, own: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        """Tensors of all ranks, which have so many elements."""
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
    """How long the slowest rank takes."""
    loads = loads_of(ranks, costs, len(speeds))
    return max(load / speed for load, speed in zip(loads, speeds, strict=True))
