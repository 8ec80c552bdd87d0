"""`RunFolder`: the folder that a training program leaves, with all that a report needs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.plan import serialize
from torchrec_2dsp.programs.config.config_file import with_absolute_paths
from torchrec_2dsp.programs.config.output_file import write_whole, writing
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.evaluation import Evaluation
from torchrec_2dsp.programs.train.parts import PlannedRun
from torchrec_2dsp.programs.train.progress_file import ProgressFile, ProgressLine
from torchrec_2dsp.programs.train.recording import curve_point, evaluation_record, train_record
from torchrec_2dsp.programs.train.results import (
    QuietWatcher,
    RunResult,
    StepsTrained,
    TrainResult,
)


class RunFolder(QuietWatcher):
    """Writes, on one rank, the config, each run's plan, and a record that grows run by run.

    - ``config.toml``: the config as it was resolved, with absolute paths;
    - ``record.json``: a `TrainRecord` of the runs that are over;
    - ``<run>/plan.json`` and, after a search by cost, ``<run>/explanation.txt``;
    - ``<run>/progress.jsonl``: the curve of a run, also of one that isn't over.
    """

    def __init__(self, folder: str | Path, config: TrainConfig) -> None:
        """
        Args:
            folder: it is made if it doesn't exist.
            config: the config of the program.

        Raises:
            ConfigError: the folder can't be written to.
        """
        self._folder, self._config = Path(folder), config
        self._results: list[RunResult] = []
        self._resumed_from: dict[str, str] = {}
        self._progress: dict[str, ProgressFile] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output.folder={str(folder)!r} can't be written to: {error.strerror}; use another"
            ) from error
        content = tomli_w.dumps(_without_none(with_absolute_paths(config)))
        write_whole(self._folder / "config.toml", content)

    def run_planned(self, name: str, planned: PlannedRun, config: TrainConfig) -> None:
        """Write the run's plan, and begin its progress."""
        folder = self._folder / name
        with writing(folder):
            folder.mkdir(exist_ok=True)
        self._progress[name] = ProgressFile(folder)
        with writing(folder / "plan.json"):
            serialize.save(planned.plan, folder / "plan.json")
        if planned.explanation:
            write_whole(folder / "explanation.txt", planned.explanation + "\n")

    def run_resumed(self, name: str, path: Path, step: int) -> None:
        """Remember the checkpoint for the record, and take over the progress up to it."""
        self._resumed_from[name] = str(path)
        self._progress[name].resume(step)

    def steps_trained(self, name: str, progress: StepsTrained) -> None:
        """Add a point to the run's progress."""
        self._progress[name].add(ProgressLine(point=curve_point(progress)))

    def evaluated(self, name: str, evaluation: Evaluation, *, is_best: bool) -> None:
        """Add the evaluation to the run's progress."""
        self._progress[name].add(ProgressLine(evaluation=evaluation_record(evaluation)))

    def run_finished(self, result: RunResult) -> None:
        """Write the record of the runs so far, so that a stop loses none of them."""
        self._results.append(result)
        runs, metric = tuple(self._results), self._config.metric
        self.all_finished(TrainResult(runs=runs, metric=metric, planted=None))
        self._progress[result.name].add(ProgressLine(is_over=True))

    def all_finished(self, result: TrainResult) -> None:
        """Write the record of all runs."""
        record = train_record(self._config, result, self._resumed_from)
        record.save(self._folder / "record.json")


def _without_none(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree without the values for which TOML has no word."""
    return {
        key: _without_none(value) if isinstance(value, Mapping) else value
        for key, value in tree.items()
        if value is not None
    }
