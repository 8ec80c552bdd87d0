"""Names for the settings of several results: ranks, network, title and workload."""

from collections import Counter
from collections.abc import Sequence

from torchrec_2dsp.programs.bench.config import BenchConfig
from torchrec_2dsp.programs.bench.results import BenchResult
from torchrec_2dsp.programs.bench.statistics import config_of
from torchrec_2dsp.programs.data.synthetic_sequences import SyntheticSequencesConfig

_NUM_ROWS_PART = 1


def setting_labels(results: Sequence[BenchResult]) -> list[str]:
    """A name for each setting: its ranks and its place; only repetitions of a run are numbered."""
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
    """The network of each result, and what was trained there if that isn't always the same.

    Titles say it where they differ. Where different workloads would still have one name, every
    name says how its workload differs from the others.
    """
    titles = {result.setting.title for result in results}
    titled_places = [
        result.setting.network + (f", {result.setting.title}" if len(titles) > 1 else "")
        for result in results
    ]
    configs = [config_of(result) for result in results]
    workloads = [_workload_id(config) for config in configs]
    if not _are_shared(titled_places, workloads):
        return titled_places
    parts = [_workload_parts(config) for config in configs]
    differing = [index for index, texts in enumerate(zip(*parts, strict=True)) if len({*texts}) > 1]
    # Numbers of rows are long, so they are the last thing to tell workloads apart by.
    without_num_rows = [index for index in differing if index != _NUM_ROWS_PART]
    named_places: list[str] = titled_places
    for shown in (without_num_rows, differing):
        named_places = [
            ", ".join([place, *(texts[index] for index in shown)])
            for place, texts in zip(titled_places, parts, strict=True)
        ]
        if not _are_shared(named_places, workloads):
            return named_places
    numbers = {workload: index + 1 for index, workload in enumerate(dict.fromkeys(workloads))}
    return [
        f"{place}, workload {numbers[workload]}"
        for place, workload in zip(named_places, workloads, strict=True)
    ]


def _workload_id(config: BenchConfig) -> str:
    """A text that two configs share if they train the same model on the same kind of data."""
    model = f"{config.model.model_dump_json(exclude={'seed'})}, {config.schedule.batch_size}"
    return f"{config.data.model_dump_json(exclude={'seed'})}, {model}"


def _workload_parts(config: BenchConfig) -> tuple[str, ...]:
    """The properties by which workloads are told apart, in words."""
    data = config.data
    if isinstance(data, SyntheticSequencesConfig):
        return (
            "sequences",
            f"{data.num_items:,} items",
            f"Zipf {data.skew:g}",
            f"{_span((data.min_length, data.max_length))} items per sequence",
            "sorted ids" if data.sorted_ids else "unsorted ids",
            f"dimension {config.model.dim}",
            f"{config.schedule.batch_size:,} samples per rank",
        )
    num_rows = sum(feature.num_rows for feature in data.features)
    skew = _span([feature.skew for feature in data.features])
    num_ids = _span([n for feature in data.features for n in (feature.min_ids, feature.max_ids)])
    return (
        f"{len(data.features):,} tables",
        f"{num_rows:,} rows",
        f"Zipf {skew}",
        f"{num_ids} {'id' if num_ids == '1' else 'ids'} per bag",
        "sorted ids" if data.sorted_ids else "unsorted ids",
        f"dimension {config.model.dim}",
        f"{config.schedule.batch_size:,} samples per rank",
    )


def _are_shared(names: Sequence[str], workloads: Sequence[str]) -> bool:
    """Whether some name stands for several workloads."""
    pairs = set(zip(names, workloads, strict=True))
    return max(Counter(name for name, _ in pairs).values()) > 1


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
