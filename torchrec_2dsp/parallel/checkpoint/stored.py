"""`StoredCheckpoint`: a checkpoint in a folder, with checks of its bytes."""

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from torchrec_2dsp._compat.dcp import file_view
from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.checkpoint.address import Place, size_of
from torchrec_2dsp.parallel.checkpoint.metadata import read_metadata

FILE_NAME = "checksums.json"
"""The checksum file, beside DCP's files, which stay as DCP writes them."""

MARK = "torchrec_2dsp.checksums"
"""The mark in the metadata of a checkpoint with checksums, so that their loss is noticed."""

_FORMAT = 1


class Chunk(NamedTuple):
    """A run of bytes in a file: one stored shard of a tensor."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Checksums:
    """The expected checksums of a checkpoint's bytes."""

    metadata_crc32: int
    """The checksum of `.metadata`."""
    chunks: Mapping[Chunk, int]
    """The CRC-32 of each chunk; a file's chunks cover all its bytes."""

    def to_json(self) -> str:
        """Encode as JSON, with a checksum over the JSON itself."""
        files: dict[str, list[list[int]]] = {}
        for chunk, crc32 in sorted(self.chunks.items()):
            files.setdefault(chunk.file, []).append([chunk.offset, chunk.length, crc32])
        body = {"format": _FORMAT, "metadata": self.metadata_crc32, "files": files}
        return json.dumps(body | {"crc32": _crc32_of(body)}) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> "Checksums":
        """Decode the file ``where``, or raise if it is damaged."""
        try:
            body: dict[str, Any] = json.loads(text)
            own_crc32 = body.pop("crc32")
            if own_crc32 != _crc32_of(body) or body["format"] != _FORMAT:
                raise ValueError("it doesn't add up to its own checksum")
            chunks = {
                Chunk(file, offset, length): crc32
                for file, places in body["files"].items()
                for offset, length, crc32 in places
            }
            return cls(body["metadata"], chunks)
        # Deeply nested JSON raises a RecursionError.
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{where} is damaged ({type(error).__name__}: {str(error)[:200]}); load another "
                "checkpoint"
            ) from error


def _crc32_of(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


_BLOCK_BYTES = 8 * 2**20
"""The read size when computing a checksum."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A finished save's checkpoint in a folder."""

    folder: Place
    metadata: Metadata
    """The stored entries and their places."""
    checksums: Checksums | None
    """The checksums of all bytes; `None` if another program wrote the checkpoint."""
    fingerprint: str
    """A checksum of `.metadata`, by which ranks verify that they read the same checkpoint."""

    @classmethod
    def open(cls, folder: Place) -> "StoredCheckpoint":
        """Read the metadata and verify their checksum, if there is one."""
        metadata_file, checksum_file = folder / ".metadata", folder / FILE_NAME
        if not metadata_file.exists():
            raise CheckpointError(f"{folder} has no .metadata; give the folder of a finished save")
        data, sums = _contents(metadata_file), None
        if checksum_file.exists():
            sums = Checksums.from_json(_contents(checksum_file), str(checksum_file))
            if zlib.crc32(data) != sums.metadata_crc32:
                raise _damaged(metadata_file, "it doesn't add up to its checksum")
        metadata = read_metadata(data, str(metadata_file))
        stored = cls(folder, metadata, sums, f"{zlib.crc32(data):08x}")
        has_mark = metadata.storage_meta is not None and MARK in metadata.storage_meta.modules
        if sums is None and has_mark:
            raise CheckpointError(f"{checksum_file} is missing; load another checkpoint")
        if sums is not None and sums.chunks.keys() != set(stored._chunks()):
            raise _damaged(checksum_file, "it isn't about the chunks that .metadata names")
        return stored

    @property
    def entries(self) -> dict[str, STORAGE_TYPES]:
        """The shape, type and shards of each of the checkpoint's entries, by name."""
        return self.metadata.state_dict_metadata

    def names(self, part: str) -> list[str]:
        """Return the names of a part's entries, without the part's prefix."""
        return [name.removeprefix(f"{part}.") for name in self.entries if _is_in(name, part)]

    def tensor(self, name: str) -> torch.Tensor:
        """Read a tensor that was stored in one piece, on this rank only."""
        entry = self.entries[name]
        if not isinstance(entry, TensorStorageMetadata) or len(entry.chunks) != 1:
            raise CheckpointError(
                f"{name!r} isn't a tensor in one piece in the checkpoint {self.folder}; load "
                "another checkpoint"
            )
        index = MetadataIndex(name, entry.chunks[0].offsets)
        chunk = _chunk_of(self.metadata.storage_data[index])
        try:
            with (self.folder / chunk.file).open("rb") as file:
                return self._parsed(file, chunk, index)
        except OSError as error:
            raise _unreadable(self.folder / chunk.file, error) from error

    def tensors(
        self, part: str, only: Callable[[str], bool] = lambda name: True
    ) -> dict[str, torch.Tensor]:
        """Read a part's tensors on this rank only, by their names without the part's prefix."""
        return {name: self.tensor(f"{part}.{name}") for name in self.names(part) if only(name)}

    def verify(self, parts: Iterable[str], rank: int, num_ranks: int) -> None:
        """Verify this rank's share of the bytes.

        Each chunk must match its checksum, and the entries in it that belong to ``parts`` must have
        the type and shape in the metadata.
        """
        parts = tuple(parts)
        by_chunk: dict[Chunk, list[MetadataIndex]] = {}
        for index, place in self.metadata.storage_data.items():
            by_chunk.setdefault(_chunk_of(place), []).append(index)
        for chunk in _share(sorted(by_chunk), rank, num_ranks):
            try:
                with (self.folder / chunk.file).open("rb") as file:
                    self._check_sum(file, chunk)
                    for index in by_chunk[chunk]:
                        if any(_is_in(index.fqn, part) for part in parts):
                            self._parsed(file, chunk, index)
            except OSError as error:
                raise _unreadable(self.folder / chunk.file, error) from error

    def check_sizes(self, rank: int, num_ranks: int) -> None:
        """Raise unless this rank's share of the files exists at full length."""
        sizes: dict[str, int] = {}
        for chunk in self._chunks():
            sizes[chunk.file] = max(chunk.offset + chunk.length, sizes.get(chunk.file, 0))
        for name in sorted(sizes)[rank::num_ranks]:
            path = self.folder / name
            size = size_of(path)
            if size < sizes[name] or (self.checksums and size > sizes[name]):
                raise CheckpointError(
                    f"{path} has {size} of its {sizes[name]} bytes; load another checkpoint"
                )

    def _check_sum(self, file: IO[bytes], chunk: Chunk) -> None:
        if self.checksums is None:
            return
        file.seek(chunk.offset)
        crc32, num_left = 0, chunk.length
        while num_left and (block := file.read(min(num_left, _BLOCK_BYTES))):
            crc32, num_left = zlib.crc32(block, crc32), num_left - len(block)
        if num_left or crc32 != self.checksums.chunks[chunk]:
            place = f"bytes {chunk.offset} to {chunk.offset + chunk.length}"
            raise _damaged(self.folder / chunk.file, f"its {place} don't add up to their checksum")

    def _parsed(self, file: IO[bytes], chunk: Chunk, index: MetadataIndex) -> torch.Tensor:
        """Load a chunk's value, and raise unless it matches the metadata."""
        entry, where = self.entries.get(index.fqn), f"{index.fqn!r} in {self.folder / chunk.file}"
        try:
            value = torch.load(
                file_view(file, chunk.offset, chunk.length), map_location="cpu", weights_only=True
            )
        except Exception as error:  # unpickling damaged bytes can raise anything
            raise CheckpointError(
                f"{where} can't be read as plain data ({type(error).__name__}); load another "
                "checkpoint"
            ) from error
        if isinstance(entry, TensorStorageMetadata):
            sizes = next((c.sizes for c in entry.chunks if c.offsets == index.offset), None)
            expected = f"{entry.properties.dtype} of shape {sizes}"
            actual = type(value).__name__
            if type(value) is torch.Tensor and value.layout is torch.strided:
                actual = f"{value.dtype} of shape {value.shape}"
            if actual != expected:
                raise CheckpointError(
                    f"{where} is {actual} instead of {expected}; load another one"
                )
        return value

    def _chunks(self) -> list[Chunk]:
        return [_chunk_of(place) for place in self.metadata.storage_data.values()]


def _share(chunks: list[Chunk], rank: int, num_ranks: int) -> list[Chunk]:
    """Return the chunks that a rank reads: those that begin in its share of the bytes.

    Example:
        >>> from torchrec_2dsp.parallel.checkpoint.stored import Chunk
        >>> from torchrec_2dsp.parallel.checkpoint.stored import _share
        >>> chunks = [Chunk("a", 0, 6), Chunk("a", 6, 1), Chunk("b", 0, 5)]
        >>> [len(_share(chunks, rank, 2)) for rank in range(2)]
        [1, 2]
    """
    total = sum(chunk.length for chunk in chunks)
    share, start = [], 0
    for number, chunk in enumerate(chunks):
        reader = start * num_ranks // total if total else number % num_ranks
        if min(reader, num_ranks - 1) == rank:
            share.append(chunk)
        start += chunk.length
    return share


def _chunk_of(place: object) -> Chunk:
    """Return the chunk that DCP's metadata give for a place."""
    return Chunk(place.relative_path, place.offset, place.length)  # type: ignore[attr-defined]


def _is_in(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _contents(path: Place) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Place, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} can't be read ({error.strerror or error}); give this program access to it, "
        "or load another checkpoint"
    )


def _damaged(path: Place, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}; load another checkpoint")
