"""Checks of a batch before its ids travel: form, ids and batch sizes, alike on all ranks.

TorchRec takes the order of features from the first batch, and ranks exchange numbers of their own
batch's types. It checks neither again: features in another order would be looked up in the wrong
tables, and other types would end processes.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_2dsp.comms.alarm import Alarm
from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.shard.hot_sets import count_per_bag
from torchrec_2dsp.shard.stages import BatchNotes, Output, Stage
from torchrec_2dsp.shard.variable_batch_sizes import distinct_bags


class BadIds(enum.Enum):
    """What to do with an id that its table has no row for."""

    RAISE = "raise"
    """All ranks raise the same `InputError`, before the batch is looked up."""

    DROP = "drop"
    """It leaves its bag."""

    CLAMP = "clamp"
    """It becomes the table's first or last row."""

    @classmethod
    def of(cls, value: "BadIds | str") -> "BadIds":
        """Return a member, or raise an error that names all members."""
        try:
            return cls(value)
        except ValueError as error:
            members = ", ".join(repr(member.value) for member in cls)
            raise ConfigError(f"bad_ids={value!r} is unknown; use one of {members}") from error


class IdCheck:
    """Checks the ids of each batch."""

    def __init__(self, configs: Sequence[Any], policy: BadIds) -> None:
        self._policy = policy
        self._tables: dict[str, tuple[str, int]] = {}
        for config in configs:
            for feature in config.feature_names:
                table = (config.name, config.num_embeddings)
                smallest = self._tables.setdefault(feature, table)
                # A feature may look up several tables: the smallest one decides.
                self._tables[feature] = min(smallest, table, key=lambda named: named[1])
        self.num_bad = 0
        """Bad ids of this rank so far."""

    @torch.no_grad()
    def __call__(
        self, features: KeyedJaggedTensor, error: InputError | None = None
    ) -> tuple[KeyedJaggedTensor, InputError | None]:
        """Return the features without bad ids, and the error that all ranks have to raise."""
        values = features.values()
        limits = self._limits(features)
        is_bad = (values >= limits) | ((values < 0) & (limits < _NO_LIMIT))
        if bool(is_bad.any()):
            self.num_bad += int(is_bad.sum())
            if self._policy is BadIds.RAISE:
                error = error or self._error(features, int(is_bad.nonzero()[0]))
            if self._policy is BadIds.DROP:
                features = _without(features, is_bad)
            else:
                # What is about to be raised has to travel first, and may not hurt on its way.
                clamped = values.long().clamp(min=0).minimum(limits - 1).to(values.dtype)
                values = torch.where(is_bad, clamped, values)
                features = _rebuilt(features, values, features.lengths())
        return features, error

    @property
    def features(self) -> Iterable[str]:
        """Return the features that look up tables."""
        return self._tables.keys()

    def _limits(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return the number of rows of each id's table."""
        device = features.values().device
        keys = features.keys()
        tables = [self._tables.get(key) for key in keys]
        by_key = [_NO_LIMIT if table is None else table[1] for table in tables]
        return torch.tensor(by_key, device=device).repeat_interleave(
            torch.tensor(features.length_per_key(), device=device),
            output_size=features.values().numel(),
        )

    def _error(self, features: KeyedJaggedTensor, position: int) -> InputError:
        bounds = features.offset_per_key()
        index = next(i for i, end in enumerate(bounds[1:]) if position < end)
        key = features.keys()[index]
        table, num_rows = self._tables[key]
        strides = features.stride_per_key()
        offsets = features.offsets()[sum(strides[:index]) : sum(strides[: index + 1]) + 1]
        sample = int(torch.searchsorted(offsets, position, right=True)) - 1
        return InputError(
            f"feature {key!r} has the id {int(features.values()[position])} in sample {sample} of "
            f"this rank's batch, but its table {table!r} has {num_rows} rows (0 to "
            f"{num_rows - 1}); correct the data, or pass bad_ids='drop' to the sharder"
        )


_NO_LIMIT = torch.iinfo(torch.int64).max


def _without(features: KeyedJaggedTensor, is_bad: torch.Tensor) -> KeyedJaggedTensor:
    dropped = count_per_bag(is_bad, features.offsets())
    lengths = features.lengths() - dropped.to(features.lengths().dtype)
    return _rebuilt(features, features.values()[~is_bad], lengths, ~is_bad)


def _rebuilt(
    features: KeyedJaggedTensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    is_kept: torch.Tensor | None = None,
) -> KeyedJaggedTensor:
    weights = features.weights_or_none()
    if weights is not None and is_kept is not None:
        weights = weights[is_kept]
    options: dict[str, Any] = {"stride": features.stride()}
    if features.variable_stride_per_key():
        options = {
            "stride_per_key_per_rank": features.stride_per_key_per_rank(),
            "inverse_indices": features.inverse_indices_or_none(),
        }
    return KeyedJaggedTensor(
        keys=features.keys(), values=values, weights=weights, lengths=lengths, **options
    )


_ID_TYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class NumberTypes:
    """A batch's number types."""

    ids: torch.dtype
    lengths: torch.dtype
    weights: torch.dtype | None
    """`None` for a batch without weights."""

    @classmethod
    def of(cls, batch: KeyedJaggedTensor) -> "NumberTypes":
        """Return a batch's types; other id types, which are refused, count as int32."""
        weights = batch.weights_or_none()
        return cls(
            ids=torch.int64 if batch.values().dtype == torch.int64 else torch.int32,
            lengths=torch.int64 if batch.lengths().dtype == torch.int64 else torch.int32,
            weights=None if weights is None else weights.dtype,
        )

    def joined(self, other: "NumberTypes") -> "NumberTypes":
        """Return the types that hold the numbers of both; weights if either has some."""
        both_weights = self.weights or other.weights
        if self.weights is not None and other.weights is not None:
            both_weights = torch.promote_types(self.weights, other.weights)
        return NumberTypes(
            ids=torch.promote_types(self.ids, other.ids),
            lengths=torch.promote_types(self.lengths, other.lengths),
            weights=both_weights,
        )


class BatchForm:
    """Brings batches into one form, or says why one can't be right."""

    def __init__(
        self, features: Iterable[str], group: dist.ProcessGroup, *, is_weighted: bool
    ) -> None:
        self._needed = frozenset(features)
        self._is_weighted = is_weighted
        self._group = group
        self._keys: list[str] = []
        self._types: NumberTypes | None = None

    def fit(
        self, batch: KeyedJaggedTensor, error: InputError | None = None
    ) -> tuple[KeyedJaggedTensor, InputError | None]:
        """Return the batch in the form of the first one, and what is wrong with it, if anything.

        A batch that can't be right is replaced by one without ids, so that the other ranks, which
        wait for its ids, learn about the error.

        Collectives:
            For the first batch, a gather of its number types from all ranks.
        """
        keys, num_samples = batch.keys(), batch.stride()
        if self._types is None:
            self._types = self._joined_types(batch)
            self._keys = [key for key in keys if key in self._needed]
            self._keys += sorted(self._needed.difference(keys))
        error = error or self._error(batch)
        if error is not None:
            return self._without_ids(num_samples, batch.values().device), error
        batch = self._usable(batch)
        if keys != self._keys:
            batch = self._in_order(batch)
        return self._with_types(batch), None

    def _joined_types(self, batch: KeyedJaggedTensor) -> NumberTypes:
        own = NumberTypes.of(batch)
        by_rank = [own] * dist.get_world_size(self._group)
        dist.all_gather_object(by_rank, own, group=self._group)
        joined = by_rank[0]
        for types in by_rank[1:]:
            joined = joined.joined(types)
        weights = joined.weights or torch.float32
        return replace(joined, weights=weights if self._is_weighted else None)

    def _error(self, batch: KeyedJaggedTensor) -> InputError | None:
        ids, lengths, weights = batch.values(), batch.lengths(), batch.weights_or_none()
        missing = sorted(self._needed.difference(batch.keys()))
        if missing:
            return InputError(
                f"this rank's batch has no feature {missing[0]!r}, but features "
                f"{', '.join(batch.keys())}; give each batch the features of all tables"
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
        if lengths.numel() and int(lengths.min()) < 0:
            return InputError(
                f"a length of this rank's batch is {int(lengths.min())}; lengths count ids, so "
                "they are 0 or more"
            )
        if int(lengths.sum()) != ids.numel():
            return InputError(
                f"the lengths of this rank's batch add up to {int(lengths.sum())}, but it has "
                f"{ids.numel()} ids; correct one of them"
            )
        return self._weights_error(weights, ids.numel()) if self._is_weighted else None

    def _weights_error(self, weights: torch.Tensor | None, num_ids: int) -> InputError | None:
        if weights is None and num_ids:
            return InputError(
                "this rank's batch has no weights, which the tables need (is_weighted=True); give "
                "each id a weight"
            )
        if weights is not None and weights.numel() != num_ids:
            return InputError(
                f"this rank's batch has {num_ids} ids, but {weights.numel()} weights; give "
                "each id a weight"
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

    def _usable(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the batch in contiguous memory, and without needless weights.

        FBGEMM's kernels ignore strides. TorchRec's unsharded modules ignore needless weights.
        """
        weights = batch.weights_or_none()
        tensors = [batch.values(), batch.lengths(), *([] if weights is None else [weights])]
        is_needless = weights is not None and not self._is_weighted
        if not is_needless and all(tensor.is_contiguous() for tensor in tensors):
            return batch
        return KeyedJaggedTensor(
            keys=batch.keys(),
            values=batch.values().contiguous(),
            lengths=batch.lengths().contiguous(),
            weights=None if weights is None or is_needless else weights.contiguous(),
            stride=batch.stride(),
        )

    def _in_order(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        if not batch.stride():
            return self._without_ids(0, batch.values().device)
        places = {key: place for place, key in enumerate(batch.keys())}
        return batch.permute([places[key] for key in self._keys])

    def _with_types(self, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
        assert self._types is not None
        weights = batch.weights_or_none()
        if NumberTypes.of(batch) == self._types and batch.values().dtype in _ID_TYPES:
            return batch
        return KeyedJaggedTensor(
            keys=batch.keys(),
            values=batch.values().to(self._types.ids),
            lengths=batch.lengths().to(self._types.lengths),
            weights=None if self._types.weights is None else self._weights(weights, batch),
            stride=batch.stride(),
        )

    def _weights(self, weights: torch.Tensor | None, batch: KeyedJaggedTensor) -> torch.Tensor:
        assert self._types is not None
        if weights is None:
            return batch.values().new_empty(0, dtype=self._types.weights)
        return weights.to(self._types.weights)

    def _without_ids(self, num_samples: int, device: torch.device) -> KeyedJaggedTensor:
        types = self._types
        assert types is not None
        num_lengths = len(self._keys) * num_samples
        return KeyedJaggedTensor(
            keys=self._keys,
            values=torch.empty(0, dtype=types.ids, device=device),
            lengths=torch.zeros(num_lengths, dtype=types.lengths, device=device),
            weights=None
            if types.weights is None
            else torch.empty(0, dtype=types.weights, device=device),
            stride=num_samples,
        )


def features_of(configs: Sequence[Any]) -> list[str]:
    """Return the features that look up tables, table by table."""
    return [feature for config in configs for feature in config.feature_names]


class OneBatchSize(Stage):
    """Turns batches with a batch size per feature into ordinary batches, and back at the output."""

    def __init__(self, configs: Sequence[Any], pack_size: int) -> None:
        self._features = frozenset(features_of(configs))
        self._pack_size = pack_size

    def before_ids_travel(
        self, notes: BatchNotes, features: KeyedJaggedTensor
    ) -> KeyedJaggedTensor:
        """Return the batch's distinct bags."""
        bags = distinct_bags(features, self._features)
        notes.bags_of_samples, notes.error = bags.of_samples, bags.error
        if self._pack_size > 1 and features.variable_stride_per_key():
            notes.error = notes.error or InputError(
                "a batch with a batch size for each feature has bags that don't fill packs of "
                f"{self._pack_size} numbers, in which the codecs (such as TorchRec's INT8) encode; "
                "leave them out and plan with transports=['int8']"
            )
        return bags.features

    def on_output(self, notes: BatchNotes, output: Output) -> Output:
        """Give each sample its bags, or sequences."""
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
        """Finds ids that no row has."""
        self._form = BatchForm(features_of(configs), alarm.group, is_weighted=is_weighted)
        self._alarm = alarm

    def before_ids_travel(
        self, notes: BatchNotes, features: KeyedJaggedTensor
    ) -> KeyedJaggedTensor:
        """Return the batch as it will be looked up.

        Collectives:
            That of `Alarm.check`, waited for before the lookup; for the first batch that of
            `BatchForm.fit`.
        """
        features, error = self._form.fit(features, notes.error)
        features, notes.error = self.ids(features, error)
        notes.check = self._alarm.check(notes.error)
        return features

    def before_lookup(self, notes: BatchNotes) -> None:
        """Raise, on all ranks, what is wrong with one rank's batch."""
        if notes.check is not None:
            with record_function("## check ids ##"):
                notes.check.wait()
