"""An object store on the local disk, behind addresses such as ``bucket:///tmp/x``."""

from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from torchrec_2dsp.parallel.checkpoint.address import Address


class Bucket(LocalFileSystem):
    """An object store: no folders, renames or appending, and cached listings."""

    protocol = "bucket"

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)
        self._existing: dict[str, bool] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("bucket://"))

    def exists(self, path: str, **options: Any) -> bool:
        if path not in self._existing:
            self._existing[path] = super().exists(path, **options)
        return self._existing[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self._existing.clear()

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        if mode not in ("rb", "wb"):
            raise NotImplementedError(f"objects can't be opened by {mode!r}")
        return super()._open(path, mode, *args, **options)

    def mv(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError("objects can't be renamed")

    rename = mv


fsspec.register_implementation("bucket", Bucket, clobber=True)


def bucket(folder: object) -> Address:
    """Return a folder's address in the store."""
    return Address(f"bucket://{folder}")
