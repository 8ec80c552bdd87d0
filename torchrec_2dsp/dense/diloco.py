"""`DiLoCo`: the outer optimizer of ranks that train by themselves for some steps."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from torchrec_2dsp.dense.local_dense import LocalDense
from torchrec_2dsp.errors import ConfigError


class DiLoCo(Optimizer):
    """Moves the weights that all ranks share by the mean of what each rank's own steps changed.

    The mean change takes the place of a gradient, in SGD with Nesterov momentum. It is the global
    optimizer that TorchRec's `SemisyncOptimizer` asks for: see `LocalDense` for an example.

    Reference: A. Douillard et al., DiLoCo: distributed low-communication training of language
    models, 2023 (arXiv 2311.08105); with a density below 1, A. Sarfi et al., SparseLoCo, 2025
    (arXiv 2508.15706).
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        dense: LocalDense,
        lr: float = 0.7,
        *,
        momentum: float = 0.9,
    ) -> None:
        """
        Args:
            params: of the dense part.
            dense: the model's wrapper, over whose ranks changes are averaged.
            lr: of the mean change; with 1 and no momentum, weights are averaged.
            momentum: what is left of earlier changes, below 1.
        """
        if lr <= 0 or not 0 <= momentum < 1:
            raise ConfigError(
                f"DiLoCo(lr={lr}, momentum={momentum}) can't be; use a rate above 0 and a momentum "
                "of 0 or more, below 1"
            )
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self._dense = dense
        for param in self._params():
            self.state[param]["shared"] = param.detach().clone()
            self.state[param]["momentum"] = torch.zeros_like(param)
        dense.before_apart(self._note_shared)

    @torch.no_grad()
    def _note_shared(self) -> None:
        """Keep the weights that all ranks have, as they are about to train by themselves."""
        for param in self._params():
            self.state[param]["shared"].copy_(param)

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def global_step(
        self, local_step: torch.Tensor, closure: Callable[[], float] | None = None
    ) -> None:
        """Let the ranks meet; `SemisyncOptimizer` calls it every ``num_local_steps`` steps.

        Args:
            local_step: how many steps there were.
            closure: is not called.

        Collectives:
            Those of `LocalDense.mean`.
        """
        params = self._params()
        changes = self._dense.mean([self.state[param]["shared"] - param for param in params])
        by_param = dict(zip(params, changes, strict=True))
        for group in self.param_groups:
            for param in group["params"]:
                state, change = self.state[param], by_param[param].to(param.dtype)
                state["momentum"].mul_(group["momentum"]).add_(change)
                change = change + group["momentum"] * state["momentum"]
                state["shared"].sub_(change, alpha=group["lr"])
                param.copy_(state["shared"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raise an error: ranks meet in `global_step`."""
        raise ConfigError(
            "DiLoCo is an outer optimizer; give it to TorchRec's SemisyncOptimizer, or call "
            "global_step every few steps"
        )
