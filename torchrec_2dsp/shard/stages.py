"""Stages, which do this package's work in a sharded module, and their notes on a batch.

A sharded module has ordered stages (`Tables2D.stages`). TorchRec distributes ids, looks
rows up and distributes them; in between it calls the hooks that each stage overrides:

    before_ids_travel    in order     the batch, as it will be distributed
    before_lookup        in order     prepares rows for reading
    on_arrival           in order     the arrived ids, as they will be looked up
    while_rows_travel    in order     local lookups meanwhile
    on_output            backwards    the module's output
    before_backward      in order

Tables are in one of two states, with rows where either training or a state reader finds them:

    before_use           in order     put rows where lookups and updates find them
    before_read          backwards    finish all updates, and put rows where state dicts show them
    after_write          in order     weights were written other than by training"""

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionContext
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Multistreamable

from torchrec_2dsp._compat.fbgemm import starts_of
from torchrec_2dsp._compat.shardings import distributed_ahead
from torchrec_2dsp._compat.tensors import has_gradient, held_weakly, take_gradient
from torchrec_2dsp._compat.torchrec import EmbeddingShardingContext, get_gradient_division
from torchrec_2dsp.access.table_access import HotSet
from torchrec_2dsp.comms.alarm import Check
from torchrec_2dsp.errors import ConfigError, TwoDError, UnsupportedError
from torchrec_2dsp.rows.gradients import false_and_true, repeated

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HotFeature:
    """One feature's hot ids in one batch."""

    slots: torch.Tensor
    """Positions in the table's hot set, in the batch's order."""
    lengths: torch.Tensor
    """The number of hot ids per bag."""
    weights: torch.Tensor | None
    is_hot: torch.Tensor
    """Each id's flag, in the batch's order."""


def ids_per_feature(features: KeyedJaggedTensor) -> torch.Tensor:
    """Count each feature's ids, on the device."""
    lengths = features.lengths().reshape(len(features.keys()), features.stride())
    return lengths.sum(dim=1, dtype=torch.int64)


def count_per_bag(flags: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Count the flagged ids in each bag."""
    return starts_of(flags.long()).index_select(0, offsets).diff()


def cold_before_hot(is_hot: torch.Tensor, num_hot: int) -> torch.Tensor:
    """Return each id's place when hot ids are moved behind the cold ones, in the given order."""
    num_ids, counts = is_hot.numel(), is_hot.cumsum(0)
    positions = torch.arange(num_ids, device=is_hot.device)
    return torch.where(is_hot, counts + (num_ids - num_hot - 1), positions - counts)


@dataclass(frozen=True, eq=False)
class HotIds:
    """A module's hot rows at one time."""

    by_table: Mapping[str, torch.Tensor]
    """Row ids, ascending; a row's position is its slot."""
    by_feature: Mapping[str, torch.Tensor]
    """These row ids by the feature that looks the table up."""
    hot_sets: Mapping[str, HotSet] = field(default_factory=dict)
    """The sets as named by the user: these rows, or ids to which an id map gave them."""
    _joined: dict[tuple[str, ...], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """All features' row ids in one list, by a batch's features; see `_join`."""

    def find(
        self, keys: Sequence[str], ids: torch.Tensor, sizes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each id's slot, if it is hot, and whether it is; ``sizes`` are ids per feature."""
        if tuple(keys) not in self._joined:
            self._joined[tuple(keys)] = self._join(keys, ids.device)
        joined, by_feature = self._joined[tuple(keys)]
        limits, shifts, starts = repeated(by_feature, sizes, ids.numel()).unbind(dim=1)
        shifted = ids.clamp(min=-1).minimum(limits) + shifts
        places = torch.searchsorted(joined, shifted)
        return places - starts, joined.index_select(0, places) == shifted

    def _join(self, keys: Sequence[str], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Join the features' row ids, shifted to be ascending; a larger number ends the list.

        Returns the list, and for each feature its smallest id above all hot ones, its shift, and
        its start in the list. After the shift, neither that id nor -1 is in the list.
        """
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        hot = [self.by_feature.get(key, nothing) for key in keys]
        limits = torch.cat([F.pad(rows, (1, 0), value=-1)[-1:] for rows in hot]) + 1
        shifts = (limits + 1).cumsum(0) - (limits + 1)
        sizes = torch.tensor([rows.numel() for rows in hot], device=device)
        end = nothing.new_tensor([torch.iinfo(torch.int64).max])
        joined = torch.cat([*(rows + shift for rows, shift in zip(hot, shifts, strict=True)), end])
        return joined, torch.stack([limits, shifts, sizes.cumsum(0) - sizes], dim=1)


@dataclass(frozen=True)
class HotBatch:
    """A batch's lookups in the replicas."""

    features: dict[str, HotFeature]
    ids: HotIds
    """The rows that were hot when the batch was split."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``; pipelines hand batches between streams."""
        for feature in self.features.values():
            for tensor in (feature.slots, feature.lengths, feature.weights, feature.is_hot):
                if tensor is not None:
                    tensor.record_stream(stream)


@torch.no_grad()
def split_hot_rows(features: KeyedJaggedTensor, ids: HotIds) -> tuple[KeyedJaggedTensor, HotBatch]:
    """Split a batch into one without hot ids, with the same keys and bags, and the hot ids."""
    keys, batch_size = features.keys(), features.stride()
    values, weights = features.values(), features.weights_or_none()
    lengths = features.lengths().view(len(keys), batch_size)
    slots, is_hot = ids.find(keys, values.long(), ids_per_feature(features))
    num_hot = count_per_bag(is_hot, features.offsets()).view(len(keys), batch_size)
    # The only wait for a GPU, however many features there are.
    hot_sizes, sizes = num_hot.sum(dim=1).tolist(), features.length_per_key()
    cold, hot = false_and_true(is_hot.byte(), sum(hot_sizes))
    hot_slots, masks = slots.index_select(0, hot).split(hot_sizes), is_hot.split(sizes)
    hot_weights: Sequence[torch.Tensor | None] = [None] * len(keys)
    if weights is not None:
        hot_weights = weights.detach().index_select(0, hot).split(hot_sizes)
    parts = map(HotFeature, hot_slots, num_hot, hot_weights, masks)
    by_key = zip(keys, parts, strict=True)
    hot_features = {key: part for key, part in by_key if key in ids.by_feature}
    cold_features = KeyedJaggedTensor(
        keys=keys,
        values=values.index_select(0, cold),
        lengths=(lengths - num_hot.to(lengths.dtype)).view(-1),
        weights=None if weights is None else weights.index_select(0, cold),
        length_per_key=[size - hot_size for size, hot_size in zip(sizes, hot_sizes, strict=True)],
    )
    return cold_features, HotBatch(hot_features, ids)


@dataclass(frozen=True, eq=False)
class BagsOfSamples:
    """Maps samples to each feature's bags."""

    rows: Mapping[str, int]
    """Each feature's row in ``indices``, also under its outputs' names."""
    indices: torch.Tensor
    """Bag numbers, `[features, samples]`."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        self.indices.record_stream(stream)  # pyright: ignore[reportArgumentType]

    def by_output(self, feature_of: Mapping[str, str]) -> "BagsOfSamples":
        """Return the bags under output names, given the outputs' features."""
        rows = {name: self.rows[feature] for name, feature in feature_of.items()}
        return replace(self, rows={**self.rows, **rows})

    def pooled(self, bags: KeyedTensor) -> KeyedTensor:
        """Return each sample's bags, side by side."""
        dims = bags.length_per_key()
        columns = bags.values().split(dims, dim=1)
        samples = [
            part.index_select(0, self._of(name))
            for name, part in zip(bags.keys(), columns, strict=True)
        ]
        return KeyedTensor(bags.keys(), dims, torch.cat(samples, dim=1))

    def sequences(self, bags: Mapping[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Return each sample's sequences."""
        return {name: _select(rows, self._of(name)) for name, rows in bags.items()}

    def _of(self, name: str) -> torch.Tensor:
        return self.indices[self.rows[name]]


def features_by_output(
    configs: Sequence[Any], tables: Collection[str] | None = None
) -> dict[str, str]:
    """Return the features of all outputs, or of some tables' outputs, by output name.

    A feature that looks up several tables has ``@table`` in each output name.

    Example:
        >>> from torchrec.modules.embedding_configs import EmbeddingBagConfig
        >>> from torchrec_2dsp.shard.stages import features_by_output
        >>> size = {"num_embeddings": 9, "embedding_dim": 8}
        >>> names = {"t0": ["item", "user@7d"], "t1": ["item"]}
        >>> features_by_output(
        ...     [EmbeddingBagConfig(name=t, feature_names=f, **size) for t, f in names.items()]
        ... )
        {'item@t0': 'item', 'user@7d': 'user@7d', 'item@t1': 'item'}
    """
    names = get_embedding_names_by_table(list(configs))
    return {
        output: feature
        for config, outputs in zip(configs, names, strict=True)
        if tables is None or config.name in tables
        for output, feature in zip(outputs, config.feature_names, strict=True)
    }


def _select(rows: JaggedTensor, bags: torch.Tensor) -> JaggedTensor:
    """Return the sequences with these numbers, one after another."""
    ends = rows.lengths().cumsum(0)
    starts = (ends - rows.lengths()).index_select(0, bags)
    lengths = rows.lengths().index_select(0, bags)
    # The difference between an output place and the place of its row.
    shifts = (starts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
    places = torch.arange(shifts.numel(), device=shifts.device) + shifts
    ids = rows.weights_or_none()  # Set if the module is asked for indices.
    ids = None if ids is None else ids.index_select(0, places)
    return JaggedTensor(rows.values().index_select(0, places), ids, lengths)


@dataclass
class PrefetchNotes:
    """Conditions under which a batch's prefetched rows are valid."""

    loads_seen: int = 0
    """The number of writes by hand before the batch was announced."""
    due: int = 0
    """The required number of the batch's lookup; early rows are valid for that lookup only."""
    follower: "BatchNotes | None" = None
    """The batch whose early rows are sent after this one's rows."""


@dataclass(frozen=True)
class Eviction:
    """The rows that a batch's id maps have given to other ids."""

    number: int
    """The batch's number, which determines the rows' initial values."""
    rows: Mapping[str, torch.Tensor]
    """Row ids, by table."""


@dataclass
class BatchNotes:
    """The stages' notes on a batch; each stage has its own fields."""

    is_training: bool = False
    """True if the lookup will have a backward that trains."""
    backward: int | None = None
    """That backward's number, once it has begun."""
    lookup: str = ""
    """The lookup's name, the same on all ranks."""
    error: TwoDError | None = None
    check: Check | None = None
    """The check of all ranks' batches, in flight."""
    is_empty: bool = False
    """True if the batch has no samples and this matters."""
    bags_of_samples: BagsOfSamples | None = None
    """Each sample's bags, with variable batch sizes."""
    bag_lengths: dict[str, torch.Tensor] = field(default_factory=dict)
    """The ids per bag, for outputs that this package averages instead of TorchRec."""
    hot: HotBatch | None = None
    """The hot ids; `None` without hot rows."""
    hot_output: dict[str, torch.Tensor] = field(default_factory=dict)
    """The hot rows that replicas returned, by feature."""
    position_weights: torch.Tensor | None = None
    """The weights that the lookup has read, by slot, until the output is complete."""
    prefetch: PrefetchNotes = field(default_factory=PrefetchNotes)
    shardings: list[EmbeddingShardingContext | None] = field(default_factory=list)
    """TorchRec's contexts, one per sharding; row exchange and non-empty bags have their own
    contexts, which know what will arrive."""
    asked: Any = None
    """The batch's input exchange, until its lookup."""
    evictions: list[Eviction] = field(default_factory=list)
    """The rows to reset before the lookup, with managed collisions."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``, to which a pipeline hands the batch."""
        if self.hot is not None:
            self.hot.record_stream(stream)
        for lengths in self.bag_lengths.values():
            lengths.record_stream(stream)  # pyright: ignore[reportArgumentType]
        if self.bags_of_samples is not None:
            self.bags_of_samples.record_stream(stream)


@dataclass
class _NotedContext(Multistreamable):
    """A batch's context with this package's notes."""

    notes: BatchNotes = field(default_factory=BatchNotes)
    given: Any = None
    """The batch as the module received it."""

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive for ``stream``."""
        super().record_stream(stream)  # type: ignore[safe-super]
        self.notes.record_stream(stream)


@dataclass
class BagContext(_NotedContext, EmbeddingBagCollectionContext):
    """TorchRec's batch context in an `EmbeddingBagCollection`, with notes."""


@dataclass
class SequenceContext(_NotedContext, EmbeddingCollectionContext):
    """TorchRec's batch context in an `EmbeddingCollection`, with notes."""


def watch_calls(module: nn.Module) -> None:
    """Let a module refuse batches other than those that a train pipeline has distributed for it.

    TorchRec would return the embeddings of the pipeline's next batch for them. It also warns of
    losses that are probably scaled.
    """
    module.register_forward_pre_hook(_check_distributed, with_kwargs=True)
    module.register_forward_pre_hook(_look_for_scaling)


def _look_for_scaling(module: nn.Module, _: object) -> None:
    devices = ("cpu", "cuda") if module.training and torch.is_grad_enabled() else ()
    for kind in devices:
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16:
            _warn_of_scaling()


@cache
def _warn_of_scaling() -> None:
    """Warn once that tables would train by a scaled loss, which gradients don't reveal."""
    if dist.get_rank() == 0:
        logger.warning(
            "tables are looked up under autocast in float16, which is mostly used with GradScaler: "
            "they would train by gradients of the scaled loss, wrongly. Use torch.bfloat16, or "
            "leave the loss as it is"
        )


def _check_distributed(module: nn.Module, inputs: Any, named: Mapping[str, Any]) -> None:
    features = named.get("features", *inputs[:1])
    awaited = getattr(distributed_ahead(module), "given", None)
    if not (isinstance(awaited, KeyedJaggedTensor) and isinstance(features, KeyedJaggedTensor)):
        return
    pairs = (features.values(), awaited.values()), (features.lengths(), awaited.lengths())
    for given, distributed in pairs:
        is_same = given.data_ptr() == distributed.data_ptr() and given.shape == distributed.shape
        if not is_same and not torch.equal(given, distributed):
            raise ConfigError(
                "a train pipeline is attached to the model, and has distributed another batch "
                "than the one that it got; call the pipeline's progress(), or detach() it first"
            )


Output = KeyedTensor | Mapping[str, JaggedTensor]
"""A sharded module's output: a `KeyedTensor` with bags, or a `JaggedTensor` per sequence."""


class Stage:
    """A stage that does nothing; subclasses override hooks."""

    def before_ids_travel(self, notes: BatchNotes, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the batch for the next stage or, after the last one, for TorchRec."""
        return batch

    def before_lookup(self, notes: BatchNotes) -> None:
        """Prepare a batch's rows for reading."""

    def on_arrival(self, notes: BatchNotes, arrived: Any) -> Any:
        """Return the arrived ids for the next stage or TorchRec."""
        return arrived

    def before_accumulating(self) -> None:
        """Do what needs a complete state, before a step accumulates backwards."""

    def while_rows_travel(self, notes: BatchNotes) -> None:
        """Compute on this rank while TorchRec's output exchange runs."""

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """Return the module's output for the previous stage or the user."""
        return output

    def before_backward(self, notes: BatchNotes) -> None:
        """Prepare for a batch's gradients, before they reach any kernel."""

    def before_use(self) -> None:
        """Put rows where lookups and updates find them; the state may have been read or loaded."""

    @property
    def is_behind(self) -> bool:
        """True if `before_read` has to communicate; the same on all ranks."""
        return False

    def before_read(self) -> None:
        """Bring weights and optimizer state up to date, before they are read or written."""

    def after_write(self) -> None:
        """Note that weights or optimizer state were written by hand, or from a checkpoint."""


class StrayGradients(Stage):
    """Refuses the batch after gradients that reach tables past their lookup, as none applies them.

    Args:
        tables: the sharded tables' modules, by name.
        kernels: FBGEMM's modules, whose parameters receive those gradients.
    """

    def __init__(self, tables: nn.ModuleDict, kernels: Iterable[nn.Module]) -> None:
        self._tables = tables
        self._error: UnsupportedError | None = None
        params = list(chain.from_iterable(kernel.parameters() for kernel in kernels))
        # On a CPU a table is a part of such a parameter. On a GPU it is a part of a buffer, and in
        # 8 bits its own parameter: a leaf, which gradients reach.
        weights = [cast(torch.Tensor, table.weight) for table in tables.values()]
        own = [weight.requires_grad_() for weight in weights if weight.is_leaf]
        for param in (*params, *own):
            if param.requires_grad:
                # Before a loop can clear them. A lookup's backward arrives here without a gradient.
                param.register_post_accumulate_grad_hook(held_weakly(self._note))

    def _note(self, reached: torch.Tensor) -> None:
        for name, table in self._tables.items() if has_gradient(reached) else ():
            weight = cast(torch.Tensor, table.weight)
            grad = take_gradient(weight) if weight.is_leaf else weight.grad
            if grad is not None and bool(grad.any()):
                self._error = UnsupportedError(
                    f"table {name!r} got a gradient past its lookup, which no optimizer applies; "
                    "let the loss use the module's outputs in place of the table's weight"
                )

    def before_ids_travel(self, notes: BatchNotes, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Let all ranks raise the error, if any."""
        error, self._error = self._error, None
        notes.error = notes.error or error
        return batch


class ClipGradients(Stage):
    """Clips the gradient of each bag or id, as FBGEMM's kernels do, before anything is summed.

    Kernels alone would see averaged bags' gradients after the division, and exchanged rows'
    gradients after their sum.
    """

    def __init__(self, bounds: Mapping[str, float], num_ranks: int) -> None:
        self._bounds, self._num_ranks = dict(bounds), num_ranks
        """The largest gradient, by output name, and the rank count that later divides gradients."""

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """Return the output, whose gradient will be clipped after the program's own hooks."""
        if not self._bounds:
            return output
        if isinstance(output, KeyedTensor):
            names, dims = output.keys(), output.length_per_key()
            by_column = [name for name, dim in zip(names, dims, strict=True) for _ in range(dim)]
            return KeyedTensor(names, dims, self._clipped(output.values(), by_column))
        clipped: dict[str, JaggedTensor] = {}
        for name, rows in output.items():
            values = self._clipped(rows.values(), [name])
            clipped[name] = JaggedTensor(values, rows.weights_or_none(), rows.lengths())
        return clipped

    def _clipped(self, output: torch.Tensor, names: Sequence[str]) -> Any:
        bounds = [self._bounds.get(name, math.inf) for name in names]
        return _Clipped.apply(output, output.new_tensor(bounds), self._num_ranks)


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, bounds: torch.Tensor, num_ranks: int
    ) -> torch.Tensor:
        ctx.bounds, ctx.num_ranks = bounds, num_ranks
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # By TorchRec's current switch, as in its own division.
        largest = ctx.bounds * (ctx.num_ranks if get_gradient_division() else 1)
        return grads[0].clamp(-largest, largest), None, None
