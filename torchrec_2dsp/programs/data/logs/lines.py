"""Lines of a block of bytes: where they end, and some of them."""

import numpy as np
from numpy.typing import NDArray

from torchrec_2dsp.programs.data.logs.blocks import Rows

_LINE_END = ord("\n")


def line_ends(data: bytes) -> NDArray[np.int64]:
    """The place of the last byte of each line; the last line needn't have a line end.

    Example:
        >>> from torchrec_2dsp.programs.data.logs.lines import line_ends
        >>> line_ends(b"ab" + bytes([10]) + b"c")
        array([2, 3])
    """
    ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == _LINE_END)
    if data and data[-1] != _LINE_END:
        ends = np.append(ends, len(data) - 1)
    return ends


def select_lines(data: bytes, lines: Rows) -> bytes:
    """The lines with these numbers, which are ascending and distinct.

    Example:
        >>> import numpy as np
        >>> from torchrec_2dsp.programs.data.logs.lines import select_lines
        >>> select_lines(bytes([97, 10, 98, 10, 99]), np.array([0, 2]))
        b'a\\nc'
    """
    ends = line_ends(data)
    if len(lines) == len(ends):
        return data
    lengths = np.diff(ends, prepend=-1)
    if len(lines) and lines[-1] - lines[0] == len(lines) - 1:
        first, last = int(lines[0]), int(lines[-1])
        return data[ends[first] + 1 - lengths[first] : ends[last] + 1]
    is_selected = np.zeros(len(ends), dtype=bool)
    is_selected[lines] = True
    array = np.frombuffer(data, dtype=np.uint8)
    return array[np.repeat(is_selected, lengths)].tobytes()
