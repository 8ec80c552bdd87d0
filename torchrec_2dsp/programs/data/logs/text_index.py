"""Where the blocks of a text file are, and how many lines each has: one pass that parses nothing.

A plain file is read once and its line ends are counted, at the speed of the disk. A compressed one
has to be decompressed for that.
"""

import csv
import gzip
import io
from collections.abc import Sequence
from typing import BinaryIO, cast

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.data.logs.blocks import LogBlock
from torchrec_2dsp.programs.data.logs.files import is_gzip, reading

_BOM = b"\xef\xbb\xbf"
_MAX_LINE_BYTES = 64 * 2**20


def open_text(file: str) -> BinaryIO:
    """The file, decompressed if it has to be."""
    return cast(BinaryIO, gzip.open(file, "rb") if is_gzip(file) else open(file, "rb", 0))


class TextHead:
    """The names of a file's columns, and where its first row begins."""

    def __init__(self, file: str, columns: Sequence[str], delimiter: str, quote: str) -> None:
        """
        Args:
            file: the path.
            columns: the names, if the file needn't have them; empty if its first line has them.
            delimiter: what stands between two values.
            quote: what stands around values; empty for nothing.
        """
        with reading(file), open_text(file) as stream:
            line = stream.readline(_MAX_LINE_BYTES)
        if not line:
            raise ConfigError(f"{file} is empty; leave it out")
        skipped = len(_BOM) if line.startswith(_BOM) else 0
        text = line[skipped:].decode("utf-8", "replace").rstrip("\r\n")
        names = _split(text, delimiter, quote)
        if columns and len(names) != len(columns):
            raise ConfigError(
                f"{file} has {len(names)} column{'s' if len(names) > 1 else ''}, and columns names "
                f"{len(columns)}; check the "
                f"delimiter, which is {delimiter!r}, and the names"
            )
        has_names = not columns or names == list(columns)
        self.names = tuple(columns or names)
        """The names of the columns, in their order."""
        self.offset = len(line) if has_names else skipped
        """The number of bytes before the first row."""
        self.num_lines = int(has_names)
        """How many lines come before the first row."""
        repeated = sorted({name for name in self.names if self.names.count(name) > 1})
        if repeated:
            raise ConfigError(
                f"{file} has two columns {repeated[0]!r}; rename one, or name them by `columns`"
            )


def _split(line: str, delimiter: str, quote: str) -> list[str]:
    rule = csv.QUOTE_MINIMAL if quote else csv.QUOTE_NONE
    rows = csv.reader(io.StringIO(line), delimiter=delimiter, quotechar=quote or None, quoting=rule)
    return next(rows, [""])


def index_lines(file: str, offset: int, block_bytes: int) -> list[LogBlock]:
    """The blocks of a text file.

    Args:
        file: the path.
        offset: the number of bytes before the first row.
        block_bytes: about how many bytes a block has; it ends with a line.

    Raises:
        ConfigError: the file has no row, or a line that is no line.
    """
    blocks: list[LogBlock] = []
    first_row = 0
    pending = b""
    with reading(file), open_text(file) as stream:
        stream.seek(offset)
        while True:
            chunk = _read(stream, block_bytes)
            data = pending + chunk
            end = data.rfind(b"\n") + 1 if chunk else len(data)
            if not end and chunk:
                if len(data) > _MAX_LINE_BYTES:
                    raise ConfigError(
                        f"{file} has {_MAX_LINE_BYTES} bytes without a line end from byte {offset} "
                        "on; is it a text file?"
                    )
                pending = data
                continue
            if not end:
                break
            lines = data.count(b"\n", 0, end) + (not chunk and not data.endswith(b"\n"))
            unit = 0 if is_gzip(file) else len(blocks)
            blocks.append(LogBlock(file, unit, offset, end, first_row, lines))
            first_row += lines
            offset += end
            pending = data[end:]
    if not blocks:
        raise ConfigError(f"{file} has no row, at most the names of columns; leave it out")
    return blocks


def _read(stream: BinaryIO, num_bytes: int) -> bytes:
    """As many bytes as that, fewer only at the end."""
    parts = []
    while num_bytes and (part := stream.read(num_bytes)):
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
