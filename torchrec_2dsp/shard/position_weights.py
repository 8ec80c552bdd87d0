"""Position weights, by which TorchRec's feature processors multiply rows before they are summed.

They are dense parameters, equal on all ranks, that change with every step; a pipeline's ids travel
before that. So each id travels with its *slot*, its weight's number, and the rank that sums rows
looks the weight up: the rows' owner, or with row exchange and hot rows the sample's own rank.

    weights of f0: a b c, of f1: d e        slot: 0  1  2  3  4  5
                                          weight: 1  a  b  c  d  e    (1: a feature without weights)

Gradients take the same way back, to the rank that looked the weight up. Data parallelism averages
them over all ranks, like any dense parameter's.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.utils import append_prefix
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_2dsp._compat.wrapped_collections import (
    TABLES,
    collection_inside,
    on_device,
    position_weights,
    processed,
    processors_in,
    trains_processors,
)
from torchrec_2dsp.comms.collectives import constant
from torchrec_2dsp.errors import InputError, UnsupportedError
from torchrec_2dsp.rows.gradients import repeated
from torchrec_2dsp.shard.batch import BatchForm, features_of, with_parts
from torchrec_2dsp.shard.parted import PartedModule, ShardedModule2D, TablesAndMore, parts_of
from torchrec_2dsp.shard.row_exchange.exchange import RowContext
from torchrec_2dsp.shard.stages import BatchNotes, Output, Stage, ids_per_feature
from torchrec_2dsp.shard.tables import Tables2D

_NO_LIMIT = torch.iinfo(torch.int64).max


class PositionWeights(Stage):
    """Sends ids with slots, and looks the slots' weights up where rows are summed."""

    def __init__(
        self,
        weights: Callable[[], Mapping[str, nn.Parameter]],
        configs: list[Any],
        tables: Tables2D,
    ) -> None:
        self._weights = weights
        group = tables.groups.alarm.group
        self._form = BatchForm(features_of(configs), group, is_weighted=False)

    def before_ids_travel(self, notes: BatchNotes, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Give each id its slot in place of a weight."""
        notes.error = notes.error or self._form.error_in(batch) or self._error(batch)
        if notes.error is not None:
            return batch  # The next stage sends no ids in its place.
        lengths, num_ids = batch.lengths(), batch.values().numel()
        firsts, steps, _ = self._layout(batch)
        per_feature = ids_per_feature(batch)
        starts = repeated(lengths.cumsum(0) - lengths, lengths, num_ids)
        positions = torch.arange(num_ids, device=lengths.device) - starts
        first, step = (repeated(of, per_feature, num_ids) for of in (firsts, steps))
        slots = (first + positions * step).float()
        return with_parts(batch, weights=slots, length_per_key=batch.length_per_key_or_none())

    def on_arrival(self, notes: BatchNotes, arrived: Any) -> Any:
        """Look up the weights for a batch's slots."""
        weights = self._weights()
        constant_one = next(iter(weights.values())).new_ones(1)
        notes.position_weights = by_slot = torch.cat([constant_one, *weights.values()]).float()

        def weigh(slots: torch.Tensor) -> torch.Tensor:
            return by_slot.index_select(0, slots.long())

        if notes.hot is not None:
            for name, hot in notes.hot.features.items():
                assert hot.weights is not None
                notes.hot.features[name] = replace(hot, weights=weigh(hot.weights))
        for context in notes.shardings:
            if isinstance(context, RowContext):
                context.requested = context.requested.weighed(weigh)
        # With row exchange no slots arrive, but the rows themselves.
        weighed = []
        for ids in arrived:
            slots, sizes = ids.weights_or_none(), ids.length_per_key_or_none()
            if slots is not None:
                ids = with_parts(ids, weights=weigh(slots), length_per_key=sizes)
            weighed.append(ids)
        return KJTList(weighed)

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """Give the weights a gradient on all ranks, even those that look none up."""
        assert isinstance(output, KeyedTensor)
        by_slot, notes.position_weights = notes.position_weights, None
        values: Any = _Weighed.apply(output.values(), by_slot)
        return KeyedTensor(
            keys=output.keys(), length_per_key=output.length_per_key(), values=values, key_dim=1
        )

    def _layout(self, features: KeyedJaggedTensor) -> list[torch.Tensor]:
        """Return each feature's first slot, the step to its next one, and its longest bag."""
        firsts, num_slots = {}, 1
        for name, weights in self._weights().items():
            firsts[name] = (num_slots, 1, weights.numel())
            num_slots += weights.numel()
        keys = features.keys()
        columns = zip(*(firsts.get(key, (0, 0, _NO_LIMIT)) for key in keys), strict=True)
        return [constant(column, features.values().device) for column in columns]

    def _error(self, features: KeyedJaggedTensor) -> InputError | None:
        lengths = features.lengths().view(len(features.keys()), -1)
        is_long = lengths > self._layout(features)[2][:, None]
        if not bool(is_long.any()):
            return None
        index, sample = is_long.nonzero()[0].tolist()
        key = features.keys()[index]
        return InputError(
            f"feature {key!r} has {int(lengths[index, sample])} ids in sample {sample} of this "
            f"rank's batch, but position weights for {self._weights()[key].numel()}; cut the bag, "
            "or give the processor a larger max_feature_length"
        )


class _Weighed(torch.autograd.Function):
    """Returns an output unchanged, and gives ``beside`` a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(beside)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (beside,) = ctx.saved_tensors
        return grads[0], torch.zeros_like(beside)


class ShardedFeatureProcessors2D(TablesAndMore):
    """A sharded collection behind feature processors, which are whole on every rank."""

    def __init__(
        self, module: Any, sharded: ShardedModule2D | PartedModule, device: torch.device
    ) -> None:
        super().__init__(module, sharded)
        # Both are under TorchRec's names, with which names in a state dict begin.
        self._embedding_bag_collection: Any = sharded
        self._feature_processors: Any = on_device(processors_in(module), device)
        self._has_weights = position_weights(self._feature_processors) is not None
        self._trains = trains_processors(self)
        configs = collection_inside(module).embedding_bag_configs()
        for part in parts_of(sharded) if self._has_weights else ():
            stage = PositionWeights(self._weights, configs, part.tables)
            # After the stage that gives all features one batch size.
            part.tables.stages.insert(1, stage)

    def _weights(self) -> Mapping[str, nn.Parameter]:
        return position_weights(self._feature_processors) or {}

    def broadcast_processors(self) -> None:
        """Give all ranks the first rank's feature processors, even if DDP trains none.

        Collectives:
            A broadcast for each parameter and buffer.
        """
        processors = self._feature_processors
        for tensor in (*processors.parameters(), *processors.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def create_context(self) -> Any:
        """Create the tables' context for a batch."""
        return self._embedding_bag_collection.create_context()

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor, /) -> Any:
        """Distribute the batch's ids; processors other than position weights are frozen."""
        if not isinstance(features, KeyedJaggedTensor):
            raise UnsupportedError(
                f"feature processors need a KeyedJaggedTensor, but the batch is a "
                f"{type(features).__name__}; convert it first"
            )
        if self._trains != trains_processors(self):
            raise UnsupportedError(
                "requires_grad of a feature processor has changed since the model was sharded; "
                "change it before, and shard again"
            )
        if not features.variable_stride_per_key():
            # As in TorchRec, only bags that aren't processed are shared in a batch of one size.
            features = with_parts(features, length_per_key=features.length_per_key_or_none())
        elif not self._has_weights:
            raise UnsupportedError(
                "feature processors that aren't position weights know no variable batch sizes; "
                "give a batch of one size"
            )
        if not self._has_weights:
            with torch.no_grad():
                features = processed(features, self._feature_processors)
        return self._embedding_bag_collection.input_dist(ctx, features)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Look up in the tables; rows travel meanwhile."""
        return self._embedding_bag_collection.compute_and_output_dist(ctx, input)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yield the tables' names; data parallelism trains the processors."""
        return self._embedding_bag_collection.sharded_parameter_names(append_prefix(prefix, TABLES))
