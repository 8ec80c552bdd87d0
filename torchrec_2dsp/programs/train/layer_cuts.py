"""`LayerCuts`: the cuts of a run's pipelined layers, which follow what layers take."""

from collections.abc import Mapping

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_2dsp._compat.data_parallel import data_parallel_wrapper
from torchrec_2dsp.dense.pipelined.pipelined_dense import PipelinedDense


class LayerCuts:
    """Moves the layers of a pipeline now and then, if a model has one."""

    def __init__(self, model: nn.Module, optimizer: KeyedOptimizer, every: int) -> None:
        """
        Args:
            model: the sharded model.
            optimizer: of everything but the tables.
            every: layers may move after so many steps, and after each multiple; 0 for never.
        """
        wrapper = data_parallel_wrapper(model)
        self._pipeline = wrapper if isinstance(wrapper, PipelinedDense) else None
        self._optimizer, self._every = optimizer, every

    def due_after(self, step: int) -> int | None:
        """The next step after which layers may move; none if they never do."""
        if self._pipeline is None or not self._every:
            return None
        return (step // self._every + 1) * self._every

    def recut(self) -> Mapping[str, tuple[int, ...]] | None:
        """Cut the layers anew, between two steps; the cuts of each stack, if layers have moved.

        Collectives:
            Those of `PipelinedDense.recut`.
        """
        assert self._pipeline is not None, "no step is due"
        self._optimizer.zero_grad()
        return self._pipeline.cuts if self._pipeline.recut(self._optimizer) else None
