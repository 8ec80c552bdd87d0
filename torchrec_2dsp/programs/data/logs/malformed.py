"""`MalformedLines`: lines that can't be read are counted, and too many are an error."""

from dataclasses import dataclass

from torchrec_2dsp.errors import InputError

_MAX_EXAMPLES = 5
_MAX_TEXT = 80


@dataclass(frozen=True)
class MalformedLine:
    """A line that can't be read."""

    file: str
    """The path of its file."""

    line: int
    """Its number in the file, from 1, the header counted."""

    reason: str
    """What is wrong with it."""

    text: str
    """Its beginning."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}: {self.text!r}"


class MalformedLines:
    """Counts the different lines that this process couldn't read, up to a limit."""

    def __init__(self, limit: int) -> None:
        """
        Args:
            limit: how many lines may be malformed.
        """
        self.limit = limit
        """How many lines may be malformed."""
        self.examples: list[MalformedLine] = []
        """The first ones."""
        self._lines: set[tuple[str, int]] = set()

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, file: str, line: int, reason: str, text: bytes) -> None:
        """Count a line, unless it was counted before.

        Raises:
            InputError: these are more than the limit.
        """
        if (file, line) in self._lines:
            return
        self._lines.add((file, line))
        if len(self.examples) < _MAX_EXAMPLES:
            start = text[:_MAX_TEXT].decode("utf-8", "replace").rstrip("\r\n")
            self.examples.append(MalformedLine(file, line, reason, start))
        if len(self._lines) > self.limit:
            raise InputError(
                f"more than malformed_limit={self.limit} lines can't be read; check the columns "
                "and the delimiter, mend the file, or raise malformed_limit:\n  "
                + "\n  ".join(map(str, self.examples))
            )
