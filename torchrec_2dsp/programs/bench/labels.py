"""Describe workloads, and label the settings of several results."""

from collections import Counter
from collections.abc import Sequence
from typing import cast

from torchrec_2dsp.programs.bench.config import BenchConfig
from torchrec_2dsp.programs.bench.results import BenchResult
from torchrec_2dsp.programs.bench.statistics import config_of
from torchrec_2dsp.programs.data.synthetic import SyntheticConfig
from torchrec_2dsp.programs.data.synthetic_sequences import SyntheticSequencesConfig
from torchrec_2dsp.programs.models.sequence import SequenceModelConfig


def setting_labels(results: Sequence[BenchResult]) -> list[str]:
    """Label each setting by its ranks and its place; only repeated runs are numbered."""
    plain_labels = [
        f"{result.setting.hosts}x{result.setting.ranks_per_host}, {place}"
        for result, place in zip(results, places(results), strict=True)
    ]
    return [
        f"{label}, run {plain_labels[: index + 1].count(label)}"
        if plain_labels.count(label) > 1
        else label
        for index, label in enumerate(plain_labels)
    ]


def places(results: Sequence[BenchResult]) -> list[str]:
    """Return each result's network, and its workload if that isn't always the same.

    Titles distinguish workloads where they differ. Where different workloads would still share a
    name, they are numbered.
    """
    titles = {result.setting.title for result in results}
    titled_places = [
        result.setting.network + (f", {result.setting.title}" if len(titles) > 1 else "")
        for result in results
    ]
    configs = [config_of(result) for result in results]
    workloads = [_workload_id(config) for config in configs]
    num_workloads = Counter(place for place, _ in set(zip(titled_places, workloads, strict=True)))
    if max(num_workloads.values()) == 1:
        return titled_places
    numbers = {workload: number for number, workload in enumerate(dict.fromkeys(workloads), 1)}
    return [
        f"{place}, workload {numbers[workload]}"
        for place, workload in zip(titled_places, workloads, strict=True)
    ]


def _workload_id(config: BenchConfig) -> str:
    """Return a text that two configs share if they train the same model on the same data."""
    model = f"{config.model.model_dump_json(exclude={'seed'})}, {config.schedule.batch_size}"
    return f"{config.data.model_dump_json(exclude={'seed'})}, {model}"


def workload_text(config: BenchConfig) -> str:
    """Describe the model and its data."""
    samples = f"{config.schedule.batch_size:,} samples per rank and step"
    if isinstance(config.model, SequenceModelConfig):
        model, data = config.model, cast(SyntheticSequencesConfig, config.data)
        return (
            f"a transformer of {model.num_blocks} blocks of dimension {model.dim} over sequences "
            f"of {_span((data.min_length, data.max_length))} items, {data.mean_length:.1f} in the "
            f"mean, of which {model.max_length} are used; {data.num_items:,} items, Zipf exponent "
            f"{data.skew:g}; {model.num_negatives} negatives; {samples}"
        )
    data = cast(SyntheticConfig, config.data)
    features, dim = data.features, config.model.dim
    rows = [feature.num_rows for feature in features]
    ids = [count for feature in features for count in (feature.min_ids, feature.max_ids)]
    return (
        f"{config.model.kind.upper()} with {len(features):,} tables of {_span(rows)} rows "
        f"({sum(rows):,} in all, {sum(rows) * dim * 4 / 1e6:,.0f} MB in fp32), "
        f"Zipf exponent {_span([feature.skew for feature in features])}, "
        f"{_span(ids)} ids per sample and table "
        f"({sum(feature.mean_ids for feature in features):,g} per sample), dimension {dim}, "
        f"{data.num_dense} dense features; {samples}"
    )


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
