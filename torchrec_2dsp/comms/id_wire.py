"""Ids on the wire: TorchRec's exchange of ids, in which each id takes the bytes that it needs."""

from copy import copy
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_2dsp._compat.torchrec import KJTAllToAll
from torchrec_2dsp.codecs.ids import num_id_bytes, pack_ids, unpack_ids


class NarrowIds(KeyedJaggedTensor):
    """A batch that gives TorchRec's exchange a row of bytes for each id, and takes such rows."""

    num_bytes: int

    @classmethod
    def of(cls, features: KeyedJaggedTensor, num_bytes: int) -> KeyedJaggedTensor:
        """Return the batch with ids in ``num_bytes``, or as it is if they are as short."""
        if features.values().itemsize <= num_bytes:
            return features
        # A copy has the lengths and offsets that are already known.
        narrow = copy(features)
        narrow.__class__ = cls
        assert isinstance(narrow, cls)
        narrow.num_bytes = num_bytes
        return narrow

    def dist_tensors(self) -> list[torch.Tensor]:
        """Return the tensors to exchange."""
        lengths, ids, *others = super().dist_tensors()
        return [lengths, pack_ids(ids, self.num_bytes), *others]

    @staticmethod
    def dist_init(
        keys: list[str], tensors: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> KeyedJaggedTensor:
        """Make a batch of exchanged tensors."""
        lengths, packed, *others = tensors
        return KeyedJaggedTensor.dist_init(
            keys, [lengths, unpack_ids(packed), *others], *args, **kwargs
        )


def narrow_ids(exchange: KJTAllToAll, num_rows: int) -> None:
    """Let an exchange send ids of tables with up to ``num_rows`` in as few bytes as they need."""
    num_bytes = num_id_bytes(num_rows)
    # A hook, because TorchRec's pipelines replace `forward` by one that fuses exchanges.
    exchange.register_forward_pre_hook(lambda _, inputs: (NarrowIds.of(inputs[0], num_bytes),))
