"""`.metadata` is read without running code in it, and only if all of it makes sense."""

import importlib
import io
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.support.hostile_pickles import MISLEADING, RUNNING
from torchrec_2dsp._compat.dcp import PICKLED_NAMES, StorageInfo
from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.checkpoint.metadata import read_metadata


def good() -> Metadata:
    """Return metadata for a table with two shards, a number and an object."""
    size, half = torch.Size((4, 2)), torch.Size((2, 2))
    offsets = [torch.Size((0, 0)), torch.Size((2, 0))]
    chunks = [ChunkStorageMetadata(offset, half) for offset in offsets]
    scalar = [ChunkStorageMetadata(torch.Size(()), torch.Size(()))]
    properties = TensorProperties(torch.float32)
    return Metadata(
        {
            "table": TensorStorageMetadata(properties, size, chunks),
            "step": TensorStorageMetadata(properties, torch.Size(()), scalar),
            "object": BytesStorageMetadata(),
        },
        {"table": ("table",)},
        {
            MetadataIndex("table", offsets[0], 0): StorageInfo("__0_0.distcp", 0, 10),
            MetadataIndex("table", offsets[1], 1): StorageInfo("__1_0.distcp", 0, 10),
            MetadataIndex("step", torch.Size(()), 0): StorageInfo("__0_0.distcp", 10, 5),
            MetadataIndex("object"): StorageInfo("__0_0.distcp", 15, 5),
        },
        StorageMeta(Path("/x"), "save", "load", ["a"]),
        "1.0.0",
    )


def read(metadata: object) -> Metadata:
    return read_metadata(pickle.dumps(metadata), "x/.metadata")


def test_metadata_come_back() -> None:
    metadata, before = read(good()), good()
    assert metadata.state_dict_metadata == before.state_dict_metadata
    assert metadata.storage_data == before.storage_data
    assert metadata.version == before.version
    assert metadata.storage_meta == StorageMeta(modules=["a"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_all_kinds_of_values_of_stock_come_back(tmp_path: Path) -> None:
    state = {
        "nested": {"dtype": [torch.ones(2, dtype=dtype) for dtype in DTYPES], 3: [1, ("a", 2.5)]},
        "scalar": torch.tensor(5),
        "channels_last": torch.ones(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "param": torch.nn.Parameter(torch.ones(2)),
        "none": None,
        "no rows": torch.empty(0, 4),
    }
    dcp.save(state, checkpoint_id=tmp_path)
    data = (tmp_path / ".metadata").read_bytes()
    metadata = read_metadata(data, "x")
    stock = pickle.loads(data)
    assert metadata.storage_data == stock.storage_data
    for name, entry in stock.state_dict_metadata.items():
        ours = metadata.state_dict_metadata[name]
        assert type(ours) is type(entry)
        if isinstance(entry, TensorStorageMetadata):
            assert isinstance(ours, TensorStorageMetadata)
            assert (ours.size, ours.chunks) == (entry.size, entry.chunks)
            assert ours.properties.dtype == entry.properties.dtype


DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


def test_metadata_of_torch_before_2_3_are_read() -> None:
    data = pickle.dumps(good(), protocol=2)
    new = b"torch.distributed.checkpoint.metadata\n"
    old = b"torch.distributed._shard.sharded_tensor.metadata\n"
    for name in (b"TensorProperties", b"_MEM_FORMAT_ENCODING"):
        assert new + name + b"\n" in data
        data = data.replace(new + name + b"\n", old + name.removeprefix(b"_") + b"\n")
    pickle.loads(data)
    assert read_metadata(data, "x").state_dict_metadata == good().state_dict_metadata


@pytest.mark.parametrize("name", sorted(PICKLED_NAMES))
def test_all_names_exist_upstream(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", RUNNING)
def test_pickles_that_run_code_are_refused(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "ran"
    data = RUNNING[name](marker)
    with pytest.raises(CheckpointError, match=r"x/\.metadata (names \S+, which no|is damaged)"):
        read_metadata(data, "x/.metadata")
    assert not marker.exists()


@pytest.mark.parametrize("name", ["eval", "global", "inst", "obj", "methodcaller", "getattr"])
def test_those_pickles_would_run_code(tmp_path: Path, name: str) -> None:
    """They run code in Python's reader; else the test above would prove nothing."""
    marker = tmp_path / "ran"
    pickle.loads(RUNNING[name](marker))
    assert marker.exists()


def test_the_error_names_the_class_that_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_metadata(RUNNING["system"](tmp_path), "x/.metadata")
    assert str(caught.value) == (
        "x/.metadata names posix.system, which no checkpoint needs and which could run code: "
        "nothing was loaded; load a checkpoint whose origin you know"
    )


@pytest.mark.parametrize("name", MISLEADING)
def test_other_pickles_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"x/\.metadata is damaged"):
        read_metadata(MISLEADING[name](tmp_path), "x/.metadata")
    assert not hasattr(Metadata, "poison")


def with_table(**changes: Any) -> Metadata:
    metadata = good()
    table = metadata.state_dict_metadata["table"]
    metadata.state_dict_metadata["table"] = replace(table, **changes)
    return metadata


def with_chunk(offsets: tuple[Any, ...], sizes: tuple[int, ...]) -> Metadata:
    """Replace the second shard in good metadata, and give it a file."""
    metadata = good()
    table = metadata.state_dict_metadata["table"]
    assert isinstance(table, TensorStorageMetadata)
    table.chunks[1] = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    metadata.storage_data[MetadataIndex("table", offsets)] = StorageInfo("__1_0.distcp", 0, 10)
    return metadata


def with_place(*place: Any) -> Metadata:
    metadata = good()
    metadata.storage_data[MetadataIndex("object")] = StorageInfo(*place)
    return metadata


def without_a_file() -> Metadata:
    metadata = good()
    del metadata.storage_data[MetadataIndex("step", torch.Size(()))]
    return metadata


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "size": (lambda: with_table(size=(4, 2)), "tuple where a Size should be"),
    "dtype": (lambda: with_table(properties=TensorProperties("float32")), "str where a dtype"),  # type: ignore[arg-type]
    "chunks": (lambda: with_table(chunks=()), "tuple where a list"),
    "no chunks": (lambda: with_table(chunks=[]), "invalid fill tensor-volume: 8 chunks-volume: 0"),
    "larger": (lambda: with_table(size=torch.Size((5, 2))), "tensor-volume: 10 chunks-volume: 8"),
    "outside": (lambda: with_chunk((3, 0), (2, 2)), "has out of bounds chunk"),
    "overlap": (lambda: with_chunk((1, 0), (2, 2)), "has overlapping chunks"),
    "other dims": (lambda: with_chunk((2,), (2,)), "a chunk of 1 dims in a tensor of 2"),
    "no file": (without_a_file, "no file for MetadataIndex"),
    "up": (lambda: with_place("../__0_0.distcp", 0, 5), "isn't the name of a file in the folder"),
    "root": (lambda: with_place("/etc/passwd", 0, 5), "isn't the name of a file in the folder"),
    "here": (lambda: with_place(".", 0, 5), "isn't the name of a file in the folder"),
    "path": (lambda: with_place(PurePath("a"), 0, 5), "names pathlib.PurePosixPath|where a str"),
    "negative": (lambda: with_place("a", -1, 5), "-1 where a size should be"),
    "fraction": (lambda: with_place("a", 0, 5.5), "5.5 where a size should be"),
    "flag": (lambda: with_place("a", 0, True), "True where a size should be"),
    "compressed": (lambda: with_place("a", 0, 5, ["zstd"]), "stored through an extension"),
    "no storage": (lambda: replace(good(), storage_data=None), "NoneType where a dict"),
    "no entries": (lambda: replace(good(), state_dict_metadata=[]), "list where a dict"),
    "version": (lambda: replace(good(), version=1), "int where a str"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_metadata_that_make_no_sense_are_refused(name: str) -> None:
    make, text = WRONG[name]
    with pytest.raises(CheckpointError, match=text):
        read(make())


def test_the_pickle_names_nothing_else() -> None:
    """If DCP starts to pickle other names, this fails before a user's load does."""
    names: set[str] = set()

    class Listener(pickle.Unpickler):
        def find_class(self, module: str, name: str, /) -> Any:
            names.add(f"{module}.{name}")
            return super().find_class(module, name)

    Listener(io.BytesIO(pickle.dumps(good()))).load()
    assert names - PICKLED_NAMES.keys() == {"torch.float32"}


def test_deep_nesting_is_refused_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=r"x is damaged .* nested"):
        read_metadata(b"(" * 2_000_000, "x")
    assert time.monotonic() - start < 1
