"""`TableLine`: what an explanation says of one table."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.planner.search.choices import Choice

HEADINGS = (
    "table",
    "rows",
    "dim",
    "sharded",
    "exchange",
    "hot rows",
    "MB",
    "ms",
    "instead",
    "+ ms",
)
"""The headings of `TableLine.cells`."""


@dataclass(frozen=True)
class TableLine:
    """One table of a plan."""

    name: str
    num_rows: int
    dim: int

    choice: Choice
    """How it is sharded, and how its rows travel."""

    hot_share: float
    """The share of the table's lookups that are of hot rows."""

    sent_bytes: float
    """Bytes that a rank sends in a step."""

    seconds: float
    """Seconds that the table alone adds to a step, without what is shared or hidden."""

    runner_up: Choice | None = None
    """The second best choice; `None` without any other, or where nobody looked."""

    lost_by_s: float = 0.0
    """How much longer the step would be with the second best choice, as the search rates steps."""

    is_once: bool = False
    """Whether it has one copy in the world, beside tables with one in each group."""

    @property
    def way(self) -> str:
        """How it is sharded, and how its rows travel, in words."""
        kind = self._kind
        return f"{kind}, {_exchange(self.choice)} exchange" if self.choice.message_type else kind

    @property
    def _kind(self) -> str:
        return _kind(self.choice) + (", one copy" if self.is_once else "")

    def cells(self) -> Sequence[str]:
        """All of it, in words."""
        choice, other = self.choice, self.runner_up
        return (
            self.name,
            f"{self.num_rows:,}",
            str(self.dim),
            self._kind,
            _exchange(choice) if choice.message_type else "-",
            f"{choice.num_hot:,} ({self.hot_share:.0%})" if choice.num_hot else "-",
            f"{self.sent_bytes / 1e6:.3f}",
            milliseconds(self.seconds),
            "-" if other is None else _in_place(choice, other),
            "-" if other is None else milliseconds(self.lost_by_s),
        )


def milliseconds(seconds: float) -> str:
    """Seconds in milliseconds, as reports show them."""
    return f"{1e3 * seconds:,.2f}"


def _exchange(choice: Choice) -> str:
    is_exact = choice.transport is Transport.FP32
    return choice.exchange.value + ("" if is_exact else f" {choice.transport.value}")


def _kind(choice: Choice) -> str:
    parts = f" / {choice.column_shards}" if choice.column_shards > 1 else ""
    return choice.kind.value.replace("_", " ") + parts


def _in_place(chosen: Choice, other: Choice) -> str:
    """The differences of another choice, in words."""
    exchange = _exchange(other)
    if other.kind is chosen.kind:
        return exchange
    return _kind(other) + ("" if exchange == "pooled" else f", {exchange}")
