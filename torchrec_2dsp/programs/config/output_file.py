"""Files of a program's output, written as a whole or not at all, and the error of a full disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrec_2dsp.errors import OutputError, TwoDError


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """A context that writes to a file or a folder, and says so if it can't.

    Raises:
        OutputError: the block raised an `OSError`.

    Example:
        >>> from torchrec_2dsp.programs.config.output_file import writing
        >>> with writing("/no/such/folder/record.json"):
        ...     open("/no/such/folder/record.json", "w")
        Traceback (most recent call last):
        torchrec_2dsp.errors.OutputError: /no/such/folder/record.json can't be written: No such file
        or directory; make room there, or write elsewhere
    """
    try:
        yield
    except TwoDError:
        raise
    except OSError as error:
        raise OutputError(
            f"{path} can't be written: {error.strerror or error}; make room there, or write "
            "elsewhere"
        ) from error


def write_whole(path: str | Path, text: str) -> None:
    """Write a file as a whole or not at all: what was there before stays if the disk is full.

    Raises:
        OutputError: it can't be written.
    """
    with writing(path):
        replace_whole(Path(path), text.encode())


def replace_whole(path: Path, content: bytes, *, suffix: str = "draft") -> None:
    """Write a file so that others see all of it or nothing.

    Args:
        path: the file.
        content: its bytes.
        suffix: names the draft beside it; processes that write at the same time need others each.

    Raises:
        OSError: it can't be written; what was there before stays.
    """
    draft = path.with_name(f"{path.name}.{suffix}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
