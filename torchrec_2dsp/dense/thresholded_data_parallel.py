"""`ThresholdedDataParallel`: DDP that sends only the largest gradient elements."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrec_2dsp._compat.ddp import ddp_params, robust_hook
from torchrec_2dsp.codecs.rows import FlatCodec, Transport
from torchrec_2dsp.codecs.sparse import ThresholdRule
from torchrec_2dsp.dense.dense_parts import HookedDDP, at_backwards, have_gradients
from torchrec_2dsp.dense.gradient_sums import GradientReport, GradientRoute
from torchrec_2dsp.dense.preconditioner import Preconditioning
from torchrec_2dsp.dense.thresholded_gradients import ThresholdedGradients, ThresholdSettings
from torchrec_2dsp.errors import ConfigError, check_choice, check_count

_AUTO = "auto"


class ThresholdedDataParallel(HookedDDP):
    """Runs the dense part in DDP and sends its largest gradient elements.

    Unsent elements stay in a *residual* and are added to the next step's gradients: nothing is
    lost, but it comes late. Weights stay equal on all ranks, bit for bit. Training isn't exact:
    compare its quality with DDP's.

    Args:
        density: the share of each parameter's elements that a step sends, above 0; 1 sends all, by
            DDP's own arithmetic.
        warm_up: the number of first steps that are dense.
        values: wire format of the elements: fp32, bf16, fp16, int8 or int4.
        refresh: the number of steps between measurements of thresholds. With 1, a step sends about
            the requested share, with more it often sends less.
        exact_thresholds: measure thresholds with all elements rather than a sample.
        preconditioner: "adagrad" or "adam" lets each rank compute its update first, so that updates
            are sent and kept instead; let `torch.optim.SGD` apply them. "none" sends gradients.
        dense_below: parameters with fewer elements are sent whole.
        route: "gather", "owners", "dense", or "auto" for the one that sends least.
        bucket_cap_mb: DDP's bucket size.
        static_graph: as in DDP.
        find_unused_parameters: as in DDP.

    Reference: V. Gupta et al., Training recommender systems at scale: communication-efficient
    model and data parallelism, KDD 2021.
    """

    def __init__(
        self,
        density: float = 0.005,
        *,
        warm_up: int = 0,
        values: Transport | str = Transport.BF16,
        refresh: int = 1,
        exact_thresholds: bool = False,
        preconditioner: Preconditioning | str = Preconditioning.NONE,
        dense_below: int = 1_024,
        route: GradientRoute | str = _AUTO,
        bucket_cap_mb: float = 25,
        static_graph: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        owner = "ThresholdedDataParallel"
        if not 0 < density <= 1:
            raise ConfigError(
                f"{owner}(density={density!r}) is no share; use one above 0, at most 1"
            )
        check_count("warm_up", warm_up, 0, owner=owner)
        check_count("refresh", refresh, owner=owner)
        check_count("dense_below", dense_below, 0, owner=owner)
        for name, value, choices in (
            ("values", values, Transport),
            ("route", route, (_AUTO, *GradientRoute)),
            ("preconditioner", preconditioner, Preconditioning),
        ):
            check_choice(name, value, choices, owner=owner)
        self.settings = ThresholdSettings(
            density=float(density),
            warm_up=warm_up,
            dense_below=dense_below,
            values=FlatCodec(Transport(values).codec),
            rule=ThresholdRule(refresh=refresh, is_exact=exact_thresholds),
            route=None if route == _AUTO else GradientRoute(route),
            preconditioner=Preconditioning(preconditioner),
        )
        super().__init__(
            str(self.settings),
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
        )
        self._gradients: ThresholdedGradients | None = None
        self._params: list[nn.Parameter] = []

    def hook_into(
        self, ddp: DistributedDataParallel, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """Let DDP send entries."""
        names = {id(param): name for name, param in ddp.module.named_parameters()}
        self._gradients = ThresholdedGradients(self.settings, names, group)
        self._params = list(ddp_params(ddp).values())
        ddp.register_comm_hook(None, robust_hook(ddp, self._gradients.reduce))
        at_backwards(ddp, self._begin_backward)

    def over_copies(
        self,
        names: Mapping[int, str],
        copies: dist.ProcessGroup,
        everyone: dist.ProcessGroup,
        device: torch.device,
    ) -> ThresholdedGradients:
        """Return the object that sums gradients of parameters that ``copies`` have, without DDP."""
        self._has_model = True
        self._gradients = ThresholdedGradients(self.settings, names, copies, everyone, device)
        return self._gradients

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise if a state has residuals of parameters that this rank doesn't have."""
        names = self._gradients.names if self._gradients else set[str]()
        residuals: Mapping[str, torch.Tensor] = state.get("residuals", {})
        lost = sorted(name for name in residuals.keys() - names if residuals[name].any())
        if lost:
            raise ConfigError(
                f"it holds what {lost[0]!r} hasn't sent yet, and that parameter is on other ranks "
                "now; save after a step that follows flush()"
            )

    def _begin_backward(self, is_reduced: bool) -> None:
        """Tell a step's first batch from those that add to it."""
        assert self._gradients is not None
        self._gradients.begin_batch(is_first=not have_gradients(self._params))

    @property
    def total(self) -> GradientReport:
        """Everything that this rank has sent so far."""
        return self._gradients.total if self._gradients else GradientReport()

    def residual_norm(self) -> float:
        """Return the Euclidean norm over this rank's residuals."""
        return self._gradients.residual_norm() if self._gradients else 0.0

    def flush(self) -> None:
        """Make the next step dense, residuals included.

        If a rank calls it, all ranks do so. Afterwards no residual is left: for a checkpoint
        without a `TrainState`, or for the end of training.
        """
        if self._gradients:
            self._gradients.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals, thresholds and moments; a `TrainState` stores them."""
        return self._gradients.state_dict() if self._gradients else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's state."""
        self.load_rank_states([state])

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore several ranks' summed residuals; there may be none."""
        if self._gradients:
            self._gradients.load_rank_states([state for state in states if state])
