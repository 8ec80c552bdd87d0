"""Average weights and optimizer state over the replica peers after the update."""

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torchrec_2dsp._compat.fbgemm import (
    SplitTableBatchedEmbeddingBagsCodegen,
    optimizer_states,
)
from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.sync.report import SyncReport

AVERAGED_STATES = frozenset({"sum", "exp_avg", "exp_avg_sq"})
"""Optimizer states whose mean over replicas is their meaning on one group."""


class AverageWeights:
    """The sync action of `WeightSync`: a dense all-reduce of whole shards."""

    def __init__(
        self,
        tbes: Sequence[SplitTableBatchedEmbeddingBagsCodegen],
        group: dist.ProcessGroup,
    ) -> None:
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        for tensor in averaged_tensors(tbes):
            self._by_dtype[tensor.dtype].append(tensor)
        self._num_rows = sum(len(rows) for tbe in tbes for rows in tbe.split_embedding_weights())
        self._pending = False

    def mark_backward(self) -> None:
        """A backward has updated the local replica."""
        self._pending = True

    @property
    def pending(self) -> bool:
        """Whether the local replica has been updated since the last run."""
        return self._pending

    def run(self) -> SyncReport:
        """Average now.

        Collectives:
            One coalesced all-reduce per dtype on the "replicate" axis, over weights and state.
        """
        self._pending = False
        if self._world_size == 1:
            return SyncReport()
        report = SyncReport(num_rows=self._num_rows)
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]  # stub says enum
        for tensors in self._by_dtype.values():
            self._group.allreduce_coalesced(tensors, options).wait()
            # What an all-reduce moves at best, as a ring does.
            ring_share = 2 * (self._world_size - 1) / self._world_size
            report += SyncReport(
                num_tensors=len(tensors),
                num_bytes=int(ring_share * sum(tensor.nbytes for tensor in tensors)),
            )
        return report


def averaged_tensors(
    tbes: Sequence[SplitTableBatchedEmbeddingBagsCodegen],
) -> list[torch.Tensor]:
    """Weights and state of ``tbes`` as views; an optimizer state without a rule is refused."""
    tensors: list[torch.Tensor] = []
    for tbe in tbes:
        tensors += tbe.split_embedding_weights()
        for states in optimizer_states(tbe):
            unknown = sorted(set(states) - AVERAGED_STATES)
            if unknown:
                raise UnsupportedError(
                    f"WeightSync has no rule for the optimizer state {unknown[0]!r} of "
                    f"{tbe.optimizer}; use GradientSync, which needs none"
                )
            tensors += states.values()
    return tensors
