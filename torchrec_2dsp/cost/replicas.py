"""The cost of rows with several homes: hot rows, and the shards of replica peers."""

import math
from dataclasses import dataclass

from torchrec_2dsp.cost.calibration import Calibration
from torchrec_2dsp.cost.coefficients import CollectiveCost
from torchrec_2dsp.cost.loads import Loads, Ranks
from torchrec_2dsp.cost.row_merge import RowBytes, gather_seconds, merge_seconds
from torchrec_2dsp.cost.span import Span
from torchrec_2dsp.cost.traffic import Traffic, all_reduce
from torchrec_2dsp.plan.sync import (
    GradientSync,
    SyncConfig,
    SyncedRows,
    SyncPolicy,
    WeightSync,
)


@dataclass(frozen=True)
class ReplicaCost:
    """Seconds of keeping copies equal.

    Rows travel in groups of their own, whose all-to-alls are full duplex on gloo as well.
    """

    calibration: Calibration

    def hot_rows_s(self, loads: Loads, world: Span) -> float:
        """Lookups of hot rows, the merge of their gradients over the world, and their update."""
        if not loads.hot_ids.any():
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
            + self._merged_s(rows, world)
            + self._applied_s(_most(loads.hot_rows), rows.of_all)
        )

    def sync_s(self, loads: Loads, peers: Span, sync: SyncConfig) -> tuple[float, float]:
        """Seconds of exchanging and of applying by replica peers, after a step in the mean."""
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
        weights = self._average_s(
            (_most(loads.averaged_rows), _most(loads.averaged_bytes)),
            _most(loads.averaged_whole_bytes),
            peers,
            sync,
            sync.policy,
        )
        if sync.moments_policy is None:
            return weights
        moments = self._average_s(
            (_most(loads.moment_rows), _most(loads.moment_bytes)),
            _most(loads.moment_whole_bytes),
            peers,
            sync,
            sync.moments_policy,
        )
        return weights[0] + moments[0], weights[1] + moments[1]

    def _average_s(
        self,
        touched: tuple[float, float],
        whole_bytes: float,
        peers: Span,
        sync: WeightSync,
        policy: SyncPolicy,
    ) -> tuple[float, float]:
        num_steps = policy.steps_per_sync
        if math.isinf(num_steps) or not whole_bytes:
            return 0.0, 0.0
        reduce = self.calibration.collectives.all_reduce
        whole_s = reduce.seconds(peers, all_reduce(peers, whole_bytes))
        if sync.rows is SyncedRows.ALL:
            return whole_s / num_steps, 0.0
        num_rows, num_bytes = touched
        gathered_s = self.calibration.turn_s + gather_seconds(num_bytes, peers, self._all_to_all())
        applied_s = self._applied_s(num_rows * peers.num_ranks, num_bytes * peers.num_ranks)
        if whole_s < gathered_s + applied_s:
            return whole_s / num_steps, 0.0
        return gathered_s / num_steps, applied_s / num_steps

    def _merged_s(self, rows: RowBytes, span: Span) -> float:
        """Seconds of a merge, with the announcement before it, and the turn that both take."""
        if not rows.of_all:
            return 0.0
        announced_s = self.calibration.collectives.all_gather.seconds(span, Traffic(0.0, 0.0))
        return self.calibration.turn_s + announced_s + merge_seconds(rows, span, self._all_to_all())

    def _applied_s(self, num_rows: float, num_bytes: float) -> float:
        """Adding up what has come, and applying it."""
        return self.calibration.kernels.row_update.seconds(num_rows, num_bytes)

    def _all_to_all(self) -> CollectiveCost:
        return self.calibration.all_to_all(full_duplex=True)


def _most(values: Ranks) -> float:
    return float(values.max())
