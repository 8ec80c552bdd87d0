"""`SyncedOptimizer`: a module's fused optimizer, behind its sync point."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_2dsp._compat.fbgemm import SplitTableBatchedEmbeddingBagsCodegen


class SyncedOptimizer(CombinedOptimizer):
    """TorchRec's combined optimizer, in front of which a sync point stands.

    Updates that were captured keep the learning rate of their lookup, whatever a step hands to the
    kernels meanwhile. Other changes come after them, and whoever reads the state sees it complete.
    """

    def __init__(
        self,
        stock: CombinedOptimizer,
        *,
        after_backward: Callable[[], None],
        before_change: Callable[[], None],
        before_read: Callable[[], None],
        after_load: Callable[[], None],
        beside: Sequence[SplitTableBatchedEmbeddingBagsCodegen] = (),
    ) -> None:
        """
        Args:
            stock: the optimizer to wrap.
            after_backward: called by a step, before the kernels get their learning rate.
            before_change: applies what is pending.
            before_read: the same, and completes the state that a reader sees.
            after_load: the state has been overwritten.
            beside: kernels that follow those of ``stock``.
        """
        self._after_backward = after_backward
        self._before_change = before_change
        self._before_read = before_read
        self._after_load = after_load
        self._beside = list(beside)
        super().__init__(list(stock.optimizers))

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Sync what is due, then TorchRec's, which sets the kernels' learning rate."""
        self._after_backward()
        super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        """Sync what is due, then TorchRec's, which sets the kernels' learning rate."""
        self._after_backward()
        super().step(closure)

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:
        """The complete state; reading it is a sync point."""
        self._before_read()
        return super().state

    def post_load_state_dict(self) -> None:
        """Called by TorchRec after it has loaded a state dict."""
        super().post_load_state_dict()
        self._after_load()

    def set_optimizer_step(self, step: int) -> None:
        """Sync what is pending, then set the iteration."""
        self._before_change()
        super().set_optimizer_step(step)
        for tbe in self._beside:
            tbe.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Sync what is pending, then change the running kernels."""
        self._before_change()
        super().update_hyper_parameters(params_dict)
        for tbe in self._beside:
            tbe.update_hyper_parameters(params_dict)
