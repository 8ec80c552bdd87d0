"""`StepCost`: a step's predicted seconds in named parts, computed from a group's loads. Pure."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from torchrec_2dsp.cost.calibration import BagCost, Calibration, KernelCost
from torchrec_2dsp.cost.collectives import (
    NOTHING_MOVED,
    CollectiveCost,
    RowBytes,
    Span,
    Traffic,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_from,
    merge_seconds,
    places_to_all,
    reduce_scatter,
    rows_seconds,
)
from torchrec_2dsp.cost.loads import Loads, Ranks
from torchrec_2dsp.cost.table_loads import exchanges_rows
from torchrec_2dsp.cost.workload import DDP_BUCKET_BYTES, Workload
from torchrec_2dsp.plan.sync import (
    GradientSync,
    SyncConfig,
    SyncedRows,
    SyncPolicy,
    WeightSync,
)

_RAW_ID_BYTES = 8
"""An unmapped id's bytes, if ids are hashed; small ids travel in fewer."""

_DOUBT = 0.07
"""Each further message type must shorten the step by this share of its table time. Successive
messages of several types take longer than predicted, and a few percent are within the error."""


@dataclass(frozen=True, kw_only=True)
class NamedParts:
    """Numbers in one unit that add up, in fields whose names end with the unit."""

    unit: ClassVar[str]

    def __add__(self, other: Self) -> Self:
        """Sum part by part."""
        numbers, others = vars(self), vars(other)
        return type(self)(**{name: number + others[name] for name, number in numbers.items()})

    def parts(self) -> Iterator[tuple[str, float]]:
        """Yield names without the unit, and numbers."""
        for name, number in vars(self).items():
            yield name.removesuffix(f"_{self.unit}"), number


@dataclass(frozen=True, kw_only=True)
class StepCost(NamedParts):
    """A step's seconds on the mean rank; `imbalance_s` is what the slowest rank adds.

    Example:
        >>> from torchrec_2dsp.cost.step_cost import StepCost
        >>> cost = StepCost(lookup_s=0.010, forward_exchange_s=0.030, imbalance_s=0.005)
        >>> round(cost.total_s, 6)
        0.045
        >>> max(cost.parts(), key=lambda part: part[1])
        ('forward_exchange', 0.03)
    """

    unit: ClassVar[str] = "s"

    input_exchange_s: float = 0.0
    """Sending ids to the ranks that look them up."""

    lookup_s: float = 0.0
    """Reading rows from tables."""

    host_memory_s: float = 0.0
    """Reading rows from host memory into a GPU's, to look them up and to update them."""

    rows_s: float = 0.0
    """Row exchange's local work: finding distinct ids, putting rows into place, summing
    their gradients."""

    forward_exchange_s: float = 0.0
    """Sending rows, or sums of rows, to the samples."""

    dense_s: float = 0.0
    """The rest of the model, forward and backward."""

    backward_exchange_s: float = 0.0
    """Sending gradients of rows, or of sums of rows, back."""

    dense_exchange_s: float = 0.0
    """The all-reduce of dense gradients, and of data-parallel tables."""

    update_s: float = 0.0
    """Applying gradients to rows."""

    hot_rows_s: float = 0.0
    """Merging and applying hot-row gradients."""

    id_maps_s: float = 0.0
    """Sending all ranks' ids to all id maps, and mapping them."""

    sync_s: float = 0.0
    """Keeping replica peers equal, averaged over all steps."""

    imbalance_s: float = 0.0
    """The time of each phase's slowest rank beyond the mean rank's."""

    stragglers_s: float = 0.0
    """Waiting for the slowest of all ranks, which has no more to do than the others."""

    hidden_s: float = 0.0
    """The time hidden behind other parts, as a number that isn't above zero."""

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return sum(vars(self).values())

    @property
    def compute_s(self) -> float:
        """The parts in which a rank computes."""
        of_rows = self.lookup_s + self.host_memory_s + self.rows_s + self.update_s
        return of_rows + self.dense_s

    @property
    def tables_s(self) -> float:
        """The tables' part of the total: everything but the dense part."""
        return self.total_s - self.dense_s


@dataclass(frozen=True)
class Phases:
    """Prices each part of a step, on the slowest rank."""

    calibration: Calibration
    workload: Workload
    span: Span
    world: Span

    full_duplex: bool = False
    """True if the group's all-to-alls are this package's (gloo only)."""

    def of(self, loads: Loads) -> dict[str, float]:
        """Return each phase's seconds, by the names in `StepCost`."""
        return {
            "input_exchange_s": self._input_s(loads),
            "lookup_s": self._lookup_s(loads),
            "host_memory_s": self._host_memory_s(loads),
            "rows_s": self._rows_s(loads),
            "forward_exchange_s": self._forward_s(loads),
            "dense_s": self.workload.dense.forward_s + self.workload.dense.backward_s,
            "backward_exchange_s": self._backward_s(loads),
            "dense_exchange_s": self._dense_exchange_s(loads),
            "update_s": self._update_s(loads),
        }

    def beside_s(self, loads: Loads) -> float:
        """Return the part of the output exchange that may overlap with computing."""
        seconds = 0.0
        for beside, rows, across in (
            (loads.early_from, loads.rows_from, loads.across_from),
            (loads.lagging_to, loads.rows_to, loads.across_to),
        ):
            if _any(beside):
                exchanged_s = self._exchange_s(rows) + self._between_places_s(across)
                seconds += exchanged_s * np.sum(beside) / (np.sum(rows) + np.sum(across))
        return float(seconds)

    def _input_s(self, loads: Loads) -> float:
        """Price three messages: id counts, bag lengths, and ids."""
        if not loads.types:
            return 0.0
        short = self._short_s
        return self._turns_s(
            short + len(loads.types) * (short + self._exchange_s(loads.ids_to) / len(loads.types))
        )

    def _lookup_s(self, loads: Loads) -> float:
        kernels = self.calibration.kernels
        return _kernels_s(loads, kernels.lookup, kernels.row_lookup)

    def _host_memory_s(self, loads: Loads) -> float:
        bus = self.calibration.kernels.host_memory
        if bus is None:
            return 0.0
        return _most(bus.seconds(loads.bus_rows, loads.bus_bytes))

    def _update_s(self, loads: Loads) -> float:
        kernels = self.calibration.kernels
        dense = kernels.dense_update.seconds(0.0, loads.dense_bytes)
        return _kernels_s(loads, kernels.update, kernels.row_update, dense)

    def _rows_s(self, loads: Loads) -> float:
        kernels = self.calibration.kernels
        find_s = kernels.find.seconds(loads.found_ids + loads.beside_ids, 0.0)
        pool_s = kernels.pool.seconds(loads.moved_rows, loads.moved_bytes + loads.early_bytes)
        add_s = kernels.add.seconds(loads.added_rows, loads.added_bytes + loads.lagging_bytes)
        _, rows = _num_kernels(loads)
        calls_s = rows * (kernels.find.base_s + kernels.pool.base_s + kernels.add.base_s)
        return _most(find_s + pool_s + add_s + loads.encoding_s) + calls_s

    def _forward_s(self, loads: Loads) -> float:
        scatter = self.calibration.collectives.reduce_scatter
        inside = self.span.inside_hosts()
        return self._turns_s(
            self._exchange_s(loads.pooled_from),
            self._exchange_s(loads.rows_from),
            _brought_s(scatter, reduce_scatter, self.span, loads.scattered),
            _brought_s(scatter, reduce_scatter, inside, loads.host_scattered),
            self._between_places_s(loads.across_from),
            self._in_host_s(loads.host_rows_from),
            self._apart_s(loads, loads.early_from),
        ) + self._hops_s(loads.across_from)

    def _backward_s(self, loads: Loads) -> float:
        gather = self.calibration.collectives.all_gather
        inside = self.span.inside_hosts()
        return self._turns_s(
            self._exchange_s(loads.pooled_to),
            self._exchange_s(loads.rows_to),
            _brought_s(gather, all_gather, self.span, loads.gathered),
            _brought_s(gather, all_gather, inside, loads.host_gathered),
            self._between_places_s(loads.across_to),
            self._in_host_s(loads.host_rows_to),
            self._apart_s(loads, loads.lagging_to),
        ) + self._hops_s(loads.across_to)

    def _dense_exchange_s(self, loads: Loads) -> float:
        """Price an all-reduce for the dense part, and another for data-parallel tables."""
        reduce = self.calibration.collectives.all_reduce
        messages = self.workload.dense.gradient_bytes, _most(loads.all_reduced_bytes)
        seconds = (
            self._turns_s(reduce.seconds(self.world, all_reduce(self.world, num_bytes)))
            for num_bytes in messages
            if num_bytes
        )
        return sum(seconds, 0.0)

    def id_maps_s(self) -> float:
        """Price id maps' work before ids travel, which nothing hides: messages and a search.

        As if all ids were distinct, which they are in the worst case. On one processor TorchRec's
        maps took 0.09 to 0.13 us for each of the world's ids, and 0.05 to 0.07 us for each sorted
        row; finding distinct ids took 0.05 us per id.
        """
        work = self.workload.id_maps
        num_ids = self.workload.batch_size * work.ids_per_sample
        if not num_ids:
            return 0.0
        gather, exchange = (
            self.calibration.collectives.all_gather,
            self.calibration.all_to_all(full_duplex=False),
        )
        # Each id goes to its map's owner, who changes the map; then all ranks search.
        num_ranks = self.world.num_ranks
        sent = all_to_all(self.world, num_ids / num_ranks * _RAW_ID_BYTES)
        changes = (num_ids * num_ranks + work.num_rows) / min(num_ranks, work.num_maps)
        find = self.calibration.kernels.find
        return (
            self._turns_s(
                gather.seconds(self.world, NOTHING_MOVED), exchange.seconds(self.world, sent)
            )
            + find.base_s
            + find.seconds(2 * num_ids + changes, 0.0)
        )

    def hot_rows_s(self, loads: Loads) -> float:
        """Price lookups of hot rows, their gradients' merge over the world, and their update."""
        if not _any(loads.hot_ids):
            return 0.0
        kernels = self.calibration.kernels
        ids, id_bytes = _most(loads.hot_ids), _most(loads.hot_id_bytes)
        rows = RowBytes(
            _most(loads.hot_bytes_of_rank),
            _most(loads.hot_bytes_of_host),
            _most(loads.hot_bytes_of_all),
        )
        return (
            kernels.pool.base_s
            + kernels.pool.seconds(ids, id_bytes)
            + kernels.find.seconds(ids, 0.0)
            + kernels.add.seconds(ids, id_bytes)
            + self._merged_s(rows, self.world)
            + self._applied_s(_most(loads.hot_rows), rows.of_all)
        )

    def sync_s(self, loads: Loads, peers: Span, sync: SyncConfig) -> tuple[float, float]:
        """Price the peers' exchange and update, averaged over steps."""
        if peers.num_ranks == 1:
            return 0.0, 0.0
        if isinstance(sync, GradientSync):
            rows = RowBytes(
                _most(loads.peer_bytes_of_rank),
                _most(loads.peer_bytes_of_host),
                _most(loads.peer_bytes_of_all),
            )
            applied_s = self._applied_s(_most(loads.peer_rows), _most(loads.peer_row_bytes))
            return self._merged_s(rows, peers), applied_s
        of_weights = loads.averaged_rows, loads.averaged_bytes, loads.averaged_whole_bytes
        weights = self._average_s(of_weights, peers, sync, sync.policy)
        if sync.moments_policy is None:
            return weights
        of_moments = loads.moment_rows, loads.moment_bytes, loads.moment_whole_bytes
        moments = self._average_s(of_moments, peers, sync, sync.moments_policy)
        return weights[0] + moments[0], weights[1] + moments[1]

    def _average_s(
        self,
        averaged: tuple[Ranks | float, Ranks | float, Ranks | float],
        peers: Span,
        sync: WeightSync,
        policy: SyncPolicy,
    ) -> tuple[float, float]:
        num_steps = policy.steps_per_sync
        num_rows, num_bytes, whole_bytes = map(_most, averaged)
        if math.isinf(num_steps) or not whole_bytes:
            return 0.0, 0.0
        reduce = self.calibration.collectives.all_reduce
        whole_s = reduce.seconds(peers, all_reduce(peers, whole_bytes))
        if sync.rows is SyncedRows.ALL:
            return whole_s / num_steps, 0.0
        gathered_s = self.calibration.turn_s
        if num_bytes:
            gathered_s += rows_seconds(self._rows_all_to_all, peers, num_bytes)
        applied_s = self._applied_s(num_rows * peers.num_ranks, num_bytes * peers.num_ranks)
        if whole_s < gathered_s + applied_s:
            return whole_s / num_steps, 0.0
        return gathered_s / num_steps, applied_s / num_steps

    def _merged_s(self, rows: RowBytes, span: Span) -> float:
        """Price a merge, with the announcement before it, and the turn for both."""
        if not rows.of_all:
            return 0.0
        announced_s = self.calibration.collectives.all_gather.seconds(span, NOTHING_MOVED)
        merged_s = merge_seconds(rows, span, self._rows_all_to_all)
        return self.calibration.turn_s + announced_s + merged_s

    def _applied_s(self, num_rows: float, num_bytes: float) -> float:
        return self.calibration.kernels.row_update.seconds(num_rows, num_bytes)

    @property
    def _rows_all_to_all(self) -> CollectiveCost:
        """The cost of sending copies' rows, in separate groups: gloo's are full duplex."""
        return self.calibration.all_to_all(full_duplex=True)

    @property
    def _all_to_all(self) -> CollectiveCost:
        return self.calibration.all_to_all(full_duplex=self.full_duplex)

    @property
    def _short_s(self) -> float:
        """Seconds for an almost empty all-to-all."""
        return self._all_to_all.seconds(self.span, NOTHING_MOVED)

    def _hops_s(self, across: Ranks | float) -> float:
        """Return the second wait for messages in two hops, inside hosts and between them."""
        return self.calibration.turn_s if _any(across) else 0.0

    def _turns_s(self, *exchanges: float) -> float:
        """Sum successive exchanges; ranks come to the first one from computing."""
        return sum(exchanges) + (self.calibration.turn_s if any(exchanges) else 0.0)

    def _apart_s(self, loads: Loads, beside: Ranks | float) -> float:
        """Price each table type's extra messages, and those that overlap with computing."""
        together = sum(
            _any(exchanged)
            for exchanged in (
                loads.pooled_from,
                loads.rows_from,
                loads.scattered,
                loads.host_scattered,
                loads.host_rows_from,
            )
        )
        # Rows in two halves: one more message, and one that tells each row's half.
        halves = 2 if _any(beside) else 0
        return (max(0, len(loads.types) - int(together)) + halves) * self._short_s

    def _exchange_s(self, to_each: Ranks | float) -> float:
        if not _any(to_each):
            return 0.0
        return self._all_to_all.seconds(self.span, all_to_all_from(self.span, to_each))

    def _between_places_s(self, to_each: Ranks | float) -> float:
        if not _any(to_each):
            return 0.0
        moved = places_to_all(self.span, to_each)
        return self._all_to_all.seconds(self.span.across_hosts(), moved)

    def _in_host_s(self, to_each: Ranks | float) -> float:
        return _brought_s(self._all_to_all, all_to_all, self.span.inside_hosts(), to_each)


def _brought_s(
    cost: CollectiveCost,
    moved: Callable[[Span, float], Traffic],
    span: Span,
    brought: Ranks | float,
) -> float:
    """Price a collective by the input of the rank that has most."""
    return cost.seconds(span, moved(span, _most(brought))) if _any(brought) else 0.0


def _kernels_s(
    loads: Loads, on_bags: BagCost, on_rows: KernelCost, dense: Ranks | float = 0.0
) -> float:
    """Price the kernels for bags and for rows, and additional work on whole tables."""
    of_bags = on_bags.of_bags(
        loads.lookup_ids,
        loads.lookup_bytes,
        vector_bytes=loads.lookup_vector_bytes,
        row_bytes=loads.lookup_row_bytes,
    )
    of_rows = on_rows.seconds(loads.owned_ids, loads.owned_bytes)
    bags, rows = _num_kernels(loads)
    return _most(of_bags + of_rows + dense) + (bags * on_bags.base_s + rows * on_rows.base_s)


def _num_kernels(loads: Loads) -> tuple[int, int]:
    """Count the kernels that sum bags, and those that look up rows."""
    rows = sum(exchanges_rows(message_type) for message_type in loads.types)
    return len(loads.types) - rows + _any(loads.dense_bytes), rows


def before_last_bucket(
    exchange_s: float, gradient_bytes: float, bucket_bytes: float = DDP_BUCKET_BYTES
) -> float:
    """Return the seconds of a gradient exchange that DDP starts before the backward ends."""
    num_buckets = max(1, math.ceil(gradient_bytes / bucket_bytes))
    return exchange_s * (1 - 1 / num_buckets)


def _most(values: Ranks | float) -> float:
    return float(values.max()) if isinstance(values, np.ndarray) else values


def _any(values: Ranks | float) -> bool:
    return bool(values.any()) if isinstance(values, np.ndarray) else values != 0


def rated(cost: StepCost, types: Collection[str], in_world: Collection[str] = ()) -> float:
    """Return the seconds by which the search compares steps: more for each further message type.

    The empty type stands for data-parallel tables, whose gradients are reduced. Tables with one
    copy ``in_world`` send their own messages.
    """
    num_types = len(types) + len(in_world)
    return cost.total_s + _DOUBT * max(0, num_types - 1) * cost.tables_s
