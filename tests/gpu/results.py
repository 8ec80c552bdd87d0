"""Results of the queue's jobs: JSON lines that travel between machines."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTED = ("torchrec_2dsp", "configs", "tests/dist", "tests/fuzz", "tests/support")
"""The folders of which results speak."""

NUMBERS_FILE = "GPU_QUEUE_NUMBERS"
"""The variable that names the file for a job's measurements, a dict as JSON."""

PASSED, FAILED, TIMED_OUT, CRASHED, STOPPED = (
    "passed",
    "failed",
    "timed out",
    "crashed",
    "stopped",
)
"""A job's outcomes: it is *stopped* if the queue ended before the job's own budget did."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A job's outcome, and the machine that ran it."""

    name: str
    outcome: str
    seconds: float
    exit_code: int | None
    """`None` if it had to be killed."""
    code: str
    """The sum of the code that was tested, see `sum_of_code`."""
    commit: str
    card: str
    """The GPU's name, or "CPU"."""
    versions: dict[str, str]
    started: str
    """The time at which it started, UTC."""
    tests: dict[str, str] = field(default_factory=dict)
    """The outcomes of single tests by their ids, where the job is one of pytest."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Its measurements."""
    tail: str = ""
    """The end of its output."""
    is_usable_after: bool = True
    """True if the GPU could still be used afterwards."""

    @property
    def passed_tests(self) -> list[str]:
        """Ids of the tests that passed."""
        return [test for test, outcome in self.tests.items() if outcome == PASSED]

    def __str__(self) -> str:
        counts = Counter(self.tests.values())
        tests = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        return f"{self.outcome:9} {self.seconds:6.1f} s  {self.name}" + (tests and f"  ({tests})")


def sum_of_code(root: Path = ROOT, folders: Sequence[str] = TESTED) -> str:
    """Hash the code that results depend on; the hash changes with the code."""
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix in (".py", ".toml", ".jsonl"):
                total.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return total.hexdigest()[:12]


def read_results(paths: Iterable[Path]) -> list[Result]:
    """Return the results in files and in folders' files, by start time."""
    files = {
        file
        for path in paths
        for file in (path.rglob("*.jsonl") if path.suffix != ".jsonl" else [path])
    }
    results = {
        line: Result(**json.loads(line))
        for file in sorted(files)
        for line in file.read_text().splitlines()
        if line.endswith("}")  # The last line is cut off if the machine was taken away.
    }
    return sorted(results.values(), key=lambda result: result.started)


def append_result(path: Path, result: Result) -> None:
    """Append a line to a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")
