"""Checks a batch's form, ids and batch sizes before its ids travel, the same way on all ranks.

TorchRec takes the feature order from the first batch, and ranks exchange numbers in their own
batch's types. It checks neither again: reordered features would be looked up in the wrong tables,
and other types would crash processes.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_2dsp.comms.alarm import Alarm, Signal
from torchrec_2dsp.errors import InputError, TwoDError, check_choice
from torchrec_2dsp.rows.gradients import repeated_to_end
from torchrec_2dsp.shard.stages import (
    BagsOfSamples,
    BatchNotes,
    Output,
    Stage,
    count_per_bag,
    features_by_output,
    ids_per_feature,
)


class BadIds(enum.Enum):
    """The treatment of ids without a row in their table."""

    RAISE = "raise"
    """All ranks raise the same `InputError` before the batch is looked up."""
    DROP = "drop"
    """The id is removed from its bag."""
    CLAMP = "clamp"
    """The id becomes the table's first or last row."""

    @classmethod
    def of(cls, value: "BadIds | str") -> "BadIds":
        """Return the member, or raise an error that names all members."""
        check_choice("bad_ids", value, cls)
        return cls(value)


class IdCheck:
    """Checks each batch's ids; all its features have one batch size."""

    def __init__(self, configs: Sequence[Any], policy: BadIds) -> None:
        self._policy = policy
        self._tables: dict[str, tuple[str, int]] = {}
        for config in configs:
            for feature in config.feature_names:
                table = (config.name, config.num_embeddings)
                smallest = self._tables.setdefault(feature, table)
                # If a feature looks up several tables, the smallest one's row count is the limit.
                self._tables[feature] = min(smallest, table, key=lambda named: named[1])
        self.num_bad = 0
        """The number of bad ids on this rank so far."""

    @torch.no_grad()
    def __call__(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, InputError | None]:
        """Return the features without bad ids, and the error that all ranks must raise, if any."""
        values, error = features.values(), None
        is_bad, limits = self.find(features.keys(), values, ids_per_feature(features))
        if bool(is_bad.any()):
            self.num_bad += int(is_bad.sum())
            if self._policy is BadIds.RAISE:
                error = self._error(features, int(is_bad.nonzero()[0]))
            if self._policy is BadIds.DROP:
                features = _without(features, is_bad)
            else:
                # Ids travel before their error is raised, so bad ones must be harmless.
                clamped = values.long().clamp(min=0).minimum(limits - 1).to(values.dtype)
                values = torch.where(is_bad, clamped, values)
                features = with_parts(features, values=values)
        return features, error

    def find(
        self, keys: Sequence[str], values: torch.Tensor, sizes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which ids are bad, and each id's row limit; the features' sizes may be wrong."""
        by_key = [self._tables[key][1] if key in self._tables else _NO_LIMIT for key in keys]
        limits = repeated_to_end((*by_key, _NO_LIMIT), sizes, values.numel())
        is_negative = values < 0
        if _NO_LIMIT in by_key:
            is_negative &= limits < _NO_LIMIT
        return (values >= limits) | is_negative, limits

    def _error(self, features: KeyedJaggedTensor, position: int) -> InputError:
        bag = int(torch.searchsorted(features.offsets(), position, right=True)) - 1
        index, sample = divmod(bag, features.stride())
        key = features.keys()[index]
        table, num_rows = self._tables[key]
        return InputError(
            f"feature {key!r} has the id {int(features.values()[position])} in sample {sample} of "
            f"this rank's batch, but its table {table!r} has {num_rows} rows (0 to "
            f"{num_rows - 1}); correct the data, or pass bad_ids='drop' to the sharder"
        )


_NO_LIMIT = torch.iinfo(torch.int64).max


def _without(features: KeyedJaggedTensor, is_bad: torch.Tensor) -> KeyedJaggedTensor:
    dropped, weights = count_per_bag(is_bad, features.offsets()), features.weights_or_none()
    lengths = features.lengths() - dropped.to(features.lengths().dtype)
    kept_weights = None if weights is None else weights[~is_bad]
    values = features.values()[~is_bad]
    return with_parts(features, values=values, lengths=lengths, weights=kept_weights)


def with_parts(batch: KeyedJaggedTensor, **parts: Any) -> KeyedJaggedTensor:
    """Return a copy of a batch with some tensors or sizes replaced."""
    own_parts = {
        "keys": batch.keys(),
        "values": batch.values(),
        "weights": batch.weights_or_none(),
        "lengths": batch.lengths(),
        "stride": batch.stride(),
    }
    return KeyedJaggedTensor(**{**own_parts, **parts})


_ID_TYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class NumberTypes:
    """The number types of a batch's tensors."""

    ids: torch.dtype
    lengths: torch.dtype
    weights: torch.dtype | None
    """The weights' type; `None` for a batch without weights."""

    @classmethod
    def of(cls, batch: KeyedJaggedTensor) -> "NumberTypes":
        """Return a batch's types; other id types, which are refused, count as int32.

        FBGEMM can't sort 16-bit weights, so these count as float32.
        """
        weights = batch.weights_or_none()
        return cls(
            ids=torch.int64 if batch.values().dtype == torch.int64 else torch.int32,
            lengths=torch.int64 if batch.lengths().dtype == torch.int64 else torch.int32,
            weights=None if weights is None else torch.promote_types(weights.dtype, torch.float32),
        )

    def joined(self, other: "NumberTypes") -> "NumberTypes":
        """Return types that hold both batches' numbers, with weights if either batch has them."""
        both_weights = self.weights or other.weights
        if self.weights is not None and other.weights is not None:
            both_weights = torch.promote_types(self.weights, other.weights)
        return NumberTypes(
            ids=torch.promote_types(self.ids, other.ids),
            lengths=torch.promote_types(self.lengths, other.lengths),
            weights=both_weights,
        )


class _Tally(NamedTuple):
    """A batch's checks and sizes, fetched in one transfer, as each transfer waits for the GPU."""

    has_negative_lengths: bool
    has_bad_ids: bool
    ids_per_feature: list[int]

    @classmethod
    def of(cls, batch: KeyedJaggedTensor, sizes: torch.Tensor, is_bad: torch.Tensor) -> "_Tally":
        flags = [flag.any(dim=0, keepdim=True) for flag in (batch.lengths() < 0, is_bad)]
        is_negative, has_bad, *counts = torch.cat([*flags, sizes]).tolist()
        return cls(bool(is_negative), bool(has_bad), counts)


class BatchForm:
    """Converts batches to one form, and detects invalid ones."""

    def __init__(
        self, features: Iterable[str], group: dist.ProcessGroup, *, is_weighted: bool
    ) -> None:
        self._needed = frozenset(features)
        self._is_weighted = is_weighted
        self._group = group
        self._keys: list[str] = []
        self._types: NumberTypes | None = None

    def fit(
        self, batch: KeyedJaggedTensor, ids: IdCheck, error: TwoDError | None = None
    ) -> tuple[KeyedJaggedTensor, TwoDError | None]:
        """Return the batch in the first one's form, without bad ids, and its error, if any.

        An invalid batch is replaced by one without ids, so that ranks waiting for its ids learn of
        the error.

        Collectives:
            An all-gather of all ranks' number types, for the first batch.
        """
        if self._types is None:
            self._types = self._joined_types(batch)
            keys = batch.keys()
            self._keys = [key for key in keys if key in self._needed]
            self._keys += sorted(self._needed.difference(keys))
        error, tally = error or self._shape_error(batch), None
        if error is None:
            sizes = ids_per_feature(batch)
            is_bad, _ = ids.find(batch.keys(), batch.values(), sizes)
            tally = _Tally.of(batch, sizes, is_bad)
            error = self._tally_error(batch, tally)
        if tally is None or error is not None:
            return self._without_ids(batch.stride(), batch.values().device), error
        types, num_ids = self._types, tally.ids_per_feature
        if tally.has_bad_ids:
            # Another type would turn some bad ids into valid row numbers.
            batch, error = ids(self._in_form(batch, replace(types, ids=torch.int64), num_ids))
            num_ids = None
        return self._in_form(batch, types, num_ids), error

    def _joined_types(self, batch: KeyedJaggedTensor) -> NumberTypes:
        own = NumberTypes.of(batch)
        by_rank = [own] * dist.get_world_size(self._group)
        dist.all_gather_object(by_rank, own, group=self._group)
        joined = reduce(NumberTypes.joined, by_rank)
        weights = joined.weights or torch.float32
        return replace(joined, weights=weights if self._is_weighted else None)

    def error_in(self, batch: KeyedJaggedTensor) -> InputError | None:
        """Return the error in a batch's form, if any."""
        if (error := self._shape_error(batch)) is not None:
            return error
        tally = _Tally.of(batch, ids_per_feature(batch), batch.values()[:0])
        return self._tally_error(batch, tally)

    def _shape_error(self, batch: KeyedJaggedTensor) -> InputError | None:
        ids, lengths = batch.values(), batch.lengths()
        missing = sorted(self._needed.difference(batch.keys()))
        if missing:
            return InputError(
                f"this rank's batch has no feature {missing[0]!r}, but {batch.keys()}; give each "
                "batch the features of all tables, in a TensorDict as jagged nested tensors"
            )
        if ids.dim() != 1 or lengths.dim() != 1:
            return InputError(
                f"the ids of this rank's batch have the shape {list(ids.shape)} and the lengths "
                f"{list(lengths.shape)}; both must have one dimension"
            )
        if ids.dtype not in _ID_TYPES and ids.numel():
            return InputError(
                f"the ids of this rank's batch are {ids.dtype}; make them int32 or int64"
            )
        if lengths.numel() != len(batch.keys()) * batch.stride():
            return InputError(
                f"this rank's batch has {lengths.numel()} lengths, but {len(batch.keys())} "
                f"features of {batch.stride()} samples; give a length for each"
            )
        return None

    def _tally_error(self, batch: KeyedJaggedTensor, tally: _Tally) -> InputError | None:
        lengths, num_ids = batch.lengths(), batch.values().numel()
        if tally.has_negative_lengths:
            return InputError(
                f"a length of this rank's batch is {int(lengths.min())}; lengths count ids, so "
                "they are 0 or more"
            )
        if sum(tally.ids_per_feature) != num_ids:
            return InputError(
                f"the lengths of this rank's batch add up to {sum(tally.ids_per_feature)}, but it "
                f"has {num_ids} ids; correct one of them"
            )
        return self._weights_error(batch.weights_or_none(), num_ids) if self._is_weighted else None

    def _weights_error(self, weights: torch.Tensor | None, num_ids: int) -> InputError | None:
        if weights is None and num_ids:
            return InputError(
                "this rank's batch has no weights, which the tables need (is_weighted=True); give "
                "each id a weight"
            )
        if weights is not None and weights.shape != (num_ids,):
            return InputError(
                f"this rank's batch has {num_ids} ids, but weights of the shape "
                f"{list(weights.shape)}; give each id a weight, in one dimension"
            )
        if weights is not None and weights.numel() and not weights.is_floating_point():
            return InputError(
                f"the weights of this rank's batch are {weights.dtype}; make them floating-point"
            )
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            return InputError(
                "this rank's batch has weights that need a gradient, which they would not get; "
                "detach them"
            )
        return None

    def _in_form(
        self, batch: KeyedJaggedTensor, types: NumberTypes, num_ids: list[int] | None
    ) -> KeyedJaggedTensor:
        """Return the batch in contiguous memory, in the first batch's feature order and types."""
        values, lengths, weights = batch.values(), batch.lengths(), batch.weights_or_none()
        if types.weights is not None:
            weights = (values[:0] if weights is None else weights).to(types.weights).contiguous()
        batch = with_parts(
            batch,
            values=values.to(types.ids).contiguous(),
            lengths=lengths.to(types.lengths).contiguous(),
            weights=None if types.weights is None else weights,
            length_per_key=num_ids,
        )
        if batch.keys() == self._keys:
            return batch
        if not batch.stride():
            return self._without_ids(0, batch.values().device)
        return batch.permute([batch.keys().index(key) for key in self._keys])

    def _without_ids(self, num_samples: int, device: torch.device) -> KeyedJaggedTensor:
        types = self._types
        assert types is not None
        values = torch.empty(0, dtype=types.ids, device=device)
        weights = None if types.weights is None else values.to(types.weights)
        lengths = torch.zeros(len(self._keys) * num_samples, dtype=types.lengths, device=device)
        return KeyedJaggedTensor(self._keys, values, weights, lengths, stride=num_samples)


def features_of(configs: Sequence[Any]) -> list[str]:
    """Return the features that look up tables, table by table."""
    return [feature for config in configs for feature in config.feature_names]


class DistinctBags(NamedTuple):
    """A batch with one batch size for all features."""

    features: KeyedJaggedTensor
    """The bags; none if the batch is invalid."""
    of_samples: BagsOfSamples | None
    """Each sample's bags; `None` in ordinary batches."""
    error: InputError | None = None


@torch.no_grad()
def distinct_bags(
    features: KeyedJaggedTensor, needed: Iterable[str], *, are_pooled: bool = False
) -> DistinctBags:
    """Return a batch's bags, and each sample's bag numbers; ordinary batches stay unchanged.

    A batch with variable sizes (VBE) has distinct bags for each feature, and lists which of them
    each sample has. TorchRec passes the sizes on to every exchange and kernel, which few of its
    sharding types support. So features with fewer bags are padded with empty ones before anything
    sees the batch, and samples get their bags at the output, by `BagsOfSamples`.

    Example:
        >>> import torch
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> from torchrec_2dsp.shard.batch import distinct_bags
        >>> features = KeyedJaggedTensor(
        ...     ["user", "item"],
        ...     torch.tensor([7, 8, 1, 2, 3]),
        ...     lengths=torch.tensor([2, 1, 1, 1]),  # One user, three items.
        ...     stride_per_key_per_rank=[[1], [3]],
        ...     inverse_indices=(["user", "item"], torch.tensor([[0, 0, 0], [2, 0, 1]])),
        ... )
        >>> bags = distinct_bags(features, ["user", "item"])
        >>> bags.features.lengths().view(2, 3).tolist()
        [[2, 0, 0], [1, 1, 1]]
        >>> bags.of_samples.indices.tolist()
        [[0, 0, 0], [2, 0, 1]]
    """
    _, of_samples = features.inverse_indices_or_none() or (None, None)
    # TorchRec's unsharded bags are also shared in a batch of one size; its sequences aren't.
    are_shared = are_pooled and of_samples is not None and of_samples.numel() > 0
    if not (are_shared or features.variable_stride_per_key()):
        return DistinctBags(features, None)
    sizes = features.stride_per_key()
    lengths, weights = features.lengths(), features.weights_or_none()
    error = _sizes_error(features, needed)
    if error is not None:
        nothing = {"values": features.values()[:0], "lengths": lengths[:0], "stride": 0}
        no_weights = None if weights is None else weights[:0]
        return DistinctBags(with_parts(features, weights=no_weights, **nothing), None, error)
    largest = max(sizes, default=0)
    numbers = torch.arange(largest, device=lengths.device)
    is_there = numbers < torch.tensor(sizes, device=lengths.device).unsqueeze(1)
    padded = lengths.new_zeros(is_there.shape).masked_scatter_(is_there, lengths)
    bags = with_parts(features, lengths=padded.view(-1), stride=largest)
    names, indices = features.inverse_indices()
    rows = {name: row for row, name in enumerate(names)}
    return DistinctBags(bags, BagsOfSamples(rows, indices.long()))


def _sizes_error(features: KeyedJaggedTensor, needed: Iterable[str]) -> InputError | None:
    """Return the error in a batch's sizes or its samples' bags, if any."""
    sizes = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    num_lengths = features.lengths().numel()
    if sum(sizes.values()) != num_lengths:
        return InputError(
            f"the batch sizes of the features are {sizes}, together {sum(sizes.values())}, but "
            f"there are {num_lengths} lengths; correct stride_per_key_per_rank"
        )
    names_and_indices = features.inverse_indices_or_none()
    if names_and_indices is None:
        return InputError(
            "a batch with a batch size for each feature (stride_per_key_per_rank) must say which "
            "bag each sample has; pass inverse_indices to the KeyedJaggedTensor"
        )
    names, indices = names_and_indices
    if indices.dim() != 2 or len(names) != len(indices):
        return InputError(
            f"inverse_indices name {len(names)} features, but their tensor has the shape "
            f"{list(indices.shape)}; it must have a row for each name and a column for each sample"
        )
    looked_up = [feature for feature in needed if feature in sizes]
    lacking = [feature for feature in looked_up if feature not in names]
    if lacking:
        return InputError(
            f"inverse_indices lack the feature {lacking[0]!r}; they must have a row for each "
            "feature that is looked up"
        )
    rows = [row for row, name in enumerate(names) if name in looked_up]
    limits = torch.tensor([sizes[names[row]] for row in rows], device=indices.device)
    bags = indices[rows]
    is_bad = (bags < 0) | (bags >= limits.unsqueeze(1))
    if not bool(is_bad.any()):
        return None
    index, sample = is_bad.nonzero()[0].tolist()
    row = rows[index]
    return InputError(
        f"inverse_indices give sample {sample} the bag {int(indices[row, sample])} of feature "
        f"{names[row]!r}, which has {sizes[names[row]]} bags; correct inverse_indices or "
        "stride_per_key_per_rank"
    )


class OneBatchSize(Stage):
    """Turns batches with a batch size per feature into ordinary ones, and back at the output."""

    def __init__(self, configs: Sequence[Any], pack_size: int) -> None:
        self._feature_of = features_by_output(configs)
        self._pack_size = pack_size
        self._are_pooled = hasattr(configs[0], "pooling")

    def before_ids_travel(self, notes: BatchNotes, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the batch's distinct bags."""
        needed = frozenset(self._feature_of.values())
        bags = distinct_bags(batch, needed, are_pooled=self._are_pooled)
        notes.error = bags.error
        if bags.of_samples is not None:
            notes.bags_of_samples = bags.of_samples.by_output(self._feature_of)
        if self._pack_size > 1 and batch.variable_stride_per_key():
            notes.error = notes.error or InputError(
                "a batch with a batch size for each feature has bags that don't fill packs of "
                f"{self._pack_size} numbers, in which the codecs (such as TorchRec's INT8) encode; "
                "leave them out and plan with precision=['int8']"
            )
        return bags.features

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """Give each sample its bags or sequences."""
        if notes.bags_of_samples is None:
            return output
        if isinstance(output, KeyedTensor):
            return notes.bags_of_samples.pooled(output)
        return notes.bags_of_samples.sequences(output)


class BatchCheck(Stage):
    """Checks each batch's form, then its ids."""

    def __init__(
        self, configs: Sequence[Any], policy: BadIds, alarm: Alarm, is_weighted: bool
    ) -> None:
        self.ids = IdCheck(configs, policy)
        """The check that finds bad ids."""
        self._form = BatchForm(features_of(configs), alarm.group, is_weighted=is_weighted)
        self._alarm = alarm

    def before_ids_travel(self, notes: BatchNotes, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the batch as it will be looked up.

        Collectives:
            `Alarm.check`'s, waited for before the lookup; before it `BatchForm.fit`'s.
        """
        batch, notes.error = self._form.fit(batch, self.ids, notes.error)
        signal = Signal.READY if self._alarm.board.activity.is_last_batch else Signal.WELL
        signal = signal if notes.is_training else Signal.OUTSIDE
        notes.check = self._alarm.check(notes.error, signal)
        return batch

    def before_lookup(self, notes: BatchNotes) -> None:
        """Raise any rank's error on all ranks."""
        if notes.check is not None:
            with record_function("## check ids ##"):
                notes.check.wait()
