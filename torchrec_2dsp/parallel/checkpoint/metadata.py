"""Reads DCP's `.metadata`, a pickle, without running any code that it names.

A pickle names classes and functions, which Python's reader imports and calls. Here each name
must be one that DCP writes, and even those aren't called: a `_Record` holds their arguments, and
the metadata are built from the records field by field, each checked for the type that DCP needs.
"""

import io
import pickle
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchrec_2dsp._compat.dcp import PICKLED_NAMES, StorageInfo, wrong_chunks
from torchrec_2dsp.errors import CheckpointError

T = TypeVar("T")
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_MAX_NESTING = 100
_LOAD_MARK: Any = pickle._Unpickler.dispatch[pickle.MARK[0]]


class UnknownName(Exception):
    """A pickle names a class or function that no checkpoint needs."""


class _Record:
    """The arguments that a pickle gives a class or function, which isn't called."""

    kind = ""
    """One of the values of `PICKLED_NAMES`."""

    args: tuple[object, ...]
    state: object

    def __new__(cls, *args: object) -> "_Record":
        record = object.__new__(cls)
        record.args, record.state = args, {}
        return record

    def __setstate__(self, state: object) -> None:
        self.state = state


# Python's reader is slower than the one in C, but a damaged pickle can't make it fill the memory.
class _RecordUnpickler(pickle._Unpickler):
    """Creates a `_Record` for everything that a pickle names."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._kinds: dict[str, type[_Record]] = {}

    def load_mark(self: Any) -> None:
        """Open a nested value, up to the nesting limit; DCP's metadata need only a few levels."""
        if len(self.metastack) > _MAX_NESTING:
            raise ValueError("it is nested too deeply")
        _LOAD_MARK(self)

    # Python's reader looks up its methods here, not by name.
    dispatch: ClassVar[Any] = pickle._Unpickler.dispatch | {pickle.MARK[0]: load_mark}

    def find_class(self, module: str, name: str) -> Any:
        """Return a torch data type, or a record class."""
        full_name = f"{module}.{name}"
        if full_name in _DTYPES:
            return _DTYPES[full_name]
        if full_name not in PICKLED_NAMES:
            raise UnknownName(full_name)
        if full_name not in self._kinds:
            self._kinds[full_name] = type("Record", (_Record,), {"kind": PICKLED_NAMES[full_name]})
        return self._kinds[full_name]


def read_metadata(data: bytes, where: str) -> Metadata:
    """Read the metadata from a pickle; ``where`` names its file in errors."""
    try:
        metadata = _metadata(_RecordUnpickler(data).load())
    except UnknownName as error:
        raise CheckpointError(
            f"{where} names {error}, which no checkpoint needs and which could run code: nothing "
            "was loaded; load a checkpoint whose origin you know"
        ) from None
    except Exception as error:  # unpickling damaged bytes can raise anything
        raise CheckpointError(
            f"{where} is damaged ({type(error).__name__}: {str(error)[:200]}); load another "
            "checkpoint"
        ) from error
    errors = wrong_chunks(metadata)
    if errors:
        raise CheckpointError(f"{where} is damaged ({errors[0][:200]}); load another checkpoint")
    return metadata


def _metadata(value: object) -> Metadata:
    fields = _fields(value, "Metadata")
    entries = {
        _typed(str, name): _entry(entry)
        for name, entry in _typed(dict, fields["state_dict_metadata"]).items()
    }
    places = {
        _index(index): _place(place)
        for index, place in _typed(dict, fields["storage_data"]).items()
    }
    version = fields.get("version")
    metadata = Metadata(
        entries,
        storage_data=places,
        storage_meta=_storage_meta(fields.get("storage_meta")),
        version=None if version is None else _typed(str, version),
    )
    for name, entry in entries.items():
        for index in _indices(name, entry):
            if index not in places:
                raise ValueError(f"no file for {index}")
    return metadata


def _entry(value: object) -> STORAGE_TYPES:
    if _is_a(value, "BytesStorageMetadata"):
        return BytesStorageMetadata()
    fields = _fields(value, "TensorStorageMetadata")
    size = _size(fields["size"])
    chunks = [_chunk(chunk, len(size)) for chunk in _typed(list, fields["chunks"])]
    if not size and len(chunks) != 1:
        raise ValueError(f"{len(chunks)} chunks of a single number")
    return TensorStorageMetadata(_properties(fields["properties"]), size, chunks)


def _properties(value: object) -> TensorProperties:
    """Read a tensor's data type; its other properties are deprecated and unused."""
    state = _record(value, "TensorProperties").state
    dtype = state[0] if isinstance(state, tuple) and len(state) == 5 else None
    return TensorProperties(_typed(torch.dtype, dtype))


def _chunk(value: object, num_dims: int) -> ChunkStorageMetadata:
    fields = _fields(value, "ChunkStorageMetadata")
    chunk = ChunkStorageMetadata(_size(fields["offsets"]), _size(fields["sizes"]))
    if not len(chunk.offsets) == len(chunk.sizes) == num_dims:
        raise ValueError(f"a chunk of {len(chunk.sizes)} dims in a tensor of {num_dims}")
    return chunk


def _index(value: object) -> MetadataIndex:
    fields = _fields(value, "MetadataIndex")
    offset, number = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _typed(str, fields["fqn"]),
        None if offset is None else _size(offset),
        None if number is None else _number(number),
    )


def _place(value: object) -> StorageInfo:
    fields = _fields(value, "_StorageInfo")
    if fields.get("transform_descriptors") is not None:
        raise ValueError("stored through an extension, such as one that compresses")
    path = _typed(str, fields["relative_path"])
    # A checkpoint is one folder of files, and metadata must not point outside it.
    if path in ("", ".", "..") or any(sign in path for sign in "/\\\0"):
        raise ValueError(f"{path!r} isn't the name of a file in the folder")
    return StorageInfo(path, _number(fields["offset"]), _number(fields["length"]))


def _storage_meta(value: object) -> StorageMeta:
    """Read the writer's metadata, without its path: the folder may have moved."""
    if value is None:
        return StorageMeta()
    fields = _fields(value, "StorageMeta")
    modules = [_typed(str, name) for name in _typed(list, fields.get("modules", []))]
    return StorageMeta(modules=modules)


def _indices(name: str, entry: STORAGE_TYPES) -> list[MetadataIndex]:
    """Return the keys by which DCP looks up an entry's storage data."""
    if isinstance(entry, TensorStorageMetadata):
        return [MetadataIndex(name, chunk.offsets) for chunk in entry.chunks]
    return [MetadataIndex(name)]


def _size(value: object) -> torch.Size:
    record = _record(value, "Size")
    (numbers,) = record.args
    return torch.Size([_number(number) for number in _typed(tuple, numbers)])


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.100} where a size should be")
    return value


def _fields(value: object, kind: str) -> dict[str, Any]:
    return _typed(dict, _record(value, kind).state)


def _record(value: object, kind: str) -> _Record:
    if not _is_a(value, kind):
        raise ValueError(f"{type(value).__name__} where a {kind} should be")
    assert isinstance(value, _Record)
    return value


def _is_a(value: object, kind: str) -> bool:
    return isinstance(value, _Record) and value.kind == kind


def _typed(kind: type[T], value: object) -> T:
    if type(value) is not kind:
        raise ValueError(f"{type(value).__name__} where a {kind.__name__} should be")
    return value
