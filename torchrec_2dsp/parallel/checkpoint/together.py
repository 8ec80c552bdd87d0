"""Ranks whose dense parts are equal: a checkpoint keeps one of them."""

from typing import Protocol, runtime_checkable

from torch import nn

from torchrec_2dsp._compat.ddp import data_parallel_wrapper


@runtime_checkable
class MeetingWrapper(Protocol):
    """A data-parallel wrapper whose ranks have different weights at times, such as `LocalDense`."""

    def check_together(self) -> None:
        """Raise if they have now."""
        ...


def check_together(model: nn.Module) -> None:
    """Raise if ranks may have different dense parts now.

    Raises:
        SyncError: a save would keep one of them, and a load would leave the wrapper with changes
            from weights that are gone.
    """
    wrapper = data_parallel_wrapper(model)
    if isinstance(wrapper, MeetingWrapper):
        wrapper.check_together()
