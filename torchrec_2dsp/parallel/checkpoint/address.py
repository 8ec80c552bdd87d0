"""`Address`: a folder or a file at an address such as ``s3://bucket/run``, used like a path."""

from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import IO, cast

from fsspec.core import url_to_fs

from torchrec_2dsp.errors import CheckpointError


class Address(PathLike[str]):
    """A place on a file system that fsspec opens, with the methods of `pathlib.Path` used here.

    Object stores have no folders: a folder exists if it has a file.
    """

    def __init__(self, address: str) -> None:
        """Find the file system; its own package, such as ``s3fs``, must be installed."""
        self._address = address.rstrip("/")
        try:
            self._files, self._path = url_to_fs(self._address)
        except (ValueError, ImportError) as error:
            raise CheckpointError(f"{address} can't be opened: {error}") from error

    def __fspath__(self) -> str:
        return self._address

    def __str__(self) -> str:
        return self._address

    def __repr__(self) -> str:
        return f"Address({self._address!r})"

    def __truediv__(self, name: str) -> "Address":
        return Address(f"{self._address}/{name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self._address == other._address

    def __hash__(self) -> int:
        return hash(self._address)

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self._address.rpartition("/")[2]

    @property
    def parent(self) -> "Address":
        """The folder that contains this place."""
        return Address(self._address.rpartition("/")[0])

    def resolve(self) -> "Address":
        """Return the address itself, as addresses have no links."""
        return self

    def exists(self) -> bool:
        """Return whether the file or folder exists now, without consulting fsspec's cache."""
        self._files.invalidate_cache()
        return bool(self._files.exists(self._path))

    def is_file(self) -> bool:
        """Return whether the place is a file."""
        return bool(self._files.isfile(self._path))

    def is_dir(self) -> bool:
        """Return whether the place is a folder."""
        self._files.invalidate_cache()
        return bool(self._files.isdir(self._path))

    def iterdir(self) -> Iterator["Address"]:
        """Yield the folder's files and sub-folders."""
        for path in self._files.ls(self._path, detail=False):
            yield self / str(path).rstrip("/").rpartition("/")[2]

    def size(self) -> int:
        """Return the file's size in bytes."""
        return int(self._files.size(self._path))

    def open(self, mode: str) -> IO[bytes]:
        """Open a file; others see it once it is completely written."""
        return cast(IO[bytes], self._files.open(self._path, mode))

    def read_bytes(self) -> bytes:
        """Return a file's contents."""
        return bytes(self._files.cat_file(self._path))

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Delete a file."""
        if not missing_ok or self.exists():
            self._files.rm_file(self._path)

    def delete(self) -> None:
        """Delete a folder and its contents."""
        self._files.rm(self._path, recursive=True)


Place = Path | Address
"""A file or folder, given by a path or an address."""


def place_of(path: str | PathLike[str]) -> Place:
    """Return a path, or an address if the text contains ``://``."""
    if isinstance(path, Address):
        return path
    return Address(str(path)) if "://" in str(path) else Path(path)


def size_of(file: Place) -> int:
    """Return a file's size in bytes; 0 if it doesn't exist."""
    if not file.is_file():
        return 0
    return file.size() if isinstance(file, Address) else file.stat().st_size
