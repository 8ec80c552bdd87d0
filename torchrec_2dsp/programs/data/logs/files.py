"""The files of a log: listed in a fixed order, opened with errors that name them."""

import glob
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchrec_2dsp.errors import ConfigError

_PARQUET = (".parquet", ".pq")
_GZIP = (".gz", ".gzip")


def list_files(patterns: Sequence[str]) -> tuple[str, ...]:
    """The files that paths and patterns name: patterns as given, those of one pattern by name, with
    the numbers in names in their order.

    Raises:
        ConfigError: a pattern names no file, or two name the same.
    """
    files: list[str] = []
    for pattern in patterns:
        # A path may have brackets of its own.
        names = [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)
        if not names:
            raise ConfigError(
                f"files: nothing is named {str(Path(pattern).absolute())!r}; check the path or the "
                "pattern"
            )
        files += sorted(names, key=_by_numbers)
    for name in files:
        if Path(name).is_dir():
            raise ConfigError(f"files: {name} is a folder; name its files, such as {name}/*.csv")
    repeated = sorted({name for name in files if files.count(name) > 1}) if files else []
    if repeated:
        raise ConfigError(f"files: {repeated[0]} is named twice, so its rows would be, too")
    return tuple(files)


def _by_numbers(name: str) -> list[tuple[str, int]]:
    """The key of a name in an order in which ``day_9`` is before ``day_10``."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]


def is_parquet(file: str) -> bool:
    """Whether a file is Parquet, by its name."""
    return file.lower().endswith(_PARQUET)


def is_gzip(file: str) -> bool:
    """Whether a file of text is compressed, by its name."""
    return file.lower().endswith(_GZIP)


@contextmanager
def reading(file: str) -> Iterator[None]:
    """Turn errors of the system into a `ConfigError` that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{file} can't be read: {reason}; check the path, its permissions, and that it is whole"
        ) from error


def fingerprint(file: str) -> dict[str, int]:
    """The size and the time of a file, by which a changed one is noticed."""
    with reading(file):
        status = Path(file).stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns}
