"""Adapters to private parts of torch.distributed.checkpoint (DCP)."""

import io
from collections.abc import Mapping
from types import MappingProxyType
from typing import IO, cast

from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFileSystem
from torch.distributed.checkpoint._traverse import set_element as set_element
from torch.distributed.checkpoint.default_planner import _validate_global_plan
from torch.distributed.checkpoint.filesystem import (
    CURRENT_DCP_VERSION as CURRENT_DCP_VERSION,
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.utils import _create_file_view

StorageInfo = _StorageInfo
"""A chunk's place: file, offset, length."""
StoragePrefix = _StoragePrefix
"""The prefix of a rank's file names."""

_DCP = "torch.distributed.checkpoint"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"

PICKLED_NAMES: Mapping[str, str] = MappingProxyType(
    {
        f"{_DCP}.metadata.Metadata": "Metadata",
        f"{_DCP}.metadata.TensorStorageMetadata": "TensorStorageMetadata",
        f"{_DCP}.metadata.BytesStorageMetadata": "BytesStorageMetadata",
        f"{_DCP}.metadata.TensorProperties": "TensorProperties",
        f"{_DCP}.metadata.ChunkStorageMetadata": "ChunkStorageMetadata",
        f"{_DCP}.metadata.MetadataIndex": "MetadataIndex",
        f"{_DCP}.metadata.StorageMeta": "StorageMeta",
        f"{_DCP}.metadata._MEM_FORMAT_ENCODING": "memory format",
        f"{_DCP}.filesystem._StorageInfo": "_StorageInfo",
        # Names written by torch before 2.3.
        f"{_OLD}.TensorProperties": "TensorProperties",
        f"{_OLD}.MEM_FORMAT_ENCODING": "memory format",
        "torch.Size": "Size",
        "torch.serialization._get_layout": "layout",
        "pathlib.PosixPath": "path",
        "pathlib.WindowsPath": "path",
    }
)
"""Each name's meaning in a checkpoint's pickled `.metadata`, apart from torch's data types."""


def wrong_chunks(metadata: Metadata) -> list[str]:
    """Return errors for tensors whose chunks are out of bounds, overlap, or leave gaps.

    DCP checks this when it saves, but not when it loads.
    """
    # The check compares volumes only if there are several plans, and doesn't read them.
    return _validate_global_plan([SavePlan([])] * 2, metadata)


def open_address(files: FileSystemWriter | FileSystemReader, address: str) -> None:
    """Let DCP's writer or reader use an address's file system, through fsspec."""
    files.fs = cast(FileSystem, FsspecFileSystem())
    files.path = files.fs.init_path(address)


def file_view(file: IO[bytes], offset: int, length: int) -> IO[bytes]:
    """Return ``length`` bytes from ``offset`` on in an open file, as a file."""
    return cast(IO[bytes], _create_file_view(cast(io.IOBase, file), offset, length))
