"""`IdCheck`: ids that no row has are found before anything travels."""

import enum
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.errors import ConfigError, InputError
from torchrec_2dsp.shard.hot_rows.split import count_per_bag


class BadIds(enum.Enum):
    """What is done with an id that its table has no row for."""

    RAISE = "raise"
    """All ranks raise the same `InputError`, before the batch is looked up."""

    DROP = "drop"
    """It leaves its bag."""

    CLAMP = "clamp"
    """It becomes the table's first or last row."""

    @classmethod
    def of(cls, value: "BadIds | str") -> "BadIds":
        """A member, or the error that names those that there are."""
        try:
            return cls(value)
        except ValueError as error:
            members = ", ".join(repr(member.value) for member in cls)
            raise ConfigError(f"bad_ids={value!r} is unknown; use one of {members}") from error


class IdCheck:
    """Looks at the ids of each batch."""

    def __init__(self, configs: Sequence[Any], policy: BadIds) -> None:
        """
        Args:
            configs: the tables that the batches look up.
            policy: what to do with bad ids.
        """
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
        """The features without bad ids, and what all ranks have to raise.

        Args:
            features: a batch, left as it is.
            error: what has been found wrong with it already.
        """
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
        """The features that look up tables."""
        return self._tables.keys()

    def _limits(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """For each id, how many rows its table has."""
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
"""For features that look up no table."""


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
