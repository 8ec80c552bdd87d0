"""`ParameterConstraints2D`: what a user demands of a table, in TorchRec's words and ours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from torchrec.distributed.planner.types import ParameterConstraints

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan.parameter_sharding import Exchange

_Choice = TypeVar("_Choice", Exchange, Transport)


def members(
    kind: type[_Choice], name: str, values: "Sequence[_Choice | str] | _Choice | str | None"
) -> list[_Choice] | None:
    """The members that a user has named, by themselves or by their values.

    Args:
        kind: what they are.
        name: of the argument, for the error.
        values: one or several; `None` stays `None`.
    """
    if values is None:
        return None
    named = [values] if isinstance(values, kind | str) else values
    try:
        return [kind(value) for value in named]
    except ValueError as error:
        choices = ", ".join(repr(member.value) for member in kind)
        raise ConfigError(f"{name}={values!r}: use some of {choices}") from error


@dataclass
class ParameterConstraints2D(ParameterConstraints):
    """A `ParameterConstraints` that also says how rows travel, how many are hot, and how many
    copies there are.

    Example:
        >>> import torchrec_2dsp as tdsp
        >>> constraint = tdsp.ParameterConstraints2D(
        ...     sharding_types=["row_wise"], exchange=["row", "row_per_host"], hot_rows=0
        ... )
        >>> constraint.exchange
        [<Exchange.ROW: 'row'>, <Exchange.ROW_PER_HOST: 'row_per_host'>]
    """

    exchange: Sequence[Exchange | str] | None = None
    """The exchanges allowed for the table; `None` for all that its sharding types have."""

    transport: Sequence[Transport | str] | None = None
    """The ways in which its rows or vectors may travel; `None` for those of the planner."""

    hot_rows: int | None = None
    """How many of its hottest rows are on every rank: so many, or as many as pay with `None`."""

    num_groups: int | Literal["each"] | None = None
    """How many copies there are: 1, whose shards lie on all ranks of the world, or one in each of
    so many groups, which the mesh then has; one in each group of any mesh with "each", as many as
    are best with `None`."""

    def __post_init__(self) -> None:
        self.exchange = members(Exchange, "exchange", self.exchange)
        self.transport = members(Transport, "transport", self.transport)
        if not (self.num_groups in (None, "each") or self._counts_copies):
            raise ConfigError(
                f"num_groups={self.num_groups!r} is no number of copies; use 1 or more, or 'each'"
            )
        if self.hot_rows is not None and self.hot_rows < 0:
            raise ConfigError(f"hot_rows={self.hot_rows} is no number of rows; use 0 or more")

    @property
    def _counts_copies(self) -> bool:
        return isinstance(self.num_groups, int) and self.num_groups >= 1
