"""A long program of two equal runs, one after the other, and what it takes of the machine.

    python -m tests.support.train_soak [--steps 5000] [--kind rows]

trains with evaluations, saves, records and scalars, and prints a row for every fifth of each run:
the medians of a rank's resident memory, threads, process groups and open files, the most of any
rank. It fails if one of them has grown from the second fifth of a run to its last, or from one run
to the next.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.ranks import RankPool
from tests.support.soak import Usage
from tests.support.train_runs import config_with
from torchrec_2dsp.programs.launch import keep_freed_memory
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.results import (
    RunFolder,
    StepsTrained,
    TensorBoardWatcher,
    TrainWatcher,
)

KINDS: dict[str, dict[str, Any]] = {
    "rows": {
        "sharding_types": ["row_wise"],
        "exchange": "row",
        "hot_rows": 8,
        "prefetch_rows": True,
    },
    "exact": {"num_groups": 2},
    "averaged": {"num_groups": 2, "sync": "WeightSync", "sync_policy": "every(3)"},
}
RUNS = ("first", "second")
NUM_PARTS = 5
SAMPLES_PER_PART = 25
SAVES_PER_RUN = 20
MAX_GROWTH_BYTES = 8 * 2**20
"""How much the median of a fifth may be above an earlier one: what an allocator keeps, and the
history of the run, which is 300 bytes a step."""


class Sampler(TrainWatcher):
    """Notes what this rank has of the machine, at each report of a run."""

    def __init__(self) -> None:
        self.usages: dict[str, list[Usage]] = {}
        """The samples of each run, in their order."""

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        self.usages.setdefault(name, []).append(Usage.now())


def soak(
    rank: int, world_size: int, kind: str, steps: int, folder: Path
) -> dict[str, list[list[Usage]]]:
    """Return a rank's samples of each run, by its fifths."""
    keep_freed_memory()
    every = steps // SAVES_PER_RUN
    config = config_with(
        data={"features": [{"name": "user", "num_rows": 20_000}, {"name": "page", "num_rows": 33}]},
        optimizer={"dense_optimizer": "adam"},
        loop={
            "steps": steps,
            "eval_every": every,
            "report_every": steps // (NUM_PARTS * SAMPLES_PER_PART),
        },
        checkpoint={"folder": str(folder / "saved"), "every": every, "asynchronous": True},
        output={"folder": str(folder / "out")},
        runs=dict.fromkeys(RUNS, KINDS[kind]),
    )
    sampler = Sampler()
    watchers: list[TrainWatcher] = [sampler]
    if rank == 0:
        watchers += [
            RunFolder(config.output.folder, config),
            TensorBoardWatcher(folder / "scalars"),
        ]
    result = train(config, watchers)
    assert [len(run.losses) for run in result.runs] == [steps] * len(RUNS)
    return {name: _parts(usages) for name, usages in sampler.usages.items()}


def _parts(usages: list[Usage]) -> list[list[Usage]]:
    size = len(usages) // NUM_PARTS
    return [usages[start : start + size] for start in range(0, NUM_PARTS * size, size)]


def typical(usages: list[Usage]) -> Usage:
    """Return the medians: a sample that meets a save has a thread and a file more."""
    return Usage(*(statistics.median_low(numbers) for numbers in zip(*usages, strict=True)))


def growth(before: Usage, after: Usage) -> list[str]:
    grown = [
        name
        for name, count, later in zip(Usage._fields[1:], before[1:], after[1:], strict=True)
        if later > count
    ]
    is_larger = after.resident_bytes > before.resident_bytes + MAX_GROWTH_BYTES
    return ["resident_bytes", *grown] if is_larger else grown


def findings(runs: dict[str, list[list[Usage]]]) -> list[str]:
    """Return what has grown on a rank, as text."""
    parts = {name: [typical(part) for part in run] for name, run in runs.items()}
    first, second = (parts[name] for name in RUNS)
    pairs = {
        "from the second fifth of the first run to its last": (first[1], first[-1]),
        "from the second fifth of the second run to its last": (second[1], second[-1]),
        "from the first run to the second": (first[-1], second[-1]),
    }
    return [
        f"{', '.join(grown)} {when}: {before} and then {after}"
        for when, (before, after) in pairs.items()
        if (grown := growth(before, after))
    ]


def main() -> int:
    """Print the tables; 1 if something has grown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--kind", choices=list(KINDS), default="rows")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, RankPool(2) as ranks:
        by_rank = ranks.run(soak, options.kind, options.steps, Path(folder), timeout_s=7_200)
    for name in RUNS:
        print(f"{name}: step, resident MiB, Python threads, tasks, process groups, files")
        for number in range(NUM_PARTS):
            each = [typical(runs[name][number]) for runs in by_rank]
            most = Usage(*map(max, zip(*each, strict=True)))
            step = (number + 1) * options.steps // NUM_PARTS
            print(f"  {step:6} {most.resident_bytes / 2**20:8.1f}", *most[1:])
    grown = [f"rank {rank}: {text}" for rank, runs in enumerate(by_rank) for text in findings(runs)]
    print("\n".join(grown or ["nothing has grown"]))
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
