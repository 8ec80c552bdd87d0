"""Fused parameters from the user's optimizer: this package's, FBGEMM's or one per parameter."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer as TorchOptimizer
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_2dsp._compat.fbgemm import HAS_ROW_WISE_MOMENT, EmbOptimType, needs_rule
from torchrec_2dsp._compat.torchrec import (
    InBackwardOptimizers,
    in_backward_optimizers,
)
from torchrec_2dsp.errors import ConfigError, UnsupportedError
from torchrec_2dsp.optim import (
    FROM_MESH,
    FromMesh,
    MomentScaledRowWiseAdaGrad,
    MomentScaledRowWiseAdaGradOptimizer,
)
from torchrec_2dsp.plan.parameter_sharding import (
    CHANGES_ALL_ROWS,
    FROM_ROW_GRADIENTS,
    WITH_ROW_WISE_MOMENT,
    RowStorage,
    base_type,
    fused_type_of,
)
from torchrec_2dsp.plan.plan2d import ModulePlan2D
from torchrec_2dsp.plan.sync import GradientSync, SyncedRows, WeightSync
from torchrec_2dsp.shard.kernels import MOMENT_SCALE, OWN_PARAMS, ROUNDING_SEED

Optimizer = MomentScaledRowWiseAdaGrad | EmbOptimType

ON_CPU = frozenset(
    {
        EmbOptimType.EXACT_SGD,
        EmbOptimType.EXACT_ADAGRAD,
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
    }
)
"""The optimizers in FBGEMM's CPU kernels; `needs_rule` tells which others have rules on tensors."""

_IGNORED_ON_CPU = ("weight_decay", "max_norm")
_ONLY_ON_CUDA = ("extra_optimizer_config", "optimizer_state_dtypes", "weight_decay_mode")

_ADAMS = frozenset(HAS_ROW_WISE_MOMENT)
_WITHOUT_DECAY = frozenset({EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD})
_USED_BY = {
    "momentum": frozenset({EmbOptimType.LARS_SGD}),
    "eta": frozenset({EmbOptimType.LARS_SGD}),
    "beta1": _ADAMS,
    "beta2": _ADAMS,
    "weight_decay": frozenset(EmbOptimType) - _WITHOUT_DECAY,
    "max_norm": frozenset({EmbOptimType.EXACT_ROWWISE_ADAGRAD}),
}
"""The optimizers that use an argument; FBGEMM accepts it for all of them."""

_NOT_FUSED = {
    "amsgrad": "",
    "betas": "give beta1 and beta2, ",
    "dampening": "",
    "initial_accumulator_value": "",
    "lr_decay": "use a schedule of learning rates, ",
    "maximize": "negate the loss, ",
    "nesterov": "",
}
"""Arguments of torch's optimizers that FBGEMM lacks, and what to do instead."""


def stock_params(
    optimizer: Optimizer | None, fused_params: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return fused parameters in the user's units, without those unknown to FBGEMM."""
    if optimizer is None:
        return fused_params
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer={optimizer!r} is no fused optimizer; give one of FBGEMM's EmbOptimType or "
            "of this package, or fused_params, a dict"
        )
    if fused_params and "optimizer" in fused_params:
        raise ConfigError(
            f"both optimizer={optimizer!r} and fused_params['optimizer'] are given; give one"
        )
    if isinstance(optimizer, EmbOptimType):
        return {**(fused_params or {}), "optimizer": optimizer}
    for name in ("learning_rate", "eps"):
        if name in (fused_params or {}):
            raise ConfigError(
                f"both {optimizer!r} and fused_params[{name!r}] are given; leave out the latter"
            )
    return {
        **(fused_params or {}),
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": optimizer.lr,
        "eps": optimizer.eps,
    }


def sorted_out(
    first: Optimizer | dict[str, Any] | None, fused_params: dict[str, Any] | None
) -> tuple[Optimizer | None, dict[str, Any] | None]:
    """Return optimizer and fused parameters; the latter may come first, as in TorchRec."""
    if not isinstance(first, dict):
        return first, fused_params
    if fused_params is not None:
        raise ConfigError(
            f"fused parameters are given twice: {first!r} and {fused_params!r}; give one of the two"
        )
    return None, first


def params_for_plan(
    params: dict[str, Any] | None, optimizer: Optimizer | None, plan: ModulePlan2D
) -> dict[str, Any]:
    """Return a sharder's fused parameters, completed by the plan."""
    params = dict(params or {})
    if isinstance(optimizer, MomentScaledRowWiseAdaGrad):
        params[MOMENT_SCALE] = _resolved(optimizer.moment_scale, plan)
    if keeps_exact_copies(plan):
        # By default FBGEMM rounds 16-bit tables at random, differently on each rank.
        params.setdefault("stochastic_rounding", False)
    return params


def params_without_optimizer(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return fused parameters for frozen tables: plain SGD, which has no state."""
    of_optimizer = {*_USED_BY, *_ONLY_ON_CUDA, *OWN_PARAMS, "stochastic_rounding"}
    others = {name: value for name, value in params.items() if name not in of_optimizer}
    return {**others, "optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.0}


def keeps_exact_copies(plan: ModulePlan2D) -> bool:
    """Return whether equal updates keep copies of rows equal."""
    exact_groups = isinstance(plan.sync, GradientSync) and plan.mesh.num_groups > 1
    return exact_groups or any(table.hot_set is not None for _, table in plan.tables())


def is_data_parallel(plan: ModulePlan2D, table: str) -> bool:
    """Return whether every rank holds the whole table."""
    is_planned = table in plan
    return is_planned and base_type(plan[table].sharding_type) == ShardingType.DATA_PARALLEL.value


class _TrainedTable(NamedTuple):
    """A table with its fused optimizer."""

    name: str
    optimizer: EmbOptimType
    own_arguments: Mapping[str, Any]
    """The arguments that come with the optimizer."""
    arguments: Mapping[str, Any]
    """These and the sharder's arguments."""
    data_type: DataType


def _trained_tables(module: nn.Module, params: dict[str, Any]) -> Iterator[_TrainedTable]:
    """Yield each table with its fused optimizer, by TorchRec's precedence."""
    of_kind = "embedding_bag_configs", "embedding_configs"
    configs = [config for name in of_kind for config in getattr(module, name, list)()]
    data_types = {config.name: config.data_type for config in configs}
    for name, param in module.named_parameters():
        table, in_backward = table_of(name), in_backward_optimizers(param)
        optimizer, arguments = params.get("optimizer", EmbOptimType.EXACT_SGD), params
        if in_backward is not None:
            arguments = in_backward.kwargs[0]
            kind = in_backward.classes[0]
            optimizer = arguments["optimizer"] if "optimizer" in arguments else fused_type_of(kind)
        if optimizer is not None:
            data_type = data_types.get(table, DataType.FP32)
            yield _TrainedTable(table, optimizer, arguments, {**params, **arguments}, data_type)


def check_optimizers(
    module: nn.Module, params: dict[str, Any], plan: ModulePlan2D, device_type: str
) -> None:
    """Raise if a table's optimizer can't run on this device, or not from row gradients."""
    _check_output_types(module, params, plan)
    for trained in _trained_tables(module, params):
        table, optimizer, arguments = trained.name, trained.optimizer, trained.arguments
        if trained.data_type is DataType.BF16:
            what = f"data_type={DataType.BF16!r} of table {table!r}"
            _check_rule(what, trained, "use FP32 or FP16")
        _check_arguments(optimizer, trained.own_arguments, device_type)
        if "max_gradient" in arguments and not arguments.get("gradient_clipping"):
            raise ConfigError(
                f"max_gradient={arguments['max_gradient']} does nothing without "
                "gradient_clipping=True; give both or none"
            )
        _check_single_rows(table, optimizer, plan)
        _check_rounding(trained, plan)
        if getattr(plan.get(table), "stored_as", RowStorage.PLAIN) is RowStorage.INT8:
            _check_eight_bits(trained, plan)
        if needs_rule(optimizer, device_type):
            if unknown := _unknown_to_rules(optimizer, arguments):
                raise UnsupportedError(
                    f"{unknown[0]} is unknown to {_name(optimizer)} on a CPU; leave it out, or "
                    "train on CUDA"
                )
        elif device_type == "cpu" and optimizer not in ON_CPU:
            raise UnsupportedError(
                f"FBGEMM has no CPU kernel for {_name(optimizer)}; use one of "
                f"{_names(ON_CPU | _ADAMS)}"
            )
        sends_touched = isinstance(plan.sync, WeightSync) and plan.sync.rows is SyncedRows.TOUCHED
        if optimizer in CHANGES_ALL_ROWS and sends_touched and plan.mesh.num_groups > 1:
            raise UnsupportedError(
                f"{_name(optimizer)} changes rows that no batch touched, which WeightSync wouldn't "
                "send; use WeightSync(rows='all')"
            )
        by_row = keeps_exact_copies(plan) or is_data_parallel(plan, table)
        if by_row and optimizer not in FROM_ROW_GRADIENTS:
            raise UnsupportedError(
                f"{_name(optimizer)} can't be updated from row gradients, which GradientSync, "
                "hot rows and data-parallel tables need; use WeightSync without hot rows and "
                f"other sharding types, or one of {_names(FROM_ROW_GRADIENTS)}"
            )


def _check_output_types(module: nn.Module, params: dict[str, Any], plan: ModulePlan2D) -> None:
    """Refuse several output types in one exchange, which would misread one as the other."""
    firsts: dict[str, tuple[str, str]] = {}
    for trained in _trained_tables(module, params):
        table = trained.name
        if table not in plan or is_data_parallel(plan, table):
            continue
        default = trained.arguments.get("output_dtype", DataType.FP32)
        own = table, (plan[table].output_dtype or default).name
        first = firsts.setdefault(plan[table].sharding_type, own)
        if first[1] != own[1]:
            raise UnsupportedError(
                f"tables {first[0]!r} and {table!r} have output_dtype {first[1]} and {own[1]}, but "
                "are sharded alike; give them one"
            )


def _unknown_to_rules(optimizer: EmbOptimType, arguments: Mapping[str, Any]) -> list[str]:
    """Return the arguments that rules on tensors would ignore."""
    unknown = _ONLY_ON_CUDA if optimizer in _ADAMS else (*_ONLY_ON_CUDA, *_IGNORED_ON_CPU)
    return [f"{name}={arguments[name]!r}" for name in unknown if arguments.get(name)]


def _check_eight_bits(trained: _TrainedTable, plan: ModulePlan2D) -> None:
    """Refuse settings that can't train rows in 8 bits, which rules on tensors update."""
    given = _unknown_to_rules(trained.optimizer, trained.arguments)
    if trained.optimizer not in FROM_ROW_GRADIENTS:
        given.append(_name(trained.optimizer))
    if trained.data_type is not DataType.FP32:
        given.append(f"data_type={trained.data_type!r}")
    if isinstance(plan.sync, WeightSync) and plan.mesh.num_groups > 1:
        given.append("WeightSync")
    if given:
        raise UnsupportedError(
            f"table {trained.name!r} is stored_as='int8', which isn't possible with "
            f"{' and '.join(given)}; change one of them"
        )


def _check_single_rows(table: str, optimizer: EmbOptimType, plan: ModulePlan2D) -> None:
    """Refuse one-row shards beside others; TorchRec takes their second moment for a table's."""
    spec = plan[table].sharding_spec if table in plan else None
    rows = {shard.shard_sizes[0] for shard in getattr(spec, "shards", None) or ()}
    if optimizer in WITH_ROW_WISE_MOMENT and 1 in rows and len(rows) > 1:
        raise UnsupportedError(
            f"table {table!r} has a shard of one row beside others, which TorchRec can't save with "
            f"{_name(optimizer)}; make it table-wise, or choose another optimizer"
        )


def _check_rounding(trained: _TrainedTable, plan: ModulePlan2D) -> None:
    """Refuse what rules on tensors can't round at random; FBGEMM would round copies differently."""
    table, arguments = trained.name, trained.arguments
    is_random, seed = arguments.get("stochastic_rounding"), arguments.get(ROUNDING_SEED)
    if table in plan and plan[table].stochastic_rounding is not None:
        is_random = plan[table].stochastic_rounding
    elif seed is not None and not is_random:
        raise ConfigError(f"rounding_seed={seed!r} does nothing without stochastic_rounding=True")
    if seed is not None and type(seed) is not int:
        raise ConfigError(f"rounding_seed={seed!r} is no seed; use an integer")
    if is_random and trained.data_type is not DataType.FP32:
        _check_rule(f"stochastic_rounding of table {table!r}", trained, "leave it out")


def _check_rule(what: str, trained: _TrainedTable, remedy: str) -> None:
    """Refuse an optimizer or arguments for which there is no update rule on tensors."""
    given = _unknown_to_rules(trained.optimizer, trained.arguments)
    if given or trained.optimizer not in FROM_ROW_GRADIENTS:
        raise UnsupportedError(
            f"{what} isn't possible with {' and '.join([_name(trained.optimizer), *given])}, "
            f"because rules on tensors update it; {remedy}, or use one of "
            f"{_names(FROM_ROW_GRADIENTS)}"
        )


def _check_arguments(
    optimizer: EmbOptimType, arguments: Mapping[str, Any], device_type: str
) -> None:
    """Refuse arguments that FBGEMM would ignore or misread."""
    for name, value in arguments.items():
        if name in _NOT_FUSED:
            raise UnsupportedError(
                f"{name}={value!r} is unknown to FBGEMM's fused optimizers; {_NOT_FUSED[name]}"
                "leave it out"
            )
        if not value:
            continue
        if device_type == "cpu" and name in _IGNORED_ON_CPU and optimizer not in _ADAMS:
            raise UnsupportedError(
                f"{name}={value} does nothing in FBGEMM's CPU kernels; leave it out, or train on "
                "CUDA"
            )
        if optimizer not in _USED_BY.get(name, {optimizer}):
            raise UnsupportedError(
                f"{name}={value} does nothing in FBGEMM's fused {_name(optimizer)}; leave it out, "
                f"or use one of {_names(_USED_BY[name])}"
            )


def _name(optimizer: EmbOptimType) -> str:
    return f"EmbOptimType.{optimizer.name}"


def _names(optimizers: frozenset[EmbOptimType]) -> str:
    return ", ".join(sorted(_name(optimizer) for optimizer in optimizers))


def _resolved(scale: float | FromMesh, plan: ModulePlan2D) -> float:
    """Return the moment scale under the plan's mesh and sync config."""
    if isinstance(plan.sync, GradientSync):
        if not isinstance(scale, FromMesh) and scale != 1.0:
            raise ConfigError(
                f"moment_scale={scale} with GradientSync, whose moments are exact; leave it at "
                "FROM_MESH or use WeightSync"
            )
        return 1.0
    return float(plan.mesh.num_groups) if isinstance(scale, FromMesh) else float(scale)


@contextmanager
def stock_optimizer_classes(module: nn.Module, plan: ModulePlan2D) -> Iterator[None]:
    """Show TorchRec a class that it knows for parameters with our optimizer class.

    TorchRec also edits the parameters' optimizer arguments in place; everything is restored.
    """
    saved: list[tuple[nn.Parameter, InBackwardOptimizers]] = []
    for param in module.parameters():
        original = in_backward_optimizers(param)
        if original is None:
            continue
        saved.append((param, original))
        classes, kwargs = list(original.classes), [dict(entry) for entry in original.kwargs]
        for index, kind in enumerate(classes):
            if issubclass(kind, MomentScaledRowWiseAdaGradOptimizer):
                classes[index] = RowWiseAdagrad
                kwargs[index].setdefault("eps", 1e-8)
                scale = kwargs[index].get(MOMENT_SCALE, FROM_MESH)
                kwargs[index][MOMENT_SCALE] = _resolved(scale, plan)
            else:
                # A parameter's own optimizer overrides the sharder's, including its scale.
                kwargs[index] = {**_rates_of(kind), **kwargs[index], MOMENT_SCALE: 1.0}
        InBackwardOptimizers(classes, kwargs).attach_to(param)
    try:
        yield
    finally:
        for param, original in saved:
            original.attach_to(param)


def _rates_of(kind: type[TorchOptimizer]) -> dict[str, float]:
    """Return an optimizer class's default rates, which differ from FBGEMM's."""
    arguments = signature(kind).parameters
    defaults = {name: arguments[name].default for name in ("lr", "eps") if name in arguments}
    return {name: rate for name, rate in defaults.items() if isinstance(rate, float)}


def table_of(parameter: str) -> str:
    """Return the table that owns a parameter such as ``embedding_bags.t0.weight``, or nothing."""
    return f".{parameter}".split(".")[-2]
