"""Two names of one sharding type: the search's 2D form, and the stock one behind it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.distributed.types import ShardingType

from torchrec_2dsp.errors import PlanError
from torchrec_2dsp.plan.parameter_sharding import ProposedType, base_type, type_2d

TYPE_ORDER = {member.value: index for index, member in enumerate(ShardingType)}
"""TorchRec's order of its types, simplest placement first: the order in which ties are broken."""


def searched_type(sharding_type: str) -> str:
    """The name under which a planner searches a type: its 2D form.

    Data parallel keeps its name. It means the same in both worlds, a replica on every rank of
    the world, and TorchRec's planner accepts its dense kernel under no other name. `Plan2D`
    gives it the 2D form.

    Example:
        >>> from torchrec_2dsp.planner.torchrec.sharding_types import searched_type
        >>> searched_type("row_wise"), searched_type("2d_data_parallel")
        ('2d_row_wise', 'data_parallel')
    """
    if base_type(sharding_type) == ShardingType.DATA_PARALLEL.value:
        return ShardingType.DATA_PARALLEL.value
    return type_2d(sharding_type)


@contextmanager
def base_types(options: Sequence[ShardingOption]) -> Iterator[None]:
    """Let TorchRec's components see its own type names on ``options``, in place, meanwhile."""
    before = [option.sharding_type for option in options]
    try:
        for option in options:
            option.sharding_type = base_type(option.sharding_type)
        yield
    finally:
        for option, sharding_type in zip(options, before, strict=True):
            option.sharding_type = sharding_type


def proposed_type(options: Iterable[ShardingOption]) -> ProposedType | None:
    """Knows mesh and sync of a proposal; `None` if it is none of this package's proposers."""
    kinds = (option.sharding_type for option in options)
    return next((kind for kind in kinds if isinstance(kind, ProposedType)), None)


def base_constraints(
    constraints: Mapping[str, ParameterConstraints] | None,
) -> dict[str, ParameterConstraints] | None:
    """Copies of constraints that name types as TorchRec does, whichever name they were given.

    Example:
        >>> from torchrec.distributed.planner import ParameterConstraints
        >>> from torchrec_2dsp.planner.torchrec.sharding_types import base_constraints
        >>> made = base_constraints({"t": ParameterConstraints(sharding_types=["2d_row_wise"])})
        >>> made["t"].sharding_types
        ['row_wise']
    """
    if constraints is None:
        return None
    return {
        name: replace(constraint, sharding_types=_base_names(name, constraint.sharding_types))
        for name, constraint in constraints.items()
    }


def _base_names(table: str, sharding_types: Iterable[str] | None) -> list[str] | None:
    if sharding_types is None:
        return None
    try:
        return [base_type(sharding_type) for sharding_type in sharding_types]
    except PlanError as error:
        raise PlanError(f"constraints of table {table!r}: {error}") from error
