"""DCP's planner and writer for a save: plain data only, with checksums, under a lock."""

import fcntl
import io
import json
import os
import pickle
import socket
import threading
import zlib
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torchrec_2dsp._compat.dcp import (
    CURRENT_DCP_VERSION,
    StorageInfo,
    StoragePrefix,
    open_address,
)
from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.checkpoint.address import Address, Place
from torchrec_2dsp.parallel.checkpoint.stored import FILE_NAME, MARK, Checksums, Chunk


class PlainDataSavePlanner(DefaultSavePlanner):
    """Refuses to store what `load_checkpoint` wouldn't load: all but tensors and plain data.

    Ranks share the work; entries that may differ between ranks come from the first that has them.
    """

    def __init__(self, of_first_rank: Iterable[str] = ()) -> None:
        """Prepare for a save; ``of_first_rank`` names the entries that may differ between ranks."""
        super().__init__()
        self._of_first_rank = set(of_first_rank)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Share out the work."""
        planned = set[MetadataIndex]()
        plans = []
        for plan in all_plans:
            items = [item for item in plan.items if item.index not in planned]
            planned |= {item.index for item in items if item.index.fqn in self._of_first_rank}
            plans.append(replace(plan, items=items))
        return super().create_global_plan(plans)

    def create_local_plan(self) -> SavePlan:
        """Plan what this rank could write, and refuse anything but plain data."""
        plan = super().create_local_plan()
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                _check_plain(item.index.fqn, self.lookup_object(item.index))
        return plan


class StagingPlanner(PlainDataSavePlanner):
    """Copies this rank's share of the data as soon as the ranks have divided the work."""

    def __init__(self, of_first_rank: Iterable[str] = ()) -> None:
        super().__init__(of_first_rank)
        self.is_staged = threading.Event()
        """Set once the state may change again."""
        self._copies: dict[MetadataIndex, torch.Tensor | io.BytesIO] = {}

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Copy the planned tensors to this host's memory."""
        plan = super().finish_plan(new_plan)
        try:
            for item in plan.items:
                self._copies[item.index] = _copy(super().resolve_data(item))
            self.state_dict = {}
        finally:
            self.is_staged.set()
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Hand out the copy to write."""
        return self._copies.pop(write_item.index)


def _copy(data: torch.Tensor | io.BytesIO) -> torch.Tensor | io.BytesIO:
    # Bytes are a fresh copy of an object, which nothing else refers to.
    return data.detach().to("cpu", copy=True) if isinstance(data, torch.Tensor) else data


def _check_plain(name: str, value: Any) -> None:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    try:
        torch.load(stream, weights_only=True)
    except Exception as error:  # unpickling can raise anything
        raise CheckpointError(
            f"{name!r} is a {type(value).__name__}, which can't be loaded without running code; "
            "an optimizer's state may hold tensors, numbers, texts, and lists and dicts of them"
        ) from error


class ChecksumWriter(dcp.FileSystemWriter):
    """Writes a checkpoint as DCP does, and `checksums.json` before `.metadata`.

    Checksums are computed from the bytes on their way to the file, so they also detect disk
    errors.
    """

    def __init__(self, folder: Place) -> None:
        is_local = isinstance(folder, Path)
        super().__init__(folder, overwrite=False, sync_files=is_local)
        if not is_local:
            open_address(self, str(folder))
        self._folder = folder
        self.lock = FolderLock(folder) if isinstance(folder, Path) else None
        self.crc32s: dict[MetadataIndex, int] = {}
        """The checksums of the chunks written so far."""
        self.failure: OSError | None = None
        """The first write's error, if one has failed."""
        # DCP asks this object for a stream for each chunk.
        self.transforms = cast(Any, self)

    def transform_save_stream(
        self, write_item: WriteItem, raw_stream: io.IOBase
    ) -> tuple[IO[bytes], list[str]]:
        """Return a chunk's stream, and no descriptors, as it leaves the bytes unchanged."""
        stream = _ChecksumStream(cast(IO[bytes], raw_stream), self, write_item.index)
        return cast(IO[bytes], stream), []

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lock the folder, on the rank that coordinates the save."""
        if self.lock is not None:
            self.lock.take()
        if (self._folder / ".metadata").exists():
            raise holds_checkpoint(self._folder)
        if self.lock is None:
            # Files of two concurrent saves have different names.
            prefixes = (StoragePrefix(f"__{self.save_id}_{rank}_") for rank in range(len(plans)))
            plans = [
                replace(plan, storage_data=prefix)
                for plan, prefix in zip(plans, prefixes, strict=True)
            ]
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks; `finish` receives the place and checksum of each.

        Raises:
            OSError: the disk is full, or the file can't be written for another reason. torch would
                hide this: its archives then complain of their own state.
        """
        try:
            results = super().write_data(plan, planner).value()
        except RuntimeError as error:
            if self.failure is None:
                raise
            raise self.failure from error
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [
                WriteResult(
                    result.index,
                    result.size_in_bytes,
                    (result.storage_data, self.crc32s[result.index]),
                )
                for result in results
            ]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the checksums, then `.metadata`, which completes the checkpoint."""
        if (self._folder / ".metadata").exists():
            raise holds_checkpoint(self._folder)
        chunks: dict[Chunk, int] = {}
        places: dict[MetadataIndex, StorageInfo] = {}
        for result in (result for rank_results in results for result in rank_results):
            place, crc32 = result.storage_data
            places[result.index] = place
            chunks[Chunk(place.relative_path, place.offset, place.length)] = crc32
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = places
        metadata.storage_meta = self.storage_meta()
        data = pickle.dumps(metadata)
        checksums = Checksums(zlib.crc32(data), chunks).to_json()
        _write_at_once(self._folder / FILE_NAME, checksums.encode())
        _write_at_once(self._folder / ".metadata", data)

    def storage_meta(self) -> StorageMeta:
        """Return DCP's storage metadata, marked as having checksums."""
        return StorageMeta(self.checkpoint_id, self.save_id, modules=[MARK])


class FolderLock:
    """Keeps other runs from saving to the same folder.

    The file `save.lock` names this process, which also holds an `flock` on it: the kernel drops
    that when the process ends, so the next save takes over a dead process's lock.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / "save.lock"
        self._file: int | None = None

    def take(self) -> None:
        """Create the file, or raise a `CheckpointError` that names its owner."""
        try:
            file, is_new = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL), True
        except FileExistsError:
            file, is_new = os.open(self._path, os.O_RDWR), False
        try:
            self._flock(file, is_new)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        since = datetime.now(UTC).isoformat(timespec="seconds")
        owner = {"process": os.getpid(), "host": socket.gethostname(), "since": since}
        os.truncate(file, 0)
        os.write(file, json.dumps(owner).encode())

    def release(self) -> None:
        """Remove the file if this process holds the lock."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _flock(self, file: int, is_new: bool) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some network file systems have no flock; there the file alone is the lock.
            if isinstance(error, BlockingIOError) or not is_new:
                raise self._taken(os.pread(file, 1000, 0)) from None
        if not self._path.exists() or not os.path.samestat(os.fstat(file), self._path.stat()):
            raise self._taken(b"")  # Its owner has just removed it.

    def _taken(self, owner: bytes) -> CheckpointError:
        try:
            by = "process {process} on {host} since {since}".format(**json.loads(owner))
        except (ValueError, TypeError, LookupError):
            by = "another process"
        return CheckpointError(
            f"{self._folder} is being saved to by {by}; save to a new folder, or remove "
            f"{self._path} if that process is gone"
        )


def holds_checkpoint(folder: Place) -> CheckpointError:
    """Return the error for a folder that holds a checkpoint already."""
    return CheckpointError(f"{folder} holds a checkpoint already; save to a new folder")


class _ChecksumStream(io.RawIOBase):
    """A stream that passes bytes on to a file, which it never closes, and keeps their checksum."""

    def __init__(self, file: IO[bytes], writer: ChecksumWriter, index: MetadataIndex) -> None:
        self._file, self._writer, self._index = file, writer, index
        writer.crc32s[index] = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        """Write all of ``data``."""
        crc32s = self._writer.crc32s
        crc32s[self._index] = zlib.crc32(data, crc32s[self._index])
        try:
            return self._file.write(data)
        except OSError as error:
            self._writer.failure = self._writer.failure or error
            raise


def _write_at_once(path: Place, data: bytes) -> None:
    """Write a file atomically and durably."""
    if isinstance(path, Address):
        with path.open("wb") as file:
            file.write(data)
        return
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
