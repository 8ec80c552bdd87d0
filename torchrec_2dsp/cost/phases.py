"""`Phases`: seconds of each part of a step, from what the ranks of a group have to do. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from torchrec_2dsp.cost import traffic
from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.coefficients import BagCost, CollectiveCost
from torchrec_2dsp.cost.loads import Loads, Ranks
from torchrec_2dsp.cost.span import Span
from torchrec_2dsp.cost.table_loads import exchanges_rows
from torchrec_2dsp.cost.workload import Workload


@dataclass(frozen=True)
class Phases:
    """Seconds of each part of a step, of the slowest rank."""

    calibration: Calibration
    workload: Workload
    span: Span
    world: Span

    def of(self, loads: Loads) -> dict[str, float]:
        """Seconds of each phase, by the names of `StepCost`."""
        return {
            "input_exchange_s": self._input_s(loads),
            "lookup_s": self._lookup_s(loads),
            "rows_s": self._rows_s(loads),
            "forward_exchange_s": self._forward_s(loads),
            "dense_s": self.workload.dense.forward_s + self.workload.dense.backward_s,
            "backward_exchange_s": self._backward_s(loads),
            "dense_exchange_s": self._dense_exchange_s(loads),
            "update_s": self._update_s(loads),
        }

    @property
    def _all_to_all(self) -> CollectiveCost:
        return self.calibration.all_to_all(full_duplex=self.workload.full_duplex)

    def _input_s(self, loads: Loads) -> float:
        """How many ids there will be, lengths of bags, and ids."""
        if not loads.types:
            return 0.0
        short = self._all_to_all.seconds(self.span, traffic.Traffic(0.0, 0.0))
        return self._turns_s(
            short + len(loads.types) * (short + self._exchange_s(loads.ids_to) / len(loads.types))
        )

    def _lookup_s(self, loads: Loads) -> float:
        kernels = self.calibration.kernels
        of_bags = _of_bags(kernels.lookup, loads)
        of_rows = kernels.row_lookup.seconds(loads.owned_ids, loads.owned_bytes)
        bags, rows = _num_kernels(loads)
        calls_s = bags * kernels.lookup.base_s + rows * kernels.row_lookup.base_s
        return float((of_bags + of_rows).max()) + calls_s

    def _update_s(self, loads: Loads) -> float:
        kernels = self.calibration.kernels
        of_bags = _of_bags(kernels.update, loads)
        of_rows = kernels.row_update.seconds(loads.owned_ids, loads.owned_bytes)
        dense = kernels.dense_update.seconds(np.zeros_like(of_bags), loads.dense_bytes)
        bags, rows = _num_kernels(loads)
        calls_s = bags * kernels.update.base_s + rows * kernels.row_update.base_s
        return float((of_bags + of_rows + dense).max()) + calls_s

    def _rows_s(self, loads: Loads) -> float:
        kernels = self.calibration.kernels
        find_s = kernels.find.seconds(loads.found_ids, 0.0)
        pool_s = kernels.pool.seconds(loads.moved_rows, loads.moved_bytes)
        add_s = kernels.add.seconds(loads.added_rows, loads.added_bytes)
        _, rows = _num_kernels(loads)
        calls_s = rows * (kernels.find.base_s + kernels.pool.base_s + kernels.add.base_s)
        return float((find_s + pool_s + add_s + loads.encoding_s).max()) + calls_s

    def _forward_s(self, loads: Loads) -> float:
        scatter = self.calibration.collectives.reduce_scatter
        return self._turns_s(
            self._exchange_s(loads.pooled_from),
            self._exchange_s(loads.rows_from),
            self._brought_s(scatter, traffic.reduce_scatter, self.span, loads.scattered),
            self._brought_s(
                scatter, traffic.reduce_scatter, self.span.inside_hosts(), loads.host_scattered
            ),
            self._between_places_s(loads.across_from),
            self._in_host_s(loads.host_rows_from),
            self._apart_s(loads, loads.early_from),
        ) + self._hops_s(loads.across_from)

    def _backward_s(self, loads: Loads) -> float:
        gather = self.calibration.collectives.all_gather
        return self._turns_s(
            self._exchange_s(loads.pooled_to),
            self._exchange_s(loads.rows_to),
            self._brought_s(gather, traffic.all_gather, self.span, loads.gathered),
            self._brought_s(
                gather, traffic.all_gather, self.span.inside_hosts(), loads.host_gathered
            ),
            self._between_places_s(loads.across_to),
            self._in_host_s(loads.host_rows_to),
            self._apart_s(loads, loads.lagging_to),
        ) + self._hops_s(loads.across_to)

    def beside_s(self, loads: Loads) -> float:
        """The part of the forward and backward exchange that may travel beside computing."""
        seconds = 0.0
        for beside, rows, across in (
            (loads.early_from, loads.rows_from, loads.across_from),
            (loads.lagging_to, loads.rows_to, loads.across_to),
        ):
            if beside.any():
                exchanged_s = self._exchange_s(rows) + self._between_places_s(across)
                seconds += exchanged_s * beside.sum() / (rows.sum() + across.sum())
        return float(seconds)

    def _hops_s(self, across: Ranks) -> float:
        """The second wait of messages in two hops, inside hosts and between them."""
        return self.calibration.turn_s if across.any() else 0.0

    def _turns_s(self, *exchanges: float) -> float:
        """Exchanges one after the other; ranks come to the first one from computing."""
        return sum(exchanges) + (self.calibration.turn_s if any(exchanges) else 0.0)

    def _apart_s(self, loads: Loads, beside: Ranks) -> float:
        """The time it takes that tables of each type are exchanged apart from those of another, and
        what travels beside computing apart from the rest."""
        together = sum(
            exchanged.any()
            for exchanged in (
                loads.pooled_from,
                loads.rows_from,
                loads.scattered,
                loads.host_scattered,
                loads.host_rows_from,
            )
        )
        short = self._all_to_all.seconds(self.span, traffic.Traffic(0.0, 0.0))
        # Rows in two halves: one message more, and one that says which half a row belongs to.
        halves = 2 if beside.any() else 0
        return (max(0, len(loads.types) - int(together)) + halves) * short

    def _dense_exchange_s(self, loads: Loads) -> float:
        """Data-parallel tables have an all-reduce of their own, after that of the dense part."""
        return sum(
            self._reduced_s(num_bytes)
            for num_bytes in (
                self.workload.dense.gradient_bytes,
                float(loads.all_reduced_bytes.max()),
            )
        )

    def _reduced_s(self, num_bytes: float) -> float:
        if not num_bytes:
            return 0.0
        reduce = self.calibration.collectives.all_reduce
        return self._turns_s(reduce.seconds(self.world, traffic.all_reduce(self.world, num_bytes)))

    def _exchange_s(self, to_each: Ranks) -> float:
        if not to_each.any():
            return 0.0
        return self._all_to_all.seconds(self.span, traffic.all_to_all_from(self.span, to_each))

    def _between_places_s(self, to_each: Ranks) -> float:
        if not to_each.any():
            return 0.0
        moved = traffic.places_to_all(self.span, to_each)
        return self._all_to_all.seconds(self.span.across_hosts(), moved)

    def _in_host_s(self, to_each: Ranks) -> float:
        if not to_each.any():
            return 0.0
        inside = self.span.inside_hosts()
        return self._all_to_all.seconds(inside, traffic.all_to_all(inside, float(to_each.max())))

    @staticmethod
    def _brought_s(
        cost: CollectiveCost,
        moved: Callable[[Span, float], traffic.Traffic],
        span: Span,
        brought: Ranks,
    ) -> float:
        if not brought.any():
            return 0.0
        return cost.seconds(span, moved(span, float(brought.max())))


def _of_bags(cost: BagCost, loads: Loads) -> Ranks:
    return cost.of_bags(
        loads.lookup_ids,
        loads.lookup_bytes,
        vector_bytes=loads.lookup_vector_bytes,
        row_bytes=loads.lookup_row_bytes,
    )


def _num_kernels(loads: Loads) -> tuple[int, int]:
    """How many kernels sum bags, and how many look up rows."""
    rows = sum(exchanges_rows(message_type) for message_type in loads.types)
    return len(loads.types) - rows + bool(loads.dense_bytes.any()), rows
