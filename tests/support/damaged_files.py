"""Random damage to files, for testing their readers: a flipped bit, a missing end, garbage.

`damaged` works on bytes, `damage_file` on a file, `damage_folder` also deletes and swaps files.
Each always changes something, and describes the change. This module knows no file format.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

MAX_GARBAGE_BYTES = 200
"""The most bytes written, added or taken away at once, where that isn't the rest of the file."""
MAX_ATTEMPTS = 20
"""The number of draws that may change nothing until a bit is flipped instead."""


def _flip(data: bytes, random: Random) -> bytes:
    place = random.randrange(len(data))
    return _replaced(data, place, bytes([data[place] ^ 1 << random.randrange(8)]))


def _overwrite(data: bytes, random: Random) -> bytes:
    start, stop = _span(data, random)
    return _replaced(data, start, random.randbytes(stop - start))


def _clear(data: bytes, random: Random) -> bytes:
    start, stop = _span(data, random)
    return _replaced(data, start, bytes(stop - start))


def _copy(data: bytes, random: Random) -> bytes:
    start, stop = _span(data, random)
    source = random.randrange(len(data) - (stop - start) + 1)
    return _replaced(data, start, data[source : source + stop - start])


def _insert(data: bytes, random: Random) -> bytes:
    place = random.randrange(len(data))
    return data[:place] + _garbage(random) + data[place:]


def _remove(data: bytes, random: Random) -> bytes:
    start, stop = _span(data, random)
    return data[:start] + data[stop:]


def _span(data: bytes, random: Random) -> tuple[int, int]:
    """Draw the start and end of at least one byte."""
    length = random.randint(1, min(MAX_GARBAGE_BYTES, len(data)))
    start = random.randrange(len(data) - length + 1)
    return start, start + length


def _garbage(random: Random) -> bytes:
    return random.randbytes(random.randint(1, MAX_GARBAGE_BYTES))


def _replaced(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


BYTE_DAMAGES: dict[str, Callable[[bytes, Random], bytes]] = {
    "flip": _flip,
    "overwrite": _overwrite,
    "clear": _clear,
    "copy": _copy,
    "insert": _insert,
    "remove": _remove,
    "append": lambda data, random: data + _garbage(random),
    "truncate": lambda data, random: data[: random.randrange(len(data))],
    "empty": lambda data, random: b"",
    "garble": lambda data, random: random.randbytes(len(data)),
}
"""Damages to one file's bytes."""
FILE_DAMAGES = ("delete", "swap")
"""Damages to the files of a folder."""


class Damage(NamedTuple):
    """A kind of damage, and the damaged bytes."""

    kind: str
    data: bytes


def damaged(data: bytes, random: Random, *kinds: str) -> Damage:
    """Damage the bytes at random, so that at least one byte differs for certain.

    Where these kinds change nothing (a copy onto equal bytes), a bit is flipped.
    """
    for _ in range(MAX_ATTEMPTS):
        kind = random.choice(kinds or tuple(BYTE_DAMAGES))
        after = BYTE_DAMAGES[kind](data, random)
        if after != data:
            return Damage(kind, after)
    return damaged(data, random, "flip")


def damage_file(path: Path, random: Random, *kinds: str) -> str:
    """Damage a file's bytes in place; describe the damage."""
    damage = damaged(path.read_bytes(), random, *kinds)
    path.write_bytes(damage.data)
    return f"{damage.kind} in {path.name}"


def damage_folder(folder: Path, random: Random, *kinds: str) -> str:
    """Damage, delete, replace or swap files directly in a folder; describe the damage."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    filled = [path for path in paths if path.stat().st_size]
    for _ in range(MAX_ATTEMPTS):
        kind = random.choice(kinds or (*BYTE_DAMAGES, *FILE_DAMAGES))
        if kind in BYTE_DAMAGES:
            return damage_file(random.choice(filled), random, kind)
        first, second = random.choices(paths, k=2)
        if kind == "delete":
            first.unlink()
            return f"delete {first.name}"
        contents = first.read_bytes(), second.read_bytes()
        if contents[0] != contents[1]:
            second.write_bytes(contents[0])
            first.write_bytes(contents[1])
            return f"swap {first.name} and {second.name}"
    return damage_file(random.choice(filled), random, "flip")
