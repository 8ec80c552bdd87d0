"""The sections of a config of a small sequence model, for whoever trains one."""

from typing import Any

SEQUENCES: dict[str, Any] = {
    "data": {"kind": "synthetic_sequences", "num_items": 60, "num_clusters": 5, "max_length": 12},
    "model": {
        "kind": "sequence",
        "dim": 8,
        "max_length": 8,
        "num_blocks": 1,
        "num_negatives": 4,
        "loss_mean": "samples",
    },
}
"""The data, and a model of one block."""
