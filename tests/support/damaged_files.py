"""Random damage to files, for tests of whoever reads them: a flipped bit, a missing end, garbage.

`damaged` works on bytes, `damage_file` on a file, `damage_folder` also deletes and swaps files.
Each of them changes something for certain, and says what. This module knows no file format.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import MappingProxyType

MAX_GARBAGE_BYTES = 200
"""How much is written, added or taken away at once, where that isn't the rest of the file."""

MAX_ATTEMPTS = 20
"""How often a damage is drawn that changes nothing, until a bit is flipped instead."""


@dataclass(frozen=True)
class Damage:
    """A change to one file."""

    kind: str
    """One of `BYTE_DAMAGES` or `FILE_DAMAGES`."""
    where: str
    """Which bytes or files, to be read by a person."""
    data: bytes = b""
    """The bytes after the damage; of a damage to whole files, none."""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}"


def damaged(data: bytes, random: Random, kinds: Sequence[str] = ()) -> Damage:
    """Damage ``data`` at random, so that the bytes differ for certain.

    Args:
        data: at least one byte.
        random: the source of all choices: an equal one makes an equal damage.
        kinds: those of `BYTE_DAMAGES` to choose from; all of them by default. Where they don't
            change these bytes (a copy of equal bytes), a bit is flipped.

    Example:
        >>> from random import Random
        >>> str(damaged(b"0123456789", Random(0), ["flip"]))
        'flip bit 0 of byte 6 of 10'
    """
    if not data:
        raise ValueError("there is nothing to damage in no bytes; give at least one")
    for _ in range(MAX_ATTEMPTS):
        kind = random.choice(list(kinds or BYTE_DAMAGES))
        after, where = BYTE_DAMAGES[kind](data, random)
        if after != data:
            return Damage(kind, f"{where} of {len(data)}", after)
    return damaged(data, random, ["flip"])


def damage_file(path: Path, random: Random, kinds: Sequence[str] = ()) -> Damage:
    """Damage the bytes of the file ``path`` in place, as `damaged` does."""
    damage = damaged(path.read_bytes(), random, kinds)
    path.write_bytes(damage.data)
    return Damage(damage.kind, f"{damage.where} in {path.name}", damage.data)


def damage_folder(folder: Path, random: Random, kinds: Sequence[str] = ()) -> Damage:
    """Damage one file, or all of one or two, of those directly in ``folder``, in place.

    Args:
        folder: with at least one file that isn't empty.
        random: as in `damaged`.
        kinds: those of `BYTE_DAMAGES` and `FILE_DAMAGES` to choose from; all by default.
    """
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    filled = [path for path in paths if path.stat().st_size]
    for _ in range(MAX_ATTEMPTS):
        kind = random.choice(list(kinds or [*BYTE_DAMAGES, *FILE_DAMAGES]))
        if kind in BYTE_DAMAGES:
            return damage_file(random.choice(filled), random, [kind])
        where = FILE_DAMAGES[kind](paths, random)
        if where:
            return Damage(kind, where)
    return damage_file(random.choice(filled), random, ["flip"])


def _flip(data: bytes, random: Random) -> tuple[bytes, str]:
    place, bit = random.randrange(len(data)), random.randrange(8)
    return _replaced(data, place, bytes([data[place] ^ 1 << bit])), f"bit {bit} of byte {place}"


def _overwrite(data: bytes, random: Random) -> tuple[bytes, str]:
    start, stop = _span(data, random)
    return _replaced(data, start, random.randbytes(stop - start)), f"bytes {start}..{stop}"


def _clear(data: bytes, random: Random) -> tuple[bytes, str]:
    start, stop = _span(data, random)
    return _replaced(data, start, bytes(stop - start)), f"bytes {start}..{stop}"


def _copy(data: bytes, random: Random) -> tuple[bytes, str]:
    start, stop = _span(data, random)
    source = random.randrange(len(data) - (stop - start) + 1)
    after = _replaced(data, start, data[source : source + stop - start])
    return after, f"bytes {source}.. onto {start}..{stop}"


def _insert(data: bytes, random: Random) -> tuple[bytes, str]:
    place, garbage = random.randrange(len(data)), _garbage(random)
    return data[:place] + garbage + data[place:], f"{len(garbage)} bytes at {place}"


def _remove(data: bytes, random: Random) -> tuple[bytes, str]:
    start, stop = _span(data, random)
    return data[:start] + data[stop:], f"bytes {start}..{stop}"


def _append(data: bytes, random: Random) -> tuple[bytes, str]:
    garbage = _garbage(random)
    return data + garbage, f"{len(garbage)} bytes to the end"


def _truncate(data: bytes, random: Random) -> tuple[bytes, str]:
    length = random.randrange(len(data))
    return data[:length], f"to {length} bytes"


def _empty(data: bytes, random: Random) -> tuple[bytes, str]:
    return b"", "to no bytes"


def _garble(data: bytes, random: Random) -> tuple[bytes, str]:
    return random.randbytes(len(data)), "all bytes"


def _delete(paths: Sequence[Path], random: Random) -> str:
    path = random.choice(paths)
    path.unlink()
    return path.name


def _swap(paths: Sequence[Path], random: Random) -> str:
    """Exchange the contents of two files, unless those are equal."""
    if len(paths) < 2:
        return ""
    first, second = random.sample(paths, 2)
    contents = first.read_bytes(), second.read_bytes()
    if contents[0] == contents[1]:
        return ""
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])
    return f"{first.name} and {second.name}"


def _span(data: bytes, random: Random) -> tuple[int, int]:
    """At least one byte, from a place to another."""
    length = random.randint(1, min(MAX_GARBAGE_BYTES, len(data)))
    start = random.randrange(len(data) - length + 1)
    return start, start + length


def _garbage(random: Random) -> bytes:
    return random.randbytes(random.randint(1, MAX_GARBAGE_BYTES))


def _replaced(data: bytes, place: int, new: bytes) -> bytes:
    return data[:place] + new + data[place + len(new) :]


_ByteDamage = Callable[[bytes, Random], tuple[bytes, str]]
_FileDamage = Callable[[Sequence[Path], Random], str]

BYTE_DAMAGES: Mapping[str, _ByteDamage] = MappingProxyType(
    {
        "flip": _flip,
        "overwrite": _overwrite,
        "clear": _clear,
        "copy": _copy,
        "insert": _insert,
        "remove": _remove,
        "append": _append,
        "truncate": _truncate,
        "empty": _empty,
        "garble": _garble,
    }
)
"""What can happen to the bytes of one file."""

FILE_DAMAGES: Mapping[str, _FileDamage] = MappingProxyType({"delete": _delete, "swap": _swap})
"""What can happen to the files of a folder. A damage that couldn't be done returns no text."""
