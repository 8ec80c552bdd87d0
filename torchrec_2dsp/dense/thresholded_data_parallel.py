"""`ThresholdedDataParallel`: DDP that sends only the largest gradient elements."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardingEnv

from torchrec_2dsp._compat.ddp import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    data_parallel_module,
    wrapped_module,
)
from torchrec_2dsp.codecs.rows import FlatCodec, Transport
from torchrec_2dsp.codecs.sparse import ThresholdRule
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.dense.dense_parts import (
    at_backwards,
    check_stepped_later,
    ddp_params,
    group_of,
    have_gradients,
)
from torchrec_2dsp.dense.gradient_sums import GradientReport, GradientRoute
from torchrec_2dsp.dense.preconditioner import Preconditioning
from torchrec_2dsp.dense.thresholded_gradients import ThresholdedGradients, ThresholdSettings
from torchrec_2dsp.errors import ConfigError

_AUTO = "auto"


class ThresholdedDataParallel(DataParallelWrapper):
    """Runs the dense part in DDP and sends its largest gradient elements.

    What isn't sent stays in a *residual* and is added to the next step's gradients: nothing is
    lost, but it comes late. Weights stay equal on all ranks, bit for bit. Training isn't exact:
    compare its quality with DDP's.

    Args:
        density: share of each parameter's elements that a step sends, above 0; 1 sends all, by
            DDP's own arithmetic.
        warm_up: first steps that are dense.
        values: wire format of the elements: fp32, bf16, fp16, int8 or int4.
        refresh: interval in steps at which thresholds are measured. 1 sends about the share
            asked for, more often sends less.
        exact_thresholds: measure thresholds with all elements rather than a sample.
        preconditioner: "adagrad" or "adam" lets each rank compute its update first, so that updates
            are what is sent and left; let `torch.optim.SGD` apply them. "none" sends gradients.
        dense_below: parameters with fewer elements are sent whole.
        route: "gather", "owners", "dense", or "auto" for the one that sends least.
        bucket_cap_mb: DDP's bucket size.
        static_graph: as in DDP.
        find_unused_parameters: as in DDP.

    Example::

        dense = tdsp.ThresholdedDataParallel(density=0.005, warm_up=500)
        model = tdsp.ModelParallel2D(
            model, plan=plan, sharders=sharders, data_parallel_wrapper=dense
        )

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
        bucket_cap_mb: int = 25,
        static_graph: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        _check(0 < density <= 1, f"density={density!r} is no share; use one above 0, at most 1")
        _check_count("warm_up", warm_up, 0)
        _check_count("refresh", refresh, 1)
        _check_count("dense_below", dense_below, 0)
        names = [way.value for way in Transport]
        _check(values in names, f"values={values!r} is no transport; use one of {', '.join(names)}")
        routes = [way.value for way in GradientRoute]
        _check(
            route == _AUTO or route in routes,
            f"route={route!r} is unknown; use one of {', '.join([_AUTO, *routes])}",
        )
        rules = [rule.value for rule in Preconditioning]
        _check(
            preconditioner in rules,
            f"preconditioner={preconditioner!r} is unknown; use one of {', '.join(rules)}",
        )
        self.settings = ThresholdSettings(
            density=float(density),
            warm_up=warm_up,
            dense_below=dense_below,
            values=FlatCodec(Transport(values).codec),
            rule=ThresholdRule(refresh=refresh, is_exact=exact_thresholds),
            route=None if route == _AUTO else GradientRoute(route),
            preconditioner=Preconditioning(preconditioner),
        )
        self._wrapper = DefaultDataParallelWrapper(
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
        )
        self._gradients: ThresholdedGradients | None = None
        self._params: list[nn.Parameter] = []

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wrap the dense part; TorchRec calls it.

        Collectives:
            An agreement on the settings, and DDP's parameter broadcast.
        """
        group = group_of(env)
        with agreeing(group) as facts:
            self.check_free()
            check_stepped_later(wrapped_module(dmp), "ThresholdedDataParallel")
            facts["the settings of ThresholdedDataParallel"] = str(self.settings)
        self._wrapper.wrap(dmp, env, device)
        ddp = data_parallel_module(dmp)
        if ddp is None:
            return
        names = {id(param): name for name, param in ddp.module.named_parameters()}
        self._gradients = ThresholdedGradients(self.settings, names, group)
        self._params = list(ddp_params(ddp).values())
        ddp.register_comm_hook(None, self._gradients.reduce)
        at_backwards(ddp, self._begin_backward)

    def check_free(self) -> None:
        """Raise if another model's gradients are added up in this way."""
        _check(
            self._gradients is None,
            "this ThresholdedDataParallel has a model already; make another one, because it "
            "keeps that model's residuals",
        )

    def over_copies(
        self, names: Mapping[int, str], copies: dist.ProcessGroup, everyone: dist.ProcessGroup
    ) -> ThresholdedGradients:
        """Return what adds up the gradients of parameters that ``copies`` have, without DDP."""
        self._gradients = ThresholdedGradients(self.settings, names, copies, everyone)
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
        """Let the next step be dense, residuals included.

        If a rank calls it, all ranks do so. Afterwards no residual is left: for a checkpoint
        without a `TrainState`, or for the end of the training.
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
        """Take over several ranks' summed residuals; there may be none."""
        if self._gradients:
            self._gradients.load_rank_states([state for state in states if state])


def _check(is_right: bool, message: str) -> None:
    if not is_right:
        raise ConfigError(f"ThresholdedDataParallel: {message}")


def _check_count(name: str, value: object, least: int) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _check(is_count, f"{name}={value!r} is no count; use {least} or more")
