"""A table shard with a copy on each replica peer, which several syncs keep equal in turns."""

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from torchrec_2dsp._compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
    optimizer_states,
)
from torchrec_2dsp.comms.mesh_groups import MeshGroups
from torchrec_2dsp.errors import SyncError
from torchrec_2dsp.plan.sync import GradientSync, SyncConfig, SyncedRows, WeightSync
from torchrec_2dsp.replicas.capture import RowCapture
from torchrec_2dsp.replicas.gradient_sync import GradientSyncAction
from torchrec_2dsp.replicas.row_average import RowAverage
from torchrec_2dsp.replicas.whole_shard import ShardAverage
from torchrec_2dsp.shard.kernels import TableShard
from torchrec_2dsp.shard.sync.averaging import synced_shard


class TimedSync(NamedTuple):
    """One sync on this rank."""

    seconds: float
    """Seconds from a barrier to the end of the sync."""
    tracking_s: float
    """Seconds of noting the changed rows, before."""
    num_bytes: int
    """Bytes that this rank sent."""


class Copies:
    """This rank's copy: a fused kernel with one table and row-wise AdaGrad."""

    def __init__(self, groups: MeshGroups, num_rows: int, dim: int) -> None:
        self._groups = groups
        self.num_rows = num_rows
        """How many rows the shard has."""
        self._dim = dim
        self._tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(num_rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.01,
        )
        (weight,), (state,) = self._tbe.split_embedding_weights(), optimizer_states(self._tbe)
        self._shard = TableShard("table", 0, 0, {"weight": weight, **state})
        for tensor in self._shard.tensors.values():
            tensor.zero_()

    def timed_sync(self, sync: SyncConfig, rows: torch.Tensor, seed: int) -> TimedSync:
        """Change ``rows`` and make the copies equal; the changes count for a `GradientSync` only,
        whose update is its own.

        Collectives:
            A barrier, and those of the sync.
        """
        if isinstance(sync, GradientSync):
            return self._merge(sync, rows, seed)
        return self._average(sync, rows, seed)

    def check_equal(self) -> None:
        """Raise `SyncError` where the copies differ, in a sample of rows.

        Collectives:
            One all-gather over the replica peers.
        """
        rows = torch.randperm(self.num_rows, generator=_generator(self.num_rows))[:10_000]
        tensors = self._shard.tensors.values()
        own_rows = torch.cat([tensor[rows].reshape(-1) for tensor in tensors])
        peers = [torch.empty_like(own_rows) for _ in range(self._groups.mesh.num_groups)]
        dist.all_gather(peers, own_rows, group=self._groups.replica_peers)
        if not all(torch.equal(peer, own_rows) for peer in peers):
            raise SyncError("copies differ after a sync; what it took is worth nothing")

    def _average(self, sync: WeightSync, rows: torch.Tensor, seed: int) -> TimedSync:
        peers = self._groups.replica_peers
        shard = synced_shard(self._shard, lambda name: True, dist.get_world_size(peers), sync)
        if sync.rows is SyncedRows.TOUCHED:
            average = RowAverage([shard], self._groups.replica_rows.everyone, self._groups.alarm)
        else:
            average = ShardAverage([shard], peers)
        start = time.perf_counter()
        average.before_update([shard], lambda: [rows])
        tracking_s = time.perf_counter() - start
        generator = _generator(seed)
        for tensor in self._shard.tensors.values():
            changes = torch.rand((rows.numel(), *tensor.shape[1:]), generator=generator)
            tensor.index_add_(0, rows, changes)
        dist.barrier(self._groups.world)
        start = time.perf_counter()
        report = average.run()
        return TimedSync(time.perf_counter() - start, tracking_s, report.num_bytes)

    def _merge(self, sync: GradientSync, rows: torch.Tensor, seed: int) -> TimedSync:
        """The lookup comes before; the sums of the backward and the update are part of the time."""
        peers = self._groups.replica_rows
        capture = RowCapture(self._tbe, ["table"], peers=peers, codec=sync.transport.codec)
        action = GradientSyncAction([capture], self._groups.alarm, is_layered=peers.is_layered)
        offsets = torch.arange(rows.numel() + 1)
        grads = torch.rand((rows.numel(), self._dim), generator=_generator(seed))
        output = capture.lookup(lambda: self._tbe(rows, offsets), None)
        dist.barrier(self._groups.world)
        start = time.perf_counter()
        action.backward_seen()
        output.backward(grads)
        with torch.no_grad():
            report = action.apply(everything=True)
        return TimedSync(time.perf_counter() - start, 0.0, report.num_bytes)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
