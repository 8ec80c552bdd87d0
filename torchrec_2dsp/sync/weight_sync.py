"""Average weights and optimizer state over the replica peers after the update."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from torchrec_2dsp.plan.sync_policy import SyncPolicy
from torchrec_2dsp.sync.report import SyncReport
from torchrec_2dsp.sync.row_average import RowAverage, SyncedShard
from torchrec_2dsp.sync.state_rules import StateRule


class AverageTouchedRows:
    """The sync action of `WeightSync`: the rows that changed since the last one."""

    def __init__(
        self, shards: Sequence[SyncedShard], group: dist.ProcessGroup, policy: SyncPolicy
    ) -> None:
        """
        Args:
            shards: this rank's, in the same order on every rank of the group.
            group: the ranks that hold copies.
            policy: when to average.
        """
        self._average = RowAverage(shards, group)
        self._clock = _Clock(policy)

    def before_update(
        self, shards: Sequence[SyncedShard], rows: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """A backward is about to change rows of these shards, which ``rows`` tells."""
        self._clock.backward_seen()
        for shard, changing in zip(shards, rows(), strict=True):
            shard.touched.note(changing)

    @property
    def pending(self) -> bool:
        """Whether the local replica has been updated since the last run."""
        return self._clock.pending

    def is_due(self) -> bool:
        """Whether the policy wants a sync at this step."""
        return self._clock.is_due()

    def run(self) -> SyncReport:
        """Average now.

        Collectives:
            Those of `RowAverage.run`, on the "replicate" axis.
        """
        self._clock.synced()
        return self._average.run()


class AverageShards:
    """The sync action of `WeightSync(rows="all")`: a dense all-reduce of whole shards."""

    def __init__(
        self, shards: Sequence[SyncedShard], group: dist.ProcessGroup, policy: SyncPolicy
    ) -> None:
        """As `AverageTouchedRows`."""
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._tensors: dict[tuple[torch.dtype, StateRule], list[torch.Tensor]] = defaultdict(list)
        for shard in shards:
            for tensor, rule in zip(shard.touched.tensors, shard.rules, strict=True):
                self._tensors[tensor.dtype, rule].append(tensor)
        self._num_rows = sum(shard.touched.num_rows for shard in shards)
        self._clock = _Clock(policy)

    def before_update(
        self, shards: Sequence[SyncedShard], rows: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """A backward is about to change rows of these shards."""
        self._clock.backward_seen()

    @property
    def pending(self) -> bool:
        """Whether the local replica has been updated since the last run."""
        return self._clock.pending

    def is_due(self) -> bool:
        """Whether the policy wants a sync at this step."""
        return self._clock.is_due()

    def run(self) -> SyncReport:
        """Average now.

        Collectives:
            One coalesced all-reduce per dtype and rule on the "replicate" axis.
        """
        self._clock.synced()
        report = SyncReport(num_rows=self._num_rows)
        for (_, rule), tensors in self._tensors.items():
            options = dist.AllreduceCoalescedOptions()
            op = dist.ReduceOp.MAX if rule is StateRule.MAX else dist.ReduceOp.AVG
            options.reduceOp = op  # type: ignore[assignment]  # stub says enum
            self._group.allreduce_coalesced(tensors, options).wait()
            # What an all-reduce moves at best, as a ring does.
            ring_share = 2 * (self._world_size - 1) / self._world_size
            report += SyncReport(
                num_tensors=len(tensors),
                num_bytes=int(ring_share * sum(tensor.nbytes for tensor in tensors)),
            )
        return report


class _Clock:
    """Counts the steps of one action.

    A step has one backward, which several kernels report, and several sync points, of which the
    first counts it.
    """

    def __init__(self, policy: SyncPolicy) -> None:
        self._policy = policy
        self._step = 0
        self._is_counted = True
        self._is_due = False
        self.pending = False

    def backward_seen(self) -> None:
        self.pending, self._is_counted = True, False

    def is_due(self) -> bool:
        if not self._is_counted:
            self._step += 1
            self._is_counted = True
            self._is_due = self._is_due or self._policy.is_due(self._step)
        return self._is_due

    def synced(self) -> None:
        self.is_due()  # A sync that nobody planned counts the step, too.
        self.pending = self._is_due = False
