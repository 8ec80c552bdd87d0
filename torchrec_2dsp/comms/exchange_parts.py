"""What an all-to-all sends to each rank, and whether sizes and types fit."""

from collections.abc import Sequence

import torch


def parts_of(tensor: torch.Tensor, sizes: Sequence[int], num_ranks: int) -> Sequence[torch.Tensor]:
    """One part of the first dimension per rank, sharing memory with ``tensor``."""
    num_rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes and (num_rows % num_ranks or not tensor.dim()):
        raise RuntimeError(
            f"Tensor's dim 0 of shape {tuple(tensor.shape)} does not divide equally across group "
            f"size {num_ranks}; pass split sizes"
        )
    if not sizes:
        sizes = [num_rows // num_ranks] * num_ranks
    if len(sizes) != num_ranks:
        raise RuntimeError(
            f"Number of tensor splits not equal to group size: {len(sizes)} for {num_ranks} ranks; "
            "pass one size per rank"
        )
    if sum(sizes) != num_rows or min(sizes) < 0:
        raise RuntimeError(
            f"Split sizes doesn't match total dim 0 size: {list(sizes)} for {num_rows}; "
            "pass sizes of zero or more that add up to it"
        )
    return tensor.detach().split_with_sizes(list(sizes))


def check_own_parts(received: torch.Tensor, sent: torch.Tensor) -> None:
    """Raise unless what a rank keeps fits the place that it has for it."""
    if received.dtype != sent.dtype:
        raise ValueError(
            f"tensors of different dtypes: {received.dtype} and {sent.dtype}; convert one"
        )
    if received.numel() != sent.numel():
        raise RuntimeError(
            f"this rank sends {sent.numel()} elements to itself and expects {received.numel()}; "
            "give its own parts the same size"
        )
