"""`workload_text`: what a benchmark trains, in words."""

from collections.abc import Sequence
from typing import cast

from torchrec_2dsp.programs.bench.config import BenchConfig
from torchrec_2dsp.programs.data.synthetic import SyntheticData
from torchrec_2dsp.programs.data.synthetic_sequences import SyntheticSequencesConfig
from torchrec_2dsp.programs.models.sequence import SequenceModelConfig


def workload_text(config: BenchConfig) -> str:
    """The model and its data, in words."""
    if isinstance(config.model, SequenceModelConfig):
        return _sequences(config, config.model)
    data = cast(SyntheticData, config.data)
    features, dim = data.features, config.model.dim
    rows = [feature.num_rows for feature in features]
    ids = [count for feature in features for count in (feature.min_ids, feature.max_ids)]
    return (
        f"{config.model.kind.upper()} with {len(features):,} tables of {_span(rows)} rows "
        f"({sum(rows):,} in all, {sum(rows) * dim * 4 / 1e6:,.0f} MB in fp32), "
        f"Zipf exponent {_span([feature.skew for feature in features])}, "
        f"{_span(ids)} ids per sample and table "
        f"({sum(feature.mean_ids for feature in features):,g} per sample), dimension {dim}, "
        f"{data.num_dense} dense features; "
        f"{config.schedule.batch_size:,} samples per rank and step"
    )


def _sequences(config: BenchConfig, model: SequenceModelConfig) -> str:
    data = cast(SyntheticSequencesConfig, config.data)
    return (
        f"a transformer of {model.num_blocks} blocks of dimension {model.dim} over sequences of "
        f"{_span((data.min_length, data.max_length))} items, {data.mean_length:.1f} in the mean, "
        f"of which {model.max_length} are used; {data.num_items:,} items, Zipf exponent "
        f"{data.skew:g}; {model.num_negatives} negatives; {config.schedule.batch_size:,} samples "
        "per rank and step"
    )


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
