"""`ProgressFile`: the curve of a run that isn't over, line by line."""

from pathlib import Path

from pydantic import ValidationError

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.config.output_file import writing
from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.programs.train.record import CurvePoint, EvaluationRecord

PROGRESS_FILE = "progress.jsonl"
"""The name of the file, in the folder of a run."""


class ProgressLine(Section):
    """A line of the file: one of its fields says something."""

    point: CurvePoint | None = None
    """Some steps that were trained."""

    evaluation: EvaluationRecord | None = None
    """An evaluation."""

    is_over: bool = False
    """Whether the run has ended, so that the record has it."""

    def is_after(self, step: int) -> bool:
        """Whether a run that goes on after ``step`` steps will write this line again."""
        part = self.point or self.evaluation
        return part is None or part.step > step


class ProgressFile:
    """Adds lines to the progress of one run."""

    def __init__(self, folder: Path) -> None:
        """Begin the progress anew; an earlier life's lines are kept for `resume`."""
        self._path = folder / PROGRESS_FILE
        self._earlier = read_progress(folder)
        with writing(self._path):
            self._path.write_text("")

    def resume(self, step: int) -> None:
        """Take over what an earlier life of the run wrote up to ``step``."""
        for line in self._earlier:
            if not line.is_after(step):
                self.add(line)

    def add(self, line: ProgressLine) -> None:
        """Add a line.

        Raises:
            OutputError: it can't be written; `read_progress` passes over a line without an end.
        """
        with writing(self._path), self._path.open("a") as file:
            file.write(line.model_dump_json(exclude_defaults=True) + "\n")


def read_progress(folder: Path) -> tuple[ProgressLine, ...]:
    """The lines of a run's progress; none without a file.

    Args:
        folder: the folder of the run.

    Raises:
        ConfigError: the file can't be read, or is something else.
    """
    path = folder / PROGRESS_FILE
    if not path.exists():
        return ()
    try:
        # A line without an end is one that a killed run was about to write.
        *lines, _ = path.read_text().split("\n")
        return tuple(map(ProgressLine.model_validate_json, lines))
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not the progress of a run: {error}") from error
