"""The replicas of hot rows: small tables of a TBE of their own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_sparse_type

from torchrec_2dsp._compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
    optimizer_states,
)
from torchrec_2dsp.codecs.rows import RowCodec
from torchrec_2dsp.comms.mesh_groups import Peers
from torchrec_2dsp.plan.parameter_sharding import ParameterSharding2D
from torchrec_2dsp.replicas.capture import RowCapture
from torchrec_2dsp.shard.hot_rows.split import HotBatch
from torchrec_2dsp.shard.kernels import MOMENT_SCALE


@dataclass(frozen=True)
class HotSlice:
    """The hot rows of one column shard of a table.

    A table that is sharded by columns keeps one row-wise moment per column shard, so its
    replicas are split alike.
    """

    table: str
    """The table's name."""
    num_rows: int
    """How many hot rows there is room for."""
    column: int
    """The first column."""
    num_columns: int
    """How many columns."""
    features: tuple[str, ...]
    """The features that look the table up."""
    is_sequence: bool
    """Whether they get a row for each id, and not a sum for each bag."""


def hot_slices(
    configs: Sequence[BaseEmbeddingConfig], tables: Mapping[str, ParameterSharding2D]
) -> list[HotSlice]:
    """The column shards of all tables with a hot set, in the order of the module's tables."""
    slices = []
    for config in configs:
        table = tables[config.name]
        if table.hot_set is None:
            continue
        is_sequence = not hasattr(config, "pooling")
        shards = getattr(table.sharding_spec, "shards", [])
        columns = sorted({(shard.shard_offsets[1], shard.shard_sizes[1]) for shard in shards})
        slices += [
            HotSlice(
                config.name,
                len(table.hot_set),
                start,
                size,
                tuple(config.feature_names),
                is_sequence,
            )
            for start, size in columns
        ]
    return slices


class HotTbe:
    """Replicas of slices that share an optimizer and a data type, in one fused kernel."""

    def __init__(
        self,
        slices: Sequence[HotSlice],
        fused_params: dict[str, Any],
        data_type: Any,
        device: torch.device,
        *,
        peers: Peers,
        codec: RowCodec,
        learning_rate: Callable[[Sequence[HotSlice]], float],
    ) -> None:
        self.slices = list(slices)
        """One table of the kernel each."""
        on_cpu = device.type == "cpu"
        tbe = SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=[
                (
                    hot.num_rows,
                    hot.num_columns,
                    EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE,
                    ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA,
                )
                for hot in slices
            ],
            feature_table_map=[index for index, hot in enumerate(slices) for _ in hot.features],
            pooling_mode=PoolingMode.NONE if slices[0].is_sequence else PoolingMode.SUM,
            weights_precision=data_type_to_sparse_type(data_type),
            device=device,
            # Merged over all ranks the moments are exact: no moment scale here.
            **{name: value for name, value in fused_params.items() if name != MOMENT_SCALE},
        )
        self.capture = RowCapture(
            tbe,
            [hot.table for hot in slices],
            lambda: learning_rate(self.slices),
            peers,
            codec,
        )
        """The kernel, and the gradients that wait for their merge."""

    def tensors(self) -> list[dict[str, torch.Tensor]]:
        """Weight and optimizer state of each slice, by name, as views."""
        tbe = self.capture.tbe
        return [
            {"weight": weight, **state}
            for weight, state in zip(
                tbe.split_embedding_weights(), optimizer_states(tbe), strict=True
            )
        ]

    def lookup(self, batch: HotBatch) -> dict[str, torch.Tensor]:
        """The hot rows of each feature, columns joined: summed by bag, or one for each id."""
        looked_up = [(hot, name) for hot in self.slices for name in hot.features]
        hot_features = [batch.features[name] for _, name in looked_up]
        ids = torch.cat([feature.slots for feature in hot_features])
        lengths = torch.cat([feature.lengths for feature in hot_features])
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        parts = [feature.weights for feature in hot_features if feature.weights is not None]
        # A batch's weights mean nothing to sequences.
        weights = torch.cat(parts) if parts and not self.slices[0].is_sequence else None
        tbe = self.capture.tbe
        if torch.is_grad_enabled():
            output = self.capture.lookup(lambda: tbe(ids, offsets, weights), weights)
        else:
            output = tbe(ids, offsets, weights)
        if self.slices[0].is_sequence:
            columns = output.split([feature.slots.numel() for feature in hot_features])
        else:
            columns = output.split([hot.num_columns for hot, _ in looked_up], dim=1)
        pooled: dict[str, list[torch.Tensor]] = {}
        for (_, name), part in zip(looked_up, columns, strict=True):
            pooled.setdefault(name, []).append(part)
        return {name: torch.cat(parts, dim=1) for name, parts in pooled.items()}
