"""Damage checkpoints at random, load them, and check that loads are right or refused.

A model starts with checkpoint `other`'s state, and all ranks load a damaged copy of checkpoint
`good` into it. Then either the model equals `good`, bit for bit, or all ranks raised a
`CheckpointError` and the model still equals `other`, bit for bit. Code hidden in a checkpoint
would leave a file behind.
"""

import io
import json
import os
import pickle
import shutil
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

import torchrec_2dsp as tdsp
from tests.support.damaged_files import damage_folder
from tests.support.hostile_pickles import MISLEADING, RUNNING, Call
from tests.support.parity import Cell, local_shards
from tests.support.trips import HOT, dense_optimizer, make, state_entries, train
from torchrec_2dsp.errors import CheckpointError
from torchrec_2dsp.parallel.checkpoint import load_checkpoint, save_checkpoint
from torchrec_2dsp.parallel.checkpoint.stored import FILE_NAME, Checksums, Chunk

CELL = Cell(tdsp.Mesh2D(1, 2), "row_wise", hot_rows=HOT)
EXTRA = {"step": 3, "name": "good"}


@dataclass(frozen=True)
class Outcome:
    """A damaged checkpoint's load result."""

    damage: str
    result: str
    """``refused``, ``right``, ``unknown`` where damage is undetectable, or the kind of failure."""
    text: str
    """The error's."""


def load_damaged(
    rank: int, world_size: int, folder: Path, num_damages: int, seed: int
) -> list[Outcome]:
    """Damage and load a checkpoint ``num_damages`` times, each time in another way."""
    model, optimizer = _trained()
    save_checkpoint(folder / "good", model, optimizer, extra=EXTRA)
    good = _state(model, optimizer)
    train(model, optimizer, CELL, range(10, 12))
    save_checkpoint(folder / "other", model, optimizer, extra={"name": "other"})
    other = _state(model, optimizer)
    assert not any(torch.equal(*pair) for pair in zip(good, other, strict=True))

    outcomes = []
    for number in range(num_damages):
        random = Random(f"{seed} {number}")
        damaged = folder / "damaged"
        box: list[Any] = [_damage(folder, damaged, random) if rank == 0 else None]
        dist.broadcast_object_list(box)
        name, is_checked = box[0]
        text = ""
        try:
            extra = load_checkpoint(damaged, model, optimizer)
            result = "WRONG" if is_checked else "unknown"
            if extra == EXTRA and _equal(_state(model, optimizer), good):
                result = "right"
        except CheckpointError as error:
            is_untouched = _equal(_state(model, optimizer), other)
            result, text = ("refused" if is_untouched else "TOUCHED"), str(error)
        except Exception as error:  # must not happen: it is counted
            result, text = "UNTYPED", repr(error)
        if (folder / "ran").exists():
            result = "RAN"
        outcomes.append(Outcome(name, result, text))
        if result != "refused":
            load_checkpoint(folder / "other", model, optimizer)
        dist.barrier()
    return outcomes


def summary(by_rank: list[list[Outcome]]) -> tuple[Counter[str], list[str]]:
    """Count each result, and describe all loads that went wrong."""
    counts: Counter[str] = Counter()
    wrong = []
    for number, outcomes in enumerate(zip(*by_rank, strict=True)):
        results = sorted({outcome.result for outcome in outcomes})
        counts[" / ".join(results)] += 1
        texts = {outcome.text for outcome in outcomes}
        # Undetectable damage may be in one rank's shards only.
        is_alike = len(results) == 1 or results == ["right", "unknown"]
        if not is_alike or results[0] not in ("refused", "right", "unknown") or len(texts) > 1:
            wrong.append(f"{number}: {outcomes[0].damage}: {results} {sorted(texts)}")
    return counts, wrong


def _trained() -> tuple[DistributedModelParallel, CombinedOptimizer]:
    model, _ = make(CELL)
    optimizer = CombinedOptimizer([model.fused_optimizer, dense_optimizer("adam", model)])
    train(model, optimizer, CELL, range(2))
    return model, optimizer


def _state(model: DistributedModelParallel, optimizer: CombinedOptimizer) -> list[torch.Tensor]:
    return [
        shard.detach().clone()
        for _, value in state_entries(model, optimizer)
        for shard, _ in local_shards(value)
    ]


def _equal(state: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(state, expected, strict=True))


def _damage(folder: Path, damaged: Path, random: Random) -> tuple[str, bool]:
    """Make the damaged copy; describe it, and tell whether checksums could reveal it."""
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(folder / "good", damaged)
    kind = random.choices(list(_KINDS), [weight for _, weight in _KINDS.values()])[0]
    text = _KINDS[kind][0](folder, damaged, random)
    return f"{kind}: {text}", kind != "without checksums"


def _some_files(folder: Path, damaged: Path, random: Random) -> str:
    return "; ".join(damage_folder(damaged, random) for _ in range(random.randint(1, 2)))


def _mixed(folder: Path, damaged: Path, random: Random) -> str:
    names = sorted(path.name for path in damaged.iterdir())
    chosen = random.sample(names, random.randint(1, len(names) - 1))
    for name in chosen:
        shutil.copy(folder / "other" / name, damaged / name)
    return ", ".join(chosen)


def _without_checksums(folder: Path, damaged: Path, random: Random) -> str:
    """Damage a checkpoint without our checksums, so that wrong numbers can't be detected."""
    metadata: Any = dcp.FileSystemReader(damaged).read_metadata()
    metadata.storage_meta = None
    (damaged / ".metadata").write_bytes(pickle.dumps(metadata))
    (damaged / FILE_NAME).unlink()
    return _some_files(folder, damaged, random)


def _hostile_metadata(folder: Path, damaged: Path, random: Random) -> str:
    """Write metadata that run code or mislead, with correct checksums; return their name."""
    gadgets = RUNNING | MISLEADING
    name = random.choice(sorted(gadgets))
    data = gadgets[name](folder / "ran")
    if random.random() < 0.3 and data[:2] == b"\x80\x04":
        data = pickle.dumps(dcp.FileSystemReader(damaged).read_metadata())[:-1] + data[2:]
        name += " behind metadata"
    (damaged / ".metadata").write_bytes(data)
    body = json.loads((damaged / FILE_NAME).read_text())
    chunks = {
        Chunk(file, offset, length): crc32
        for file, places in body["files"].items()
        for offset, length, crc32 in places
    }
    (damaged / FILE_NAME).write_text(Checksums(zlib.crc32(data), chunks).to_json())
    return name


def _hostile_data(folder: Path, damaged: Path, random: Random) -> str:
    """Replace a tensor by something else, with correct checksums; return its name."""
    metadata: Any = dcp.FileSystemReader(damaged).read_metadata()
    index = random.choice(sorted(metadata.storage_data, key=str))
    entry, place = metadata.state_dict_metadata[index.fqn], metadata.storage_data[index]
    (sizes,) = (chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
    values: dict[str, Any] = {
        "other shape": torch.zeros([*sizes, 2], dtype=entry.properties.dtype),
        "other dtype": torch.zeros(sizes, dtype=torch.float16),
        "sparse": torch.zeros(sizes, dtype=entry.properties.dtype).to_sparse(),
        "number": 5,
        "list": [torch.zeros(sizes)],
        "touch": Call(os.system, f"touch {folder / 'ran'}"),
        "eval": Call(eval, f"open({str(folder / 'ran')!r}, 'w').close()"),
    }
    name = random.choice(sorted([*values, "global", "inst", "obj"]))
    stream = io.BytesIO()
    if name in values:
        torch.save(values[name], stream)
    else:
        stream.write(RUNNING[name](folder / "ran"))
    path = damaged / place.relative_path
    offset = path.stat().st_size
    with path.open("ab") as file:
        file.write(stream.getvalue())
    metadata.storage_data[index] = replace(place, offset=offset, length=stream.tell())
    _seal(damaged, metadata)
    return f"{name} as {index.fqn}"


def _lying_metadata(folder: Path, damaged: Path, random: Random) -> str:
    """Write metadata that point to wrong places, with correct checksums."""
    metadata: Any = dcp.FileSystemReader(damaged).read_metadata()
    index, second = random.sample(sorted(metadata.storage_data, key=str), 2)
    place = metadata.storage_data[index]
    changes: dict[str, Callable[[], Any]] = {
        "up": lambda: replace(place, relative_path="../other/__0_0.distcp"),
        "absolute": lambda: replace(place, relative_path=str(folder / "other" / "__0_0.distcp")),
        "metadata": lambda: replace(place, relative_path=".metadata", offset=0, length=10),
        "offset": lambda: replace(place, offset=place.offset + 64),
        "length": lambda: replace(place, length=place.length - 64),
        "nowhere": lambda: replace(place, relative_path="__9_0.distcp"),
        "far": lambda: replace(place, offset=2**62),
        "other": lambda: metadata.storage_data[second],
    }
    name = random.choice(sorted([*changes, "missing"]))
    if name == "other" and _kind_of(metadata, index) == _kind_of(metadata, second):
        name = "missing"  # A tensor of the same kind would be a forgery that nobody can tell.
    if name == "missing":
        del metadata.storage_data[index]
    else:
        metadata.storage_data[index] = changes[name]()
    _seal(damaged, metadata)
    return f"{name} of {index.fqn}"


def _kind_of(metadata: Any, index: Any) -> object:
    entry = metadata.state_dict_metadata[index.fqn]
    sizes = [chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset]
    return (sizes, entry.properties.dtype)


def _seal(damaged: Path, metadata: Any) -> None:
    """Write metadata with matching checksums, as a forger would."""
    data = pickle.dumps(metadata)
    (damaged / ".metadata").write_bytes(data)
    chunks = {}
    for place in metadata.storage_data.values():
        path = damaged / place.relative_path
        content = path.read_bytes() if path.is_file() else b""
        content = content[place.offset : place.offset + place.length]
        chunk = Chunk(place.relative_path, place.offset, place.length)
        chunks[chunk] = zlib.crc32(content)
    (damaged / FILE_NAME).write_text(Checksums(zlib.crc32(data), chunks).to_json())


def _stray_files(folder: Path, damaged: Path, random: Random) -> str:
    """Add files that an interrupted save may have left, and that a load must ignore."""
    for name in ("__9_0.distcp", ".metadata.tmp", "notes.txt"):
        (damaged / name).write_bytes(random.randbytes(50))
    return "added"


_Damager = Callable[[Path, Path, Random], str]
_KINDS: dict[str, tuple[_Damager, int]] = {
    "files": (_some_files, 10),
    "mixed with another": (_mixed, 3),
    "hostile metadata": (_hostile_metadata, 4),
    "hostile data": (_hostile_data, 2),
    "lying metadata": (_lying_metadata, 3),
    "without checksums": (_without_checksums, 3),
    "stray files": (_stray_files, 1),
}
"""Damages to a checkpoint, and how often each is done in relation to the others."""
