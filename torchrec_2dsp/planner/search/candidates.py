"""The search's candidates, from a model, its sharders and the user's constraints."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.cost.optimizer_state import optimizer_of, state_bytes_per_row
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.plan.parameter_sharding import base_type
from torchrec_2dsp.planner.search.allowed import allowed_kernels, choices_of, nothing_text
from torchrec_2dsp.planner.search.choices import Candidate


def candidates_of(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints] | None,
    workload: Workload,
    device: str,
    transports: Sequence[Transport] = (Transport.FP32,),
) -> list[Candidate]:
    """Every table of every module that has a sharder.

    Args:
        module: the unsharded model.
        sharders: say which types and kernels there are.
        constraints: per table.
        workload: what a step does with each.
        device: "cpu" or "cuda".
        transports: how rows may travel, where the constraints don't say it.

    Raises:
        PlanError: nothing is allowed for a table, or two tables share a name.
    """
    sharder_of = {sharder.module_type: sharder for sharder in sharders}
    tables = _Tables(constraints or {}, workload, device, transports)
    for path, part, sharder in _sharded_parts(module, sharder_of):
        params = cast(Any, sharder).fused_params or {}
        there = {
            (kind, kernel)
            for kind in sharder.sharding_types(device)
            for kernel in sharder.compute_kernels(kind, device)
        }
        for name, weight in sharder.shardable_parameters(part).items():
            tables.add(name, (path, part), weight, params, there, f"a {type(sharder).__name__}")
    return list(tables.candidates.values())


def candidates_of_options(
    options: Sequence[ShardingOption],
    fused_params: Mapping[str, Mapping[str, Any]],
    constraints: Mapping[str, ParameterConstraints] | None,
    workload: Workload,
    device: str,
) -> list[Candidate]:
    """Every table for which a TorchRec enumerator has found options.

    Args:
        options: say which types and kernels there are, under TorchRec's names or ours.
        fused_params: of the sharders, by TorchRec's key for a type of module.
        constraints: per table.
        workload: what a step does with each.
        device: "cpu" or "cuda".

    Raises:
        PlanError: nothing that is known is allowed for a table, or two tables share a name.
    """
    by_table: dict[str, list[ShardingOption]] = {}
    for option in options:
        by_table.setdefault(option.fqn, []).append(option)
    tables = _Tables(constraints or {}, workload, device)
    for options in by_table.values():
        there = {(base_type(option.sharding_type), option.compute_kernel) for option in options}
        params = fused_params.get(options[0].module_type_key, {})
        name, module, weight = options[0].name, options[0].module, options[0].tensor
        tables.add(name, module, weight, params, there, "what was enumerated")
    return list(tables.candidates.values())


@dataclass(frozen=True)
class _Tables:
    """Candidates so far, and what they are made of."""

    constraints: Mapping[str, ParameterConstraints]
    workload: Workload
    device: str
    transports: Sequence[Transport] = (Transport.FP32,)
    candidates: dict[str, Candidate] = field(default_factory=dict)
    _cold: dict[int, set[str]] = field(default_factory=dict)
    """The tables of each module that can't have hot rows, by the module's id."""

    def add(
        self,
        name: str,
        module: tuple[str, nn.Module],
        weight: Any,
        fused_params: Mapping[str, Any],
        there: Set[tuple[str, str]],
        sharded_by: str,
    ) -> None:
        """Another table, of which types and kernels ``there`` may be had."""
        path, part = module
        if name in self.candidates:
            raise PlanError(
                f"modules {self.candidates[name].path!r} and {path!r} both have a table {name!r}; "
                "the search tells tables apart by their names: rename one"
            )
        constraint = self.constraints.get(name)
        state = state_bytes_per_row(optimizer_of(weight, fused_params), weight.shape[1])
        work = replace(self.workload.table(name), state_bytes_per_row=float(state))
        kernels = {
            kind: kernel
            for kind, kernel in allowed_kernels(constraint, work, self.device).items()
            if (kind.value, kernel) in there
        }
        choices = choices_of(kernels, constraint, work, self.transports)
        if not choices:
            raise PlanError(nothing_text(name, constraint, sharded_by, self.device))
        is_said = getattr(constraint, "hot_rows", None) is not None
        if id(part) not in self._cold:
            self._cold[id(part)] = _always_cold(part)
        can_be_hot = not is_said and name not in self._cold[id(part)]
        self.candidates[name] = Candidate(
            path, weight, work, choices, kernels, constraint, can_be_hot
        )


def _sharded_parts(
    module: nn.Module, sharders: Mapping[type, ModuleSharder[nn.Module]], path: str = ""
) -> Iterator[tuple[str, nn.Module, ModuleSharder[nn.Module]]]:
    """Modules with a sharder, which takes all that is below them."""
    sharder = sharders.get(type(module))
    if sharder is not None:
        yield path, module, sharder
        return
    for name, child in module.named_children():
        yield from _sharded_parts(child, sharders, f"{path}.{name}" if path else name)


def _always_cold(part: nn.Module) -> set[str]:
    """Tables that can't have hot rows, as `shard` refuses them."""
    if isinstance(part, EmbeddingBagCollectionInterface):
        configs = part.embedding_bag_configs()
    elif isinstance(part, EmbeddingCollectionInterface):
        configs = part.embedding_configs()
    else:
        return set()
    users = Counter(feature for config in configs for feature in config.feature_names)
    return {
        config.name
        for config in configs
        if any(users[feature] > 1 for feature in config.feature_names)
    }
