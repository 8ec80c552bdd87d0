"""List and open a log's files on any file system, in a fixed order, with errors that name them."""

import os
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
from fsspec.core import url_to_fs
from pyarrow import fs

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.section import replace_whole

_COMPRESSIONS = {".gz": "gzip", ".gzip": "gzip", ".bz2": "bz2", ".zst": "zstd"}
_FORMATS = {
    **dict.fromkeys([".parquet", ".pq"], "parquet"),
    **dict.fromkeys([".feather", ".arrow", ".ipc"], "feather"),
    **dict.fromkeys([".json", ".jsonl", ".ndjson"], "json"),
    ".orc": "orc",
}
_PATTERN = re.compile(r"[*?[]")
_END_BYTES = 2**16
_LOCAL = fs.LocalFileSystem()


class FileKind(NamedTuple):
    """A file's format, from its name."""

    format: str
    """ "parquet", "orc", "feather", "json" or "text"."""

    compression: str | None
    """pyarrow's name for the compression; `None` for none."""


def kind_of(file: str) -> FileKind:
    """Infer a file's format from its extensions; unknown ones mean text."""
    stem, ending = os.path.splitext(file.lower())
    compression = _COMPRESSIONS.get(ending)
    if compression is not None:
        ending = os.path.splitext(stem)[1]
    return FileKind(_FORMATS.get(ending, "text"), compression)


def file_system(file: str) -> tuple[fs.FileSystem, str]:
    """Return a path's file system, from pyarrow or else fsspec, and the path in it."""
    if "://" not in file:
        return _LOCAL, file
    try:
        return fs.FileSystem.from_uri(file)
    except pa.ArrowInvalid:  # A scheme that pyarrow doesn't know.
        try:
            system, path = url_to_fs(file)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"files: {file} can't be opened: {error}") from error
        return fs.PyFileSystem(fs.FSSpecHandler(system)), path


def list_files(patterns: Sequence[str]) -> tuple[str, ...]:
    """List the files that paths and patterns match.

    A pattern's files are sorted by the numbers in their names.

    Raises:
        ConfigError: a pattern matches no file or matches a folder, or two match the same file.
    """
    files: list[str] = []
    for pattern in patterns:
        system, path = file_system(pattern)
        prefix = pattern.removesuffix(path)
        with reading(pattern):
            info = system.get_file_info(path)
            if info.type == fs.FileType.Directory:
                raise ConfigError(
                    f"files: {pattern} is a folder; name its files, such as "
                    f"{pattern.rstrip('/')}/*.csv, or .parquet"
                )
            # A path may itself contain brackets.
            is_file = info.type != fs.FileType.NotFound
            names = [path] if is_file else _matching(system, path)
        if not names:
            shown = pattern if prefix else str(Path(pattern).absolute())
            raise ConfigError(f"files: nothing matches {shown!r}; check the path or the pattern")
        files += [prefix + name for name in sorted(names, key=_by_numbers)]
    real = list(map(real_path, files))
    repeated = sorted(name for name, path in zip(files, real, strict=True) if real.count(path) > 1)
    if repeated:
        raise ConfigError(f"files: {repeated[0]} is listed twice, so its rows would be read twice")
    return tuple(files)


def real_path(file: str) -> str:
    """Return a local file's canonical path; other paths stay as they are."""
    system, path = file_system(file)
    return os.path.realpath(path) if system == _LOCAL else file


def _matching(system: fs.FileSystem, pattern: str) -> list[str]:
    """Return the files that match a pattern; ``**`` matches any number of folders."""
    special = _PATTERN.search(pattern)
    if special is None:
        return []
    folder, _, _ = pattern[: special.start()].rpartition("/")
    is_absolute = pattern.startswith("/")
    base = folder or ("/" if is_absolute else "." if system == _LOCAL else "")
    is_deep = "/" in pattern[special.start() :]
    selector = fs.FileSelector(base, allow_not_found=True, recursive=is_deep)
    patterns = pattern.split("/")
    paths = [info.path for info in system.get_file_info(selector) if info.is_file]
    if base == ".":
        paths = [path.removeprefix("./") for path in paths]
    return [path for path in paths if _matches(path.split("/"), patterns)]


def _matches(parts: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns or not parts:
        return not patterns and not parts
    if patterns[0] == "**":
        return _matches(parts, patterns[1:]) or _matches(parts[1:], patterns)
    is_hidden = parts[0].startswith(".") and not patterns[0].startswith(".")
    return (
        not is_hidden and fnmatchcase(parts[0], patterns[0]) and _matches(parts[1:], patterns[1:])
    )


def _by_numbers(name: str) -> list[tuple[str, int]]:
    """Return a sort key that puts ``day_9`` before ``day_10``."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]


@contextmanager
def reading(file: str) -> Iterator[None]:
    """Turn operating-system errors into a `ConfigError` that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number else ""
        raise ConfigError(
            f"{file} can't be read: {reason or error}; check the path, its permissions, and that "
            "it is whole"
        ) from error


class FileState(NamedTuple):
    """A file's size and modification time, which reveal changes."""

    num_bytes: int

    mtime_ns: int
    """The modification time if the file system has it; else 0."""


def state_of(file: str) -> FileState:
    """Look up a file's size and modification time."""
    system, path = file_system(file)
    with reading(file):
        info = system.get_file_info(path)
        if not info.is_file:
            raise FileNotFoundError("it isn't there")
    return FileState(info.size or 0, info.mtime_ns or 0)


def end_of(file: str) -> bytes:
    """Read a file's last bytes; a Parquet file's describe its content."""
    system, path = file_system(file)
    with reading(file), system.open_input_file(path) as stream:
        num_bytes = stream.size()
        return stream.read_at(min(_END_BYTES, num_bytes), max(num_bytes - _END_BYTES, 0))


def open_stream(file: str) -> tuple[pa.NativeFile, pa.NativeFile]:
    """Open a file; return its decompressed stream and the raw file."""
    system, path = file_system(file)
    raw = system.open_input_file(path)
    compression = kind_of(file).compression
    return (pa.CompressedInputStream(raw, compression) if compression else raw), raw


def columnar_fragment(
    file: str, file_format: ds.FileFormat, at: tuple[fs.FileSystem, str] | None = None
) -> ds.Fragment:
    """Return a file with named columns as a pyarrow dataset fragment.

    Args:
        file: the file to name in errors.
        file_format: the file's format.
        at: the path to read instead.

    Raises:
        ConfigError: it is damaged, or in another format.
    """
    system, path = at or file_system(file)
    with reading(file):
        try:
            fragment = file_format.make_fragment(path, filesystem=system)
            fragment.physical_schema  # noqa: B018 - opens the file
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, FileNotFoundError | PermissionError):
                raise
            name = kind_of(file).format.capitalize()
            raise ConfigError(
                f"{file} isn't in {name} format, or it is damaged: {error}"
            ) from error
    return fragment


def write_prepared(path: Path, content: bytes) -> None:
    """Write a prepared file atomically, safe against concurrent writers.

    Raises:
        ConfigError: it can't be written.
    """
    with writing_prepared(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, content, suffix=f"{os.getpid()}.draft")


@contextmanager
def writing_prepared(path: Path) -> Iterator[None]:
    """Turn operating-system errors into a `ConfigError` that names the key ``prepared``."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"prepared: {path} can't be written: {error.strerror or error}; give a folder that "
            "can, or leave it out"
        ) from error
