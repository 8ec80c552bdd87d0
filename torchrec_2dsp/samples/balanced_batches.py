"""`BalancedBatches`: batches whose samples are dealt to the ranks by cost."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import record_function

from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import WorldGroups, own_group, world_group
from torchrec_2dsp.errors import ConfigError, InputError, RankError, TwoDError
from torchrec_2dsp.samples.deal import RankSpeeds, SampleCost, SampleIds, check_speeds
from torchrec_2dsp.samples.dealer import BalanceReport, Dealer, Dealt, Offer
from torchrec_2dsp.samples.sample_rows import SampleRows

T = TypeVar("T")

_MEASURED = "measured"
_MIX = 0x9E3779B1
"""An odd number that spreads feature numbers over 32 bits."""


class BalancedBatches(Iterator[T], Generic[T]):
    """Gives all ranks equally many samples with about equal computing cost.

    All ranks' batches form one global batch; each rank gets another part than it has read. With a
    loss that is a mean over samples, training equals that on the batches as read, within float
    rounding: sums come in another order.

    A thread deals and sends batches one step ahead, while ranks compute. Batches end on all ranks
    together, when no rank has samples left. A failing loader is an error on all ranks.

    Args:
        batches: this rank's, on the CPU: TorchRec's `Batch`, or tensors, keyed and jagged tensors
            in dataclasses, dicts, lists or tuples.
        cost: a sample's cost by its length; by default its length.
        lengths: features whose ids count as a sample's length, by default all; or a function that
            returns each sample's length in a batch.
        shared_ids: share by which a rank's cost may grow so that samples with equal ids come
            together, and ranks look up fewer distinct rows; 0 leaves them apart.
        rank_speeds: the ranks' speeds, to which their samples are proportional; or "measured", by
            `note_seconds`. By default all ranks are equally fast.
        smoothing: weight of the newest step in measured speeds, above 0, at most 1.
        add_weight: puts the loss weight into a batch, for pipelines that take batches ahead.
        group: the ranks that share their batches; by default all.

    Collectives:
        An agreement on the settings, and a new process group, once.

    Example::

        cost = tdsp.SampleCost(linear=1.0, quadratic=0.01)
        with tdsp.BalancedBatches(loader, cost=cost, lengths=["history"]) as balanced:
            for batch in balanced:
                optimizer.zero_grad()
                loss = model(batch).mean() * balanced.loss_weight
                loss.backward()
                optimizer.step()
        print(balanced.report.imbalance_before, balanced.report.imbalance_after)
    """

    def __init__(
        self,
        batches: Iterable[T],
        *,
        cost: SampleCost | None = None,
        lengths: Sequence[str] | Callable[[T], torch.Tensor] = (),
        shared_ids: float = 0.0,
        rank_speeds: Sequence[float] | Literal["measured"] | None = None,
        smoothing: float = 0.1,
        add_weight: Callable[[T, float], T] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        parent = group if group is not None else world_group()
        num_ranks = dist.get_world_size(parent)
        with agreeing(parent) as facts:
            _check_settings(shared_ids, rank_speeds, smoothing, num_ranks)
            names = "a function" if callable(lengths) else list(lengths)
            facts["the settings of BalancedBatches"] = (
                f"{cost}, lengths={names}, shared_ids={shared_ids}, rank_speeds={rank_speeds}, "
                f"smoothing={smoothing}"
            )
        self._batches = iter(batches)
        self._cost = cost if cost is not None else SampleCost()
        self._lengths, self._shares_ids, self._add_weight = lengths, shared_ids > 0, add_weight
        self._samples = SampleGroup.of(parent) if num_ranks > 1 else None
        if rank_speeds == _MEASURED:
            speeds: RankSpeeds | list[float] = RankSpeeds(num_ranks, smoothing)
        else:
            speeds = [1.0] * num_ranks if rank_speeds is None else [float(s) for s in rank_speeds]
        if self._samples is not None:
            self._dealer = Dealer(self._samples.group, speeds, shared_ids)
        self._pending: Ahead[Dealt | None] | None = None
        self._error: BaseException | None = None
        self._own_error: Exception | None = None
        self._has_ended = False
        self._given_cost = 0.0
        self._computed = (0.0, 0.0)
        self.loss_weight = 1.0
        """The weight of the last batch's mean loss, since this rank may have more or fewer samples
        than the mean."""
        self.report = BalanceReport()
        """All batches so far."""

    def __next__(self) -> T:
        """Return the next batch.

        Collectives:
            For the batch after it, on a thread: all-gathers: 48 bytes, costs, and ids if
            they matter; two all-to-alls of samples.
        """
        if self._samples is None:
            return self._weighted(self._alone(), 1.0)
        while True:
            if self._error is not None:
                raise self._error
            if self._has_ended:
                raise StopIteration
            if self._pending is None:
                self._pending = self._begin(self._samples)
            dealt = self._settled(self._pending)
            self._pending = None
            if dealt is None:
                self._has_ended = True
                continue
            self.report += dealt.report
            if dealt.batch is not None:
                break
        self._pending = self._begin(self._samples)
        self.loss_weight, self._given_cost = dealt.loss_weight, dealt.cost
        return self._weighted(dealt.batch, dealt.loss_weight)

    def _weighted(self, batch: T, loss_weight: float) -> T:
        return batch if self._add_weight is None else self._add_weight(batch, loss_weight)

    def _alone(self) -> T:
        """Return the only rank's next batch; what several ranks couldn't deal is refused."""
        offer = Offer() if self._has_ended else self._offer()
        if offer.error is not None:
            raise offer.error
        if offer.rows is None:
            raise StopIteration
        return offer.rows.template

    def note_seconds(self, seconds: float) -> None:
        """Report this rank's computing time for the last batch.

        It counts with ``rank_speeds="measured"``. Leave out time spent waiting for others, or all
        ranks look equally slow.
        """
        if not (np.isfinite(seconds) and seconds >= 0):
            raise ConfigError(f"note_seconds({seconds!r}) is no time; use seconds of 0 or more")
        cost, before = self._computed
        self._computed = (cost + self._given_cost, before + seconds)

    def close(self) -> None:
        """Stop giving batches, and wait for the exchange in flight.

        Its batch or error is dropped. Call it on all ranks after the same batch.
        """
        self._has_ended = True
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def __enter__(self) -> "BalancedBatches[T]":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an error the other ranks may never come.
        if error is None:
            self.close()

    def _begin(self, samples: "SampleGroup") -> "Ahead[Dealt | None]":
        """Take a batch here, and deal it on a thread."""
        offer = self._offer()
        self._computed = (0.0, 0.0)
        return samples.start(lambda: self._dealer.deal(offer))

    def _offer(self) -> Offer:
        try:
            batch = next(self._batches)
            rows = SampleRows.of(batch)
            costs = self._cost.of(self._lengths_of(batch, rows))
            ids = _ids_of(rows) if self._shares_ids else None
        except StopIteration:
            return Offer(computed=self._computed)
        except Exception as error:  # Whatever a loader can raise; the others hear of it.
            self._own_error = error
            return Offer(error=error)
        return Offer(rows=rows, costs=costs, ids=ids, computed=self._computed)

    def _lengths_of(self, batch: T, rows: SampleRows) -> torch.Tensor:
        if not callable(self._lengths):
            return rows.lengths(self._lengths)
        lengths = self._lengths(batch)
        if lengths.shape != (rows.num_samples,):
            raise InputError(
                f"lengths() gave a tensor of shape {tuple(lengths.shape)} for {rows.num_samples} "
                "samples; give one length for each"
            )
        return lengths

    def _settled(self, pending: "Ahead[Dealt | None]") -> Dealt | None:
        try:
            with record_function("## wait for samples ##"):
                return pending.result()
        except TwoDError as error:
            self._error = error if self._own_error is None else self._own_error
            raise self._error from (None if self._error is error else error)
        except RuntimeError as error:
            self._error = RankError(f"the samples of other ranks didn't arrive: {error}")
            raise self._error from error


def _check_settings(
    shared_ids: float,
    rank_speeds: Sequence[float] | str | None,
    smoothing: float,
    num_ranks: int,
) -> None:
    if not 0 <= shared_ids < 1:
        raise ConfigError(
            f"BalancedBatches(shared_ids={shared_ids!r}) is no share; use 0, or one below 1"
        )
    if not 0 < smoothing <= 1:
        raise ConfigError(
            f"BalancedBatches(smoothing={smoothing!r}) is no factor; use one above 0, at most 1"
        )
    if rank_speeds is None or rank_speeds == _MEASURED:
        return
    if isinstance(rank_speeds, str) or len(rank_speeds) != num_ranks:
        raise ConfigError(
            f"BalancedBatches(rank_speeds={rank_speeds!r}) doesn't fit {num_ranks} ranks; give a "
            f"speed for each, or {_MEASURED!r}"
        )
    check_speeds(rank_speeds)


def _ids_of(rows: SampleRows) -> SampleIds:
    """Return all features' ids, hashed with their feature to 32 bits."""
    ids, owners = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for number, part in enumerate(rows.jagged):
        if part.contents[0].is_floating_point():
            continue
        num_features = part.lengths.shape[1]
        features = torch.arange(num_features).repeat(rows.num_samples) + (number << 8) + 1
        of_ids = features.repeat_interleave(part.lengths.reshape(-1).long())
        ids.append((part.contents[0].long() + of_ids * _MIX) & 0x7FFFFFFF)
        samples = torch.arange(rows.num_samples)
        owners.append(samples.repeat_interleave(part.lengths.sum(1).long()))
    by_sample, order = torch.cat(owners).sort(stable=True)
    lengths = by_sample.bincount(minlength=rows.num_samples)
    return SampleIds(torch.cat(ids)[order].numpy(), lengths.numpy())


class Ahead(Generic[T]):
    """A call that runs on a thread, and its result or error."""

    def __init__(self, call: Callable[[], T], after: "Ahead[Any] | None") -> None:
        self._call, self._after = call, after
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="balanced batches", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        after, self._after = self._after, None
        if after is not None:
            after.wait()
        try:
            self._result.append(self._call())
        except BaseException as error:  # The thread that asks for the result raises it.
            self._error = error

    def wait(self) -> None:
        """Wait until the call is over and its thread has ended."""
        self._thread.join()

    def result(self) -> T:
        """Wait for the call, and return its result or raise its error."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._result[0]


class SampleGroup:
    """The process group in which samples travel, and the exchanges in flight.

    All ranks start exchanges in one order, and each waits for the one before. So several
    `BalancedBatches` may share it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        accelerator = torch.accelerator.current_accelerator()
        is_gloo = "gloo" in dist.get_backend_config(group)
        device = torch.device("cpu") if is_gloo or accelerator is None else accelerator
        self.group = own_group(group, device, "samples", backend="gloo")
        """Over gloo, since batches are on the CPU."""
        self._last: Ahead[Any] | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "SampleGroup":
        """Return these ranks' group, created on first use.

        Collectives:
            A new group, once.
        """
        shared = WorldGroups.current().shared
        if (cls, group) not in shared:
            shared[cls, group] = cls(group)
        samples: SampleGroup = shared[cls, group]
        return samples

    def start(self, call: Callable[[], T]) -> Ahead[T]:
        """Run a call on a thread, after those that were started before."""
        ahead = Ahead(call, self._last)
        self._last = ahead
        return ahead
