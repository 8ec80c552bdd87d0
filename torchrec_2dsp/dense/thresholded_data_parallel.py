"""`ThresholdedDataParallel`: dense gradients of which only the largest elements are sent."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardingEnv

from torchrec_2dsp._compat.data_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    data_parallel_module,
    data_parallel_tables,
)
from torchrec_2dsp.codecs.flat import FlatCodec
from torchrec_2dsp.codecs.threshold import ThresholdRule
from torchrec_2dsp.codecs.transport import Transport
from torchrec_2dsp.comms.agreement import agreeing
from torchrec_2dsp.dense.dense_parts import group_of
from torchrec_2dsp.dense.gradient_report import GradientReport
from torchrec_2dsp.dense.gradient_route import GradientRoute
from torchrec_2dsp.dense.table_gradients import TableGradients, TableSize
from torchrec_2dsp.dense.thresholded_gradients import ThresholdedGradients, ThresholdSettings
from torchrec_2dsp.errors import ConfigError

_AUTO = "auto"


class ThresholdedDataParallel(DataParallelWrapper):
    """Runs what isn't sharded in DDP, and sends the largest elements of its gradients.

    What isn't sent is kept in a *residual* and added to the gradients of the next step. So nothing
    is lost, and all of it comes late. Weights stay equal on all ranks, bit for bit. Training isn't
    exact: compare its quality with DDP's.

    A stock `DistributedModelParallel` takes it as well as `ModelParallel2D`. Of data-parallel
    tables the rows that a batch touches are sent, all and exactly.

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
        dense_below: int = 1_024,
        route: GradientRoute | str = _AUTO,
        bucket_cap_mb: int = 25,
        static_graph: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        """
        Args:
            density: the share of each parameter's elements that is sent in a step, above 0; with 1
                all are, by DDP's own arithmetic.
            warm_up: how many first steps are dense.
            values: how the elements that are sent travel: fp32, bf16, fp16, int8 or int4.
            refresh: every so many steps thresholds are measured. With 1, about as much is sent as
                asked; with more, often less.
            exact_thresholds: whether thresholds are measured with all elements, not with a sample.
            dense_below: parameters with fewer elements are sent as a whole.
            route: how sums are made: "gather", "owners", "dense", or "auto" for the one that sends
                least.
            bucket_cap_mb: the size of DDP's buckets.
            static_graph: as in DDP.
            find_unused_parameters: as in DDP.
        """
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
        self._settings = ThresholdSettings(
            density=float(density),
            warm_up=warm_up,
            dense_below=dense_below,
            values=FlatCodec(Transport(values).codec),
            rule=ThresholdRule(refresh=refresh, is_exact=exact_thresholds),
            route=None if route == _AUTO else GradientRoute(route),
        )
        self._wrapper = DefaultDataParallelWrapper(
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
        )
        self._gradients: ThresholdedGradients | None = None
        self._tables: list[TableGradients] = []
        self._params: list[nn.Parameter] = []

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wrap what isn't sharded; TorchRec calls it.

        Collectives:
            An agreement of all ranks on the settings, and DDP's broadcast of parameters.
        """
        group = group_of(env)
        with agreeing(group) as facts:
            _check(
                self._gradients is None,
                "this ThresholdedDataParallel has a model already; make another one, because it "
                "keeps that model's residuals",
            )
            facts["the settings of ThresholdedDataParallel"] = str(self._settings)
        self._wrapper.wrap(dmp, env, device)
        for tables, sizes in data_parallel_tables(dmp):
            by_parameter = {
                parameter: [TableSize(*size) for size in of_parameter]
                for parameter, of_parameter in sizes.items()
            }
            self._tables.append(TableGradients(by_parameter, tables.process_group or group))
            tables.register_comm_hook(None, self._tables[-1].reduce)
        ddp = data_parallel_module(dmp)
        if ddp is None:
            return
        names = {id(param): name for name, param in ddp.module.named_parameters()}
        self._gradients = ThresholdedGradients(self._settings, names, group)
        self._params = [
            param
            for name, param in ddp.module.named_parameters()
            if param.requires_grad and name not in ddp.parameters_to_ignore
        ]
        ddp.register_comm_hook(None, self._gradients.reduce)
        ddp.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, _: tuple[Any, ...]) -> None:
        """Tell the first batch of a step from those whose gradients are added to its own."""
        if module.training and torch.is_grad_enabled():
            assert self._gradients is not None
            grads = [param.grad for param in self._params]
            is_first = not any(grad is not None and grad.any() for grad in grads)
            self._gradients.begin_batch(is_first=is_first)

    @property
    def total(self) -> GradientReport:
        """What this rank has sent so far, rows of data-parallel tables included."""
        parts = [*self._tables, *([self._gradients] if self._gradients else [])]
        return sum((part.total for part in parts), GradientReport())

    def residual_norm(self) -> float:
        """The Euclidean norm of this rank's residuals."""
        return self._gradients.residual_norm() if self._gradients else 0.0

    def flush(self) -> None:
        """Let the next step be dense, and take along what earlier ones have left out.

        If a rank calls it, all ranks do so. Afterwards nothing is left out: for a checkpoint
        without a `TrainState`, or for the end of the training.
        """
        if self._gradients:
            self._gradients.flush()

    def state_dict(self) -> dict[str, Any]:
        """The residuals and thresholds of this rank; a `TrainState` stores them by itself."""
        return self._gradients.state_dict() if self._gradients else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of this rank."""
        self.load_rank_states([state])

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over the sum of the residuals of several ranks; there may be none."""
        if self._gradients:
            self._gradients.load_rank_states([state for state in states if state])


def _check(is_right: bool, message: str) -> None:
    if not is_right:
        raise ConfigError(f"ThresholdedDataParallel: {message}")


def _check_count(name: str, value: object, least: int) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _check(is_count, f"{name}={value!r} is no count; use {least} or more")
