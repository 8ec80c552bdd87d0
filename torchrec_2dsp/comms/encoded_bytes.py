"""Count how many bytes codecs of rows save on this rank, whoever sends the rows.

What replicas send each other is no part of it: a `SyncReport` carries it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class EncodedBytes:
    """Rows, bags and their gradients before and after a codec.

    Each number counts once, however many ranks get it, and also if only this rank does.
    """

    before: int = 0
    """The bytes of the numbers in float32."""
    after: int = 0
    """The bytes of the encoded numbers, scales included."""


@contextmanager
def count_encoded() -> Iterator[EncodedBytes]:
    """Count what this rank encodes inside the context, backward passes included.

    Example:
        >>> import torch
        >>> from torchrec_2dsp.codecs.rows import IntegerRows
        >>> from torchrec_2dsp.comms.encoded_bytes import count_encoded
        >>> from torchrec_2dsp.comms.stock_codec import StockCodec
        >>> codec = StockCodec(IntegerRows(bits=4), dim=64)
        >>> with count_encoded() as encoded:
        ...     sent = codec.encode(torch.zeros(3 * 64))
        >>> encoded
        EncodedBytes(before=768, after=102)
    """
    counted = EncodedBytes()
    _OPEN.append(counted)
    try:
        yield counted
    finally:
        # By identity: two contexts may have counted the same.
        _OPEN[:] = [other for other in _OPEN if other is not counted]


def note_encoded(before: int, after: int) -> None:
    """Count encoded numbers, inside of `count_encoded`; outside, this does nothing.

    Args:
        before: the bytes of the numbers in float32.
        after: the bytes of the encoded numbers.
    """
    for counted in _OPEN:
        counted.before += before
        counted.after += after


_OPEN: list[EncodedBytes] = []
"""The counts of all `count_encoded` contexts that are open."""
