"""Adapters to what torch keeps to itself about tensors and their memory."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def tensor_without_storage(
    kind: type[Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Any:
    """Return a tensor of this subclass, which answers for its numbers in `__torch_dispatch__`."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]


class Unwritten(TorchFunctionMode):
    """Leaves the first so many zeros that are made inside the context unwritten.

    FBGEMM makes a kernel's weights first. A host gives memory to what is written, so weights that
    are replaced before cost none there.
    """

    _num_zeros = 0

    def __init__(self, num_zeros: int) -> None:
        super().__init__()
        self._num_zeros = num_zeros

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.zeros and args[:1] == (self._num_zeros,):
            func, self._num_zeros = torch.empty, 0
        return func(*args, **(kwargs or {}))
