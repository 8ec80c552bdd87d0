"""`UnusedParameters`: those that a batch didn't use, for which gradients arrive nevertheless."""

from collections.abc import Sequence

import torch
import torch.distributed as dist


class UnusedParameters:
    """The parameters of one of DDP's buckets that have no gradient on this rank.

    If no rank used a parameter, DDP leaves it without one, whatever a hook has computed. What a
    hook has kept from earlier steps may be due nevertheless.
    """

    def __init__(self, bucket: dist.GradBucket) -> None:
        """
        Args:
            bucket: that a hook was called with.
        """
        params = bucket.parameters()
        self._is_unused = [param.grad is None for param in params]
        self._params: Sequence[torch.Tensor] = params
        self._views: Sequence[torch.Tensor] = bucket.gradients() if any(self._is_unused) else ()

    def give(self, means: torch.Tensor) -> torch.Tensor:
        """Let those parameters have gradients for which one has come, and return all of them.

        Args:
            means: the gradients of the bucket that all ranks have, flat.
        """
        if not self._views:
            return means
        parts = means.split([param.numel() for param in self._params])
        for param, view, part, is_unused in zip(
            self._params, self._views, parts, self._is_unused, strict=True
        ):
            if is_unused and part.any():
                # A view of the bucket, into which DDP writes the means afterwards.
                param.grad = view
        return means
