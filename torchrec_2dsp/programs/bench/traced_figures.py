"""`traced_figures`: what the traced steps of all ranks say of a contestant."""

from collections.abc import Sequence
from typing import Any

from torchrec_2dsp.programs.bench.dealt import compute_times, dealt_samples
from torchrec_2dsp.programs.bench.trace import mean_phases
from torchrec_2dsp.programs.bench.traffic import (
    mean_dense,
    mean_encoded,
    mean_traffic,
    mean_travel,
)
from torchrec_2dsp.programs.bench.worker import Traced


def traced_figures(traced: Sequence[Traced]) -> dict[str, Any]:
    """Fields of `ContestantResult`, by their names.

    Args:
        traced: of all ranks.
    """
    peaks = [rank.peak_memory_bytes for rank in traced if rank.peak_memory_bytes is not None]
    return {
        "phases": mean_phases([rank.phases for rank in traced]),
        "compute": compute_times([rank.compute_s for rank in traced]),
        "traffic": mean_traffic([rank.traffic for rank in traced]),
        "encoded": mean_encoded([rank.encoded for rank in traced]),
        "dense": mean_dense([rank.dense for rank in traced]),
        "row_travel": mean_travel([rank.row_travel for rank in traced]),
        "dealt": dealt_samples([rank.balance for rank in traced]),
        "peak_memory_bytes": max(peaks, default=None),
    }
