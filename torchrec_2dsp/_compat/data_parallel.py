"""Where TorchRec keeps the data-parallel part of a model, and the wrapper that made it."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)

__all__ = [
    "DataParallelWrapper",
    "DefaultDataParallelWrapper",
    "data_parallel_module",
    "data_parallel_wrapper",
]


def data_parallel_module(model: DistributedModelParallel) -> DistributedDataParallel | None:
    """The DDP module around everything that isn't sharded; `None` if all is."""
    wrapped = model._dmp_wrapped_module
    return wrapped if isinstance(wrapped, DistributedDataParallel) else None


def data_parallel_wrapper(model: nn.Module) -> DataParallelWrapper | None:
    """The wrapper that a model was given; `None` for a model that TorchRec doesn't wrap."""
    return getattr(model, "_data_parallel_wrapper", None)
