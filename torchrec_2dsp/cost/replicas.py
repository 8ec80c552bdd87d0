"""What rows with several homes cost in a step: hot rows, and the shards of replica peers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.coefficients import CollectiveCost
from torchrec_2dsp.cost.row_merge import gather_seconds, merge_seconds
from torchrec_2dsp.cost.span import Span
from torchrec_2dsp.cost.table_loads import FLOAT_BYTES, KEY_BYTES, Placed
from torchrec_2dsp.cost.traffic import Traffic, all_reduce
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.plan.sync_config import GradientSync, SyncConfig, SyncedRows, WeightSync


@dataclass(frozen=True)
class ReplicaCost:
    """Seconds of keeping copies equal.

    Rows travel in groups of their own, whose all-to-alls are full duplex on gloo as well.
    """

    calibration: Calibration
    tables: Sequence[Placed]
    workload: Workload

    def hot_rows_s(self, world: Span) -> float:
        """Lookups of hot rows, the merge of their gradients over the world, and their update."""
        hot = [table for table in self.tables if table.num_hot]
        if not hot:
            return 0.0
        batch_size = self.workload.batch_size

        def touched(table: Placed, num_batches: int) -> float:
            lookups = num_batches * batch_size * table.work.ids_per_sample
            every = table.work.expected_distinct(lookups)
            return every - table.work.expected_distinct(lookups, num_hot=table.num_hot)

        def num_bytes(num_ranks: int) -> float:
            return sum(touched(table, num_ranks) * _wire_bytes(table.work.dim) for table in hot)

        kernels = self.calibration.kernels
        ids = [
            batch_size * table.work.ids_per_sample * table.work.hot_share(table.num_hot)
            for table in hot
        ]
        id_bytes = sum(
            count * table.work.dim * FLOAT_BYTES for count, table in zip(ids, hot, strict=True)
        )
        num_rows = sum(touched(table, world.num_ranks) for table in hot)
        return (
            kernels.lookup.base_s
            + kernels.lookup.seconds(sum(ids), id_bytes)
            + kernels.sort.seconds(sum(ids), 0.0)
            + kernels.add.seconds(sum(ids), id_bytes)
            + self._merged_s(num_bytes, world)
            + self._applied_s(num_rows, num_bytes(world.num_ranks))
        )

    def sync_s(self, peers: Span, group_size: int, sync: SyncConfig) -> tuple[float, float]:
        """What replica peers exchange and apply after each step, or its share of several steps."""
        if peers.num_ranks == 1:
            return 0.0, 0.0
        if isinstance(sync, GradientSync):
            return self._gradients_s(peers, group_size, sync)
        if sync.moments_policy is None:
            return self._average_s(peers, group_size, sync, weights=True, moments=True)
        moments_only = replace(sync, policy=sync.moments_policy)
        first = self._average_s(peers, group_size, sync, weights=True, moments=False)
        second = self._average_s(peers, group_size, moments_only, weights=False, moments=True)
        return first[0] + second[0], first[1] + second[1]

    def _gradients_s(self, peers: Span, group_size: int, sync: GradientSync) -> tuple[float, float]:
        wire = sync.transport.dtype.itemsize

        def num_bytes(num_peers: int) -> float:
            return self._touched(num_peers * group_size, lambda one, columns: wire * columns)[1]

        exchanged_s = self._merged_s(num_bytes, peers)
        return exchanged_s, self._applied_s(
            *self._touched(peers.num_ranks * group_size, lambda one, columns: FLOAT_BYTES * columns)
        )

    def _average_s(
        self, peers: Span, group_size: int, sync: WeightSync, *, weights: bool, moments: bool
    ) -> tuple[float, float]:
        num_steps = sync.policy.steps_per_sync
        if math.isinf(num_steps):
            return 0.0, 0.0
        wire = sync.transport.dtype.itemsize

        def row_bytes(table: Placed, columns: int) -> float:
            moment_bytes = table.work.state_bytes_per_row * columns / table.work.dim
            return wire * (weights * columns + moments * moment_bytes / FLOAT_BYTES)

        whole = self._busiest(
            lambda table, columns: table.work.num_rows * row_bytes(table, columns)
        )
        reduce = self.calibration.collectives.all_reduce
        whole_s = reduce.seconds(peers, all_reduce(peers, whole))
        if sync.rows is SyncedRows.ALL:
            return whole_s / num_steps, 0.0
        num_rows, num_bytes = self._touched(num_steps * group_size, row_bytes)
        gathered_s = self.calibration.turn_s + gather_seconds(num_bytes, peers, self._all_to_all())
        applied_s = self._applied_s(num_rows * peers.num_ranks, num_bytes * peers.num_ranks)
        if whole_s < gathered_s + applied_s:
            return whole_s / num_steps, 0.0
        return gathered_s / num_steps, applied_s / num_steps

    def _touched(
        self, num_batches: float, row_bytes: Callable[[Placed, int], float]
    ) -> tuple[float, float]:
        """Distinct rows that some batches touch on the busiest position, and their bytes."""

        def num_rows(table: Placed) -> float:
            lookups = num_batches * self.workload.batch_size * table.work.ids_per_sample
            return table.work.expected_distinct(lookups, num_hot=table.num_hot)

        return self._busiest(lambda table, columns: num_rows(table)), self._busiest(
            lambda table, columns: num_rows(table) * (row_bytes(table, columns) + KEY_BYTES)
        )

    def _busiest(self, of_table: Callable[[Placed, int], float]) -> float:
        """The largest sum on one rank of a group, of which a shard has its part of the rows."""
        sums: dict[int, float] = {}
        for table in self.tables:
            for rank, rows, columns in table.shards:
                part = rows / max(1, table.work.num_rows)
                sums[rank] = sums.get(rank, 0.0) + of_table(table, columns) * part
        return max(sums.values(), default=0.0)

    def _merged_s(self, num_bytes: Callable[[int], float], span: Span) -> float:
        """With what ranks tell each other before, and the turn that both take."""
        told = self.calibration.collectives.all_gather.seconds(span, Traffic(0.0, 0.0))
        return self.calibration.turn_s + told + merge_seconds(num_bytes, span, self._all_to_all())

    def _applied_s(self, num_rows: float, num_bytes: float) -> float:
        """Adding up what has come, and applying it."""
        kernels = self.calibration.kernels
        return kernels.add.seconds(num_rows, num_bytes) + kernels.update.seconds(
            num_rows, num_bytes
        )

    def _all_to_all(self) -> CollectiveCost:
        return self.calibration.all_to_all(full_duplex=True)


def _wire_bytes(dim: int) -> int:
    return dim * FLOAT_BYTES + KEY_BYTES
