"""Ids in as few bytes as their table's rows need, lowest byte first."""

from typing import overload

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray


@overload
def num_id_bytes(num_rows: float) -> int: ...
@overload
def num_id_bytes(num_rows: NDArray[np.float64]) -> NDArray[np.float64]: ...
def num_id_bytes(num_rows: float | NDArray[np.float64]) -> int | NDArray[np.float64]:
    """Return an id's bytes for a table, with room for one more number, which means "no row".

    Example:
        >>> from torchrec_2dsp.codecs.ids import num_id_bytes
        >>> [num_id_bytes(num_rows) for num_rows in (255, 256, 65_535, 1_000_000)]
        [1, 2, 2, 3]
    """
    num_bytes = np.ceil(np.log2(np.asarray(num_rows, dtype=np.float64) + 1) / 8).clip(1, 8)
    return num_bytes if num_bytes.ndim else int(num_bytes)


def pack_ids(ids: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """Return a row of bytes for each id; ids that don't fit become the number for "no row".

    Example:
        >>> import torch
        >>> from torchrec_2dsp.codecs.ids import pack_ids, unpack_ids
        >>> packed = pack_ids(torch.tensor([5, 300, 70_000, -2]), num_bytes=2)
        >>> packed.tolist()
        [[5, 0], [44, 1], [255, 255], [255, 255]]
        >>> unpack_ids(packed)
        tensor([    5,   300, 65535, 65535])
    """
    # Every byte of -1 is 255.
    fitting = ids.clamp(min=-1, max=256**num_bytes - 1) if num_bytes < ids.itemsize else ids
    by_byte = fitting.contiguous().view(torch.uint8).view(ids.numel(), ids.itemsize)
    return by_byte[:, :num_bytes].contiguous()


def unpack_ids(packed: torch.Tensor) -> torch.Tensor:
    """Return the ids as int64."""
    whole = F.pad(packed, (0, torch.int64.itemsize - packed.shape[1]))
    return whole.view(torch.int64).view(-1)
