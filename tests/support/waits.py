"""Count on a CPU where a GPU would be waited for, and the operators that it would be given."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchrec_2dsp

PACKAGE = Path(torchrec_2dsp.__file__).parent
OTHERS = ("/fbgemm_gpu/", "/torchrec/")
"""Folders with operators that aren't ours."""
ELSEWHERE = (str(PACKAGE / "_compat/fbgemm.py"), *OTHERS)
"""Files whose waits aren't ours: of numbers that FBGEMM keeps on the CPU, and TorchRec's own."""
WAITING = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "_unique2")
WAITING += ("unique_consecutive", "unique_dim")
BY_MASK = ("index", "index_put", "index_put_", "_index_put_impl_")


@contextmanager
def count_waits() -> Iterator[Counter[str]]:
    """Count by file and line where the package asks for numbers or sizes that a device knows.

    Copies from Python lists count, too. Numbers that are on the CPU anyway aren't told apart.
    """
    mode, to_list, to_cpu = _Operations(), torch.Tensor.tolist, torch.Tensor.cpu

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        mode.note(waits=tensor.numel() > 0)
        return tensor

    with (
        patch.object(torch.Tensor, "tolist", lambda tensor: to_list(seen(tensor))),
        patch.object(torch.Tensor, "cpu", lambda tensor: to_cpu(seen(tensor))),
        mode,
    ):
        yield mode.places


@contextmanager
def count_operators() -> Iterator[Counter[str]]:
    """Count by file and line the operators that the package calls; views compute nothing.

    Those of FBGEMM, TorchRec and autograd aren't counted.
    """
    mode = _Operators()
    with mode:
        yield mode.places


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace != "profiler":
            self.places.update(_place(but=OTHERS))
        return func(*args, **(kwargs or {}))


def _place(*, but: tuple[str, ...]) -> list[str]:
    """Return the package's line that runs, in a list; none if it runs what isn't ours."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not any(part in frame.f_code.co_filename for part in but):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return [f"{path.relative_to(PACKAGE)}:{frame.f_lineno}"]
        frame = frame.f_back
    return []


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func.overloadpacket).removeprefix("aten.")
        self.note(
            waits=name in WAITING
            or (name == "lift_fresh" and args[0].numel() > 0)
            or (name == "repeat_interleave" and kwargs.get("output_size") is None)
            or (name in BY_MASK and any(getattr(i, "dtype", 0) is torch.bool for i in args[1]))
        )
        return func(*args, **kwargs)

    def note(self, *, waits: bool) -> None:
        """Count the package's line that waits."""
        self.places.update(_place(but=ELSEWHERE) if waits else [])
