"""How our plots look, and how they are written: the same byte for byte for the same numbers."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrec_2dsp.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart. Its yellow is hard to see on
# white, so it isn't here.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#333333", "#CC79A7", "#56B4E9", "#D55E00")
"""The colours of lines and marks."""
MARKERS = "osDv^<>"
"""The markers of lines that are told apart by more than their colour."""

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "hatch.linewidth": 1.2,
    "legend.frameon": False,
    # A dollar in a name is no formula.
    "text.parse_math": False,
    # Text stays text: smaller files, and found by searching.
    "svg.fonttype": "none",
    "svg.hashsalt": "torchrec_2dsp",
}


@contextmanager
def plotting() -> Iterator[None]:
    """Plot in our style, whatever the user's is, and restore the user's afterwards."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib, which is not installed; pip install 'torchrec-2dsp[report]', "
            "or do without plots"
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def save_plot(figure: "Figure", path: str | Path) -> None:
    """Write the SVG; its coordinates have two decimals, which are enough and take less room."""
    # Without a date and a version, which differ between two plots of the same numbers.
    metadata: dict[str, Any] = {"Date": None, "Creator": None}
    drawn = StringIO()
    figure.savefig(drawn, format="svg", facecolor="white", metadata=metadata)
    Path(path).write_text(_COORDINATES.sub(_with_two_decimals, drawn.getvalue()))


_COORDINATES = re.compile(r' (?:d|x|y|transform)="[^"]*"')


def _with_two_decimals(attribute: re.Match[str]) -> str:
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2f}", attribute[0])
