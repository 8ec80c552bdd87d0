"""`PlannedSection`: a section of a config that describes a model, and what its planner may do."""

from typing import Annotated

from pydantic import AfterValidator, Field

from torchrec_2dsp.plan.parameter_sharding import type_2d
from torchrec_2dsp.programs.config.section import Section


def _check_types(types: tuple[str, ...]) -> tuple[str, ...]:
    for name in types:
        type_2d(name)
    return types


ShardingTypes = Annotated[tuple[str, ...], AfterValidator(_check_types)]
"""Names of sharding types, TorchRec's or their 2D forms."""


class PlannedSection(Section):
    """A model, and the sharding types of its tables."""

    sharding_types: ShardingTypes = Field(default=("table_wise", "row_wise"), min_length=1)
    """The types that the planner may choose from, TorchRec's or their 2D forms."""
