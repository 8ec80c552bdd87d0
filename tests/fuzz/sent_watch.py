"""What a rank sends of its dense gradients, and what it leaves out, as a run goes on."""

from typing import Any

import torch

import torchrec_2dsp as tdsp
from tests.fuzz.build import named_dense
from tests.fuzz.case import Case
from tests.fuzz.dense_wrappers import NotedLocalDense, whole
from tests.fuzz.seen import Seen
from tests.support.rank_device import copied
from torchrec_2dsp.dense.gradient_report import GradientReport


class SentWatch:
    """Notes both, where ranks choose what they send."""

    def __init__(self, case: Case, wrapper: Any, parallel: Any) -> None:
        """
        Args:
            case: says whether they choose.
            wrapper: that runs the dense part.
            parallel: the sharded model.
        """
        self._case, self._wrapper, self._parallel = case, wrapper, parallel
        self._is_on = case.dense.leaves_out
        self._applied: torch.Tensor | None = None
        self._before = GradientReport()

    def before_step(self) -> None:
        """The optimizer is about to use gradients."""
        if not (self._is_on and self._case.dense.kind == "thresholded"):
            return
        params = named_dense(self._parallel).values()
        # A shortcut that no rank used has no gradient.
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        self._applied = torch.cat([whole(grad) for grad in grads])

    def after_step(self, index: int, seen: Seen) -> None:
        """A training step is over.

        Args:
            index: of its action.
            seen: gets what was sent.
        """
        if not self._is_on:
            return
        if isinstance(self._wrapper, NotedLocalDense):
            met, self._wrapper.met = self._wrapper.met, None
            self._applied = None if met is None else copied(met)
        if self._applied is not None:
            seen.applied[index] = self._applied
        seen.sent[index] = self._wrapper.total - self._before
        self._before = self._wrapper.total

    def read(self, index: int, seen: Seen) -> None:
        """The state is read.

        Args:
            index: of the action.
            seen: gets what wasn't sent, unless ranks are apart.
        """
        if not self._is_on:
            return
        try:
            residuals = self._wrapper.state_dict()["residuals"]
        except tdsp.errors.SyncError:
            return
        params = named_dense(self._parallel).items()
        parts = [
            residuals.get(name, param.new_zeros(param.numel())).flatten() for name, param in params
        ]
        left_out = copied(residuals.get("all", torch.cat(parts)))
        seen.left_out[index] = left_out / self._case.world_size
