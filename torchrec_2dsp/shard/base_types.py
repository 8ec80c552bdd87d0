"""`ShowsBaseTypes`: a sharded module shows its plan with TorchRec's own sharding types."""

from dataclasses import replace
from typing import Any

from torchrec_2dsp.plan.parameter_sharding import ParameterSharding2D, TableType


class ShowsBaseTypes:
    """A sharded module whose tables are sorted by types that TorchRec's state dicts don't know."""

    @property
    def module_sharding_plan(self) -> Any:
        """What TorchRec makes state dicts by; it knows its own sharding types only."""
        return self._module_sharding_plan

    @module_sharding_plan.setter
    def module_sharding_plan(self, plan: dict[str, ParameterSharding2D]) -> None:  # pyright: ignore
        self._module_sharding_plan = {
            name: replace(table, sharding_type=TableType.of_name(table.sharding_type).base.value)
            for name, table in plan.items()
        }
