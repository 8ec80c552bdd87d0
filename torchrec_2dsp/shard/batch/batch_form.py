"""`BatchForm`: what all batches of a module have in common, on all ranks and in all steps.

TorchRec takes the order of features from the first batch, and what ranks exchange has the number
types of each rank's own batch. Neither is looked at again: features in another order are looked up
in the wrong tables, and other number types end processes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp.errors import InputError

_ID_TYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class NumberTypes:
    """The types of a batch's numbers."""

    ids: torch.dtype
    lengths: torch.dtype
    weights: torch.dtype | None
    """`None` for a batch without weights."""

    @classmethod
    def of(cls, batch: KeyedJaggedTensor) -> "NumberTypes":
        """The types of a batch; other types of ids, which are refused, count as int32."""
        weights = batch.weights_or_none()
        return cls(
            ids=torch.int64 if batch.values().dtype == torch.int64 else torch.int32,
            lengths=torch.int64 if batch.lengths().dtype == torch.int64 else torch.int32,
            weights=None if weights is None else weights.dtype,
        )

    def joined(self, other: "NumberTypes") -> "NumberTypes":
        """The types that hold the numbers of both; weights if one of them has some."""
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
        """
        Args:
            features: that the module looks up.
            group: all ranks.
            is_weighted: whether the tables take weights; if not, weights are ignored, as by
                TorchRec's unsharded modules.
        """
        self._needed = frozenset(features)
        self._is_weighted = is_weighted
        self._group = group
        self._keys: list[str] = []
        self._types: NumberTypes | None = None

    def fit(
        self, batch: KeyedJaggedTensor, error: InputError | None = None
    ) -> tuple[KeyedJaggedTensor, InputError | None]:
        """The batch in the form of the first one, and what is wrong with it, if anything.

        A batch that can't be right is replaced by one without ids, so that the other ranks, which
        wait for its ids, learn of the error.

        Args:
            batch: left as it is.
            error: what has been found wrong with it already.

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
        """The batch in contiguous memory, and without weights that nobody takes.

        FBGEMM's kernels don't look at strides.
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
