"""`BucketLayout`: which parameters of one of DDP's buckets are thresholded, and where. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_THRESHOLDED_TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Part:
    """A parameter in a bucket, which is flat."""

    name: str
    """The parameter's name."""

    start: int
    """Where the parameter begins in the bucket."""

    size: int
    """How many elements the parameter has."""

    capacity: int
    """How many of them may be sent; 0 if the parameter is sent as a whole."""

    @property
    def place(self) -> slice:
        """The parameter's elements in the bucket."""
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class BucketLayout:
    """The parameters of a bucket, in its order."""

    parts: tuple[Part, ...]
    """All parameters."""

    @classmethod
    def of(
        cls,
        params: Sequence[tuple[str, torch.Tensor]],
        *,
        density: float,
        dense_below: int,
    ) -> "BucketLayout":
        """The layout of parameters.

        Args:
            params: names and parameters, in the order of the bucket.
            density: the share of elements that may be sent.
            dense_below: a parameter with fewer elements is sent as a whole.
        """
        parts, start = [], 0
        for name, param in params:
            size = param.numel()
            is_thresholded = (
                density < 1 and size >= dense_below and param.dtype in _THRESHOLDED_TYPES
            )
            capacity = math.ceil(density * size) if is_thresholded else 0
            parts.append(Part(name, start, size, capacity))
            start += size
        return cls(tuple(parts))

    @property
    def thresholded(self) -> list[Part]:
        """The parameters of which entries are sent."""
        return [part for part in self.parts if part.capacity]

    @property
    def whole(self) -> list[Part]:
        """The parameters that are sent as a whole."""
        return [part for part in self.parts if not part.capacity]

    @property
    def capacity(self) -> int:
        """How many entries may be sent of the bucket."""
        return sum(part.capacity for part in self.parts)

    @property
    def num_elements(self) -> int:
        """The size of the bucket."""
        return sum(part.size for part in self.parts)

    @property
    def num_thresholded(self) -> int:
        """The elements of all parameters of which entries are sent."""
        return sum(part.size for part in self.thresholded)

    @property
    def num_whole(self) -> int:
        """The elements of all parameters that are sent as a whole."""
        return self.num_elements - self.num_thresholded
