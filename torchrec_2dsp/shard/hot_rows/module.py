"""What sharded modules have in common that have hot rows: bags and sequences alike."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.fbgemm import SplitTableBatchedEmbeddingBagsCodegen
from torchrec_2dsp.access.hot_set import HotSet
from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.replicas.sync_point import SyncAction
from torchrec_2dsp.shard.hot_rows.hot_rows import HotRows
from torchrec_2dsp.shard.hot_rows.split import HotBatch
from torchrec_2dsp.shard.replicated import ReplicatedModule
from torchrec_2dsp.shard.replication import Replication


def check_keyed_jagged(features: Any) -> None:
    """Raise for batches that can't be taken apart sample by sample."""
    if not isinstance(features, KeyedJaggedTensor):
        raise UnsupportedError(
            "hot rows, and averages that are made after the exchange, need a KeyedJaggedTensor, "
            f"but the batch is a {type(features).__name__}; convert it first"
        )


class HotRowsModule(ReplicatedModule):
    """A mixin for TorchRec's sharded modules: hot rows beside their own path."""

    _hot_rows: HotRows | None = None

    def _init_hot_rows(
        self: Any,
        configs: Sequence[BaseEmbeddingConfig],
        plan: ModulePlan2D,
        fused_params: Mapping[str, dict[str, Any]],
        replication: Replication,
    ) -> list[SyncAction]:
        """Call when the kernels are there; what is to be synced besides the replicas."""
        tables = dict(plan.tables())
        if all(table.hot_set is None for table in tables.values()):
            return []
        self._hot_rows = HotRows(
            configs,
            tables,
            fused_params,
            self.kernels(),
            replication.groups,
            replication.sync,
            self._device or torch.device("cpu"),
        )
        return [self._hot_rows.action()]

    @property
    def hot_sets(self) -> dict[str, HotSet]:
        """The hot rows of each table that has some, as new batches see them."""
        return {} if self._hot_rows is None else self._hot_rows.sets.by_table

    def check_hot_sets(self, hot_sets: Mapping[str, HotSet]) -> None:
        """Raise unless there is room for these sets."""
        if self._hot_rows is not None:
            self._hot_rows.sets.check(hot_sets)

    def refresh_hot_sets(self, hot_sets: Mapping[str, HotSet]) -> None:
        """Let batches from now on go by other hot rows; see `ModelParallel2D.refresh_hot_sets`."""
        if self._hot_rows is not None:
            self._hot_rows.sets.renew(hot_sets)

    @property
    def older_hot_sets(self) -> list[dict[str, HotSet]]:
        """What batches go by that a pipeline split before a refresh and hasn't looked up yet."""
        return [] if self._hot_rows is None else self._hot_rows.sets.older

    def put_hot_sets_before_newest(self, older: Sequence[Mapping[str, HotSet]]) -> None:
        """Let the next batches go by older sets, one each."""
        if self._hot_rows is not None:
            self._hot_rows.sets.put_before_newest(older)

    def complete_state(self) -> None:
        """Replicas of hot rows, too."""
        super().complete_state()
        if self._hot_rows is not None:
            self._hot_rows.write_home()

    def _split_hot_rows(self, features: Any) -> tuple[Any, HotBatch | None]:
        """``features`` without hot ids, and those."""
        if self._hot_rows is None:
            return features, None
        check_keyed_jagged(features)
        return self._hot_rows.split(features)

    def _hold_hot_rows(self, hot: HotBatch | None) -> None:
        """Let the replicas hold the rows that were hot when a batch was split."""
        if self._hot_rows is not None and hot is not None and not self._hot_rows.holds(hot):
            self.complete_state()
            self._hot_rows.hold(hot)

    def _lookup_hot_rows(self, hot: HotBatch | None) -> dict[str, torch.Tensor]:
        """What the replicas give, by feature."""
        if self._hot_rows is None or hot is None:
            return {}
        return self._hot_rows.lookup(hot)

    def _state_loaded(self) -> None:
        super()._state_loaded()
        if self._hot_rows is not None:
            self._hot_rows.mark_stale()

    def _state_read(self) -> None:
        if self._hot_rows is not None:
            self._hot_rows.read_home()

    def _kernels_beside(self) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
        return self._hot_rows.kernels() if self._hot_rows is not None else []
