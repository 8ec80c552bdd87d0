"""Adapters to private attributes of torch's tensors."""

from typing import Any

import torch
from torch import Tensor


def tensor_without_storage(
    kind: type[Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Any:
    """Return a tensor of this subclass, which answers for its numbers in `__torch_dispatch__`."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
