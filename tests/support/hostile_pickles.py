"""Pickles that run code, fill the memory or mislead when Python's own reader loads them.

Code that runs creates the file ``marker``, so that a test can see it.
"""

import codecs
import functools
import operator
import os
import pickle
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

Gadget = Callable[[Path], bytes]


class Call:
    """Pickles as a function call."""

    def __init__(self, function: object, *args: object) -> None:
        self._call = (function, args)

    def __reduce__(self) -> Any:
        return self._call


def _touch(marker: Path) -> str:
    return f"open({str(marker)!r}, 'w').close()"


def _short(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text.encode())) + text.encode()


def _named(module: str, name: str) -> bytes:
    """Return protocol 4's bytes for a global name."""
    return _short(module) + _short(name) + b"\x93"


def dumps(value: object) -> Gadget:
    return lambda marker: pickle.dumps(value)


RUNNING: dict[str, Gadget] = {
    "eval": lambda marker: pickle.dumps(Call(eval, _touch(marker))),
    "exec": lambda marker: pickle.dumps(Call(exec, _touch(marker))),
    "system": lambda marker: pickle.dumps(Call(os.system, f"touch {marker}")),
    "popen": lambda marker: pickle.dumps(Call(subprocess.Popen, ["touch", str(marker)])),
    "partial": lambda marker: pickle.dumps(Call(functools.partial(eval, _touch(marker)))),
    "methodcaller": lambda marker: pickle.dumps(
        Call(operator.methodcaller("write_text", "ran"), marker)
    ),
    "getattr": lambda marker: (
        b"\x80\x04"
        + _named("builtins", "getattr")
        + _named("os", "path.os")
        + _short("system")
        + b"\x86R"
        + _short(f"touch {marker}")
        + b"\x85R."
    ),
    "codecs": lambda marker: pickle.dumps(
        Call(eval, Call(codecs.decode, _touch(marker).encode(), "utf8"))
    ),
    # the oldest protocol: a name as text, and its instances by INST and OBJ
    "global": lambda marker: b"cposix\nsystem\n(S'touch %s'\ntR." % str(marker).encode(),
    "inst": lambda marker: b"(S'touch %s'\niposix\nsystem\n." % str(marker).encode(),
    "obj": lambda marker: b"(cposix\nsystem\nS'touch %s'\no." % str(marker).encode(),
    # a name that begins like a DCP name
    "dotted": lambda marker: (
        b"\x80\x04"
        + _named("torch.distributed.checkpoint.metadata", "os.system")
        + _short(f"touch {marker}")
        + b"\x85R."
    ),
    "dotted module": lambda marker: (
        b"\x80\x04"
        + _named("torch.distributed.checkpoint.filesystem.os", "system")
        + _short(f"touch {marker}")
        + b"\x85R."
    ),
    "torch.hub": lambda marker: (
        b"\x80\x04"
        + _named("torch.serialization", "os.system")
        + _short(f"touch {marker}")
        + b"\x85R."
    ),
    # a real class that gets a function to call when its state is set
    "setstate": lambda marker: (
        b"\x80\x04"
        + _named("torch.distributed.checkpoint.metadata", "Metadata")
        + b")\x81N}"
        + _short("__setstate__")
        + _named("builtins", "eval")
        + b"s\x86b"
        + _short(_touch(marker))
        + b"b."
    ),
    # built without REDUCE calling its constructor
    "new": lambda marker: (
        b"\x80\x04"
        + _named("subprocess", "Popen")
        + b"]("
        + _short("touch")
        + _short(str(marker))
        + b"e\x85\x81."
    ),
}
"""Pickles that run code, in many ways."""

MISLEADING: dict[str, Gadget] = {
    "deep": lambda marker: b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "memo": lambda marker: b"\x80\x04]r\xff\xff\xff\x7f.",
    "long text": lambda marker: b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
    "long number": lambda marker: b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
    "many digits": lambda marker: b"I" + b"9" * 10_000 + b"\n.",
    "extension": lambda marker: b"\x80\x04\x82\x01.",
    "persistent": lambda marker: b"\x80\x04" + _short("x") + b"Q.",
    "number": dumps(5),
    "dict": dumps({"state_dict_metadata": {}}),
    "nothing": lambda marker: b".",
    # DCP classes, which a naive reader would change for the whole program
    "poison": lambda marker: (
        b"\x80\x04"
        + _named("torch.distributed.checkpoint.metadata", "Metadata")
        + b"N}"
        + _short("poison")
        + b"K\x01s\x86b."
    ),
}
"""Pickles that don't run code, and aren't metadata either."""
