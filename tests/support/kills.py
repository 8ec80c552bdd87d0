"""Kill torchrun's workers at random moments, and compare the results with a run without kills.

Run as ``python -m tests.support.kills [--of library|program] --kills 20``. Each torchrun launch
gets up to three kills, as many as it may restart; every other kill comes while a checkpoint is
saved. Any loss or evaluation that isn't bitwise equal to the uninterrupted run's, and any nonzero
exit code, is a failure. Prints a table.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from tests.support.rank_worker import REPOSITORY

MAX_RESTARTS = 3
SAVE_EVERY, KEPT = 4, 2
DEADLINE_S = 900

Numbers = dict[str, list[object]]
"""The numbers that a run computed under each name, in all lives so far."""


@dataclass(frozen=True)
class Subject:
    """A program that trains under torchrun, in some variants."""

    variants: tuple[str, ...]
    num_steps: int
    num_ranks: int
    command: Callable[[str, Path, int], list[str]]
    """The module and its arguments, for a variant, a folder and a number of steps."""
    checkpoints: str
    """The places below its folder where a variant saves."""
    numbers: Callable[[Path], Numbers]
    """Reads the numbers that a run has left in its folder."""


@dataclass
class Launch:
    """A launch's result."""

    exit_code: int
    numbers: Numbers
    kills: list[str] = field(default_factory=list)
    """The time of each kill."""
    output: str = ""
    """The end of its output."""

    def differences(self, expected: "Launch") -> list[str]:
        """List numbers that differ from a run without kills, or are missing."""
        different = [
            f"{name}: {values} for {expected.numbers.get(name)}"
            for name, values in self.numbers.items()
            if set(map(str, values)) != set(map(str, expected.numbers.get(name, [])))
        ]
        if missing := sorted(expected.numbers.keys() - self.numbers.keys()):
            different.append(f"nobody has computed {missing}")
        return [*different, self.output] if self.exit_code else different


def library_worker(variant: str, folder: Path, steps: int) -> None:
    """Continue training from the newest checkpoint as a torchrun worker, and log each loss."""
    import torch.distributed as dist

    import torchrec_2dsp as tdsp
    from tests.support.resuming import Run, variant_for

    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    run, checkpoints = Run(variant_for(variant, dist.get_world_size())), folder / "checkpoints"
    with (folder / f"log_{life}_{rank}.jsonl").open("a") as log:
        if (path := tdsp.latest_checkpoint(checkpoints)) is not None:
            run.load(path)
        while run.state.step < steps:
            loss = run.step()
            log.write(json.dumps([f"rank {rank} step {run.state.step}", loss.hex()]) + "\n")
            log.flush()
            if run.state.step % SAVE_EVERY == 0:
                run.save(checkpoints)
                tdsp.drop_old_checkpoints(checkpoints, keep=KEPT)
    dist.barrier()
    dist.destroy_process_group()


def library_command(variant: str, folder: Path, steps: int) -> list[str]:
    return ["tests.support.kills", "--worker", variant, str(folder), str(steps)]


def library_numbers(folder: Path) -> Numbers:
    numbers: defaultdict[str, list[object]] = defaultdict(list)
    for line in _whole_lines(folder):
        name, loss = json.loads(line)
        numbers[name].append(loss)
    return numbers


def _whole_lines(folder: Path) -> Iterator[str]:
    """Yield the complete lines in workers' logs; each log's last line may be cut."""
    for path in folder.glob("log_*.jsonl"):
        yield from (line for line in path.read_text().splitlines(True) if line.endswith("\n"))


CONFIG: dict[str, Any] = {
    "data": {
        "num_dense": 3,
        "features": [
            {"name": "user", "num_rows": 2_000},
            {"name": "page", "num_rows": 500, "min_ids": 0, "max_ids": 3},
        ],
    },
    "model": {"dim": 8, "dense_layers": [8], "over_layers": [8]},
    "optimizer": {
        "dense_optimizer": "adam",
        "dense_lr": 0.01,
        "dense_clip_norm": 0.5,
        "schedule": {"kind": "cosine", "warm_up": 5},
    },
}
RUNS = {
    "exact": {"num_groups": 2},
    "averaged": {"num_groups": 2, "sync": "WeightSync", "sync_policy": "every(3)"},
    "prefetch": {"sharding_types": ["row_wise"], "exchange": "row", "prefetch_rows": True},
}


def program_command(run: str, folder: Path, steps: int) -> list[str]:
    loop = {"steps": steps, "global_batch_size": 64, "eval_every": 10, "eval_steps": 2}
    tree = CONFIG | {
        "loop": loop | {"report_every": 1},
        "checkpoint": {"every": SAVE_EVERY, "folder": str(folder / "checkpoints")},
        "runs": {run: RUNS[run]},
    }
    (folder / "run.toml").write_text(tomli_w.dumps(tree))
    arguments = ["--config", str(folder / "run.toml"), "--output", str(folder / "record.json")]
    return ["torchrec_2dsp", "train", *arguments, "--resume", "auto"]


def program_numbers(folder: Path) -> Numbers:
    from torchrec_2dsp.programs.train.record import TrainRecord

    if not (folder / "record.json").exists():
        return {}
    (record,) = TrainRecord.load(folder / "record.json").runs
    numbers: Numbers = {f"step {point.step}": [point.loss] for point in record.curve}
    numbers["evaluations"] = [record.evaluations]
    return numbers


SUBJECTS = {
    "library": Subject(
        (
            *("gradient", "every 1", "every 3", "after", "hot refresh", "hash hot refresh"),
            *("row pipeline", "row pipeline hot refresh", "delay"),
        ),
        24,
        4,
        library_command,
        "checkpoints",
        library_numbers,
    ),
    "program": Subject(tuple(RUNS), 40, 2, program_command, "checkpoints/{}/last", program_numbers),
}


def launch(
    subject: Subject,
    variant: str,
    folder: Path,
    *,
    kills: int,
    chance: random.Random,
) -> Launch:
    """Launch torchrun once, with kills."""
    folder.mkdir()
    checkpoints = folder / subject.checkpoints.format(variant)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(subject.num_ranks), "--max-restarts", str(MAX_RESTARTS)]
    command += ["--monitor-interval", "0.1", "-m"]
    command += subject.command(variant, folder, subject.num_steps)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "GLOO_SOCKET_IFNAME": "lo",
        # Without it gloo reads the dead workers' addresses, in plain torch as well.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    happened: list[str] = []
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=output, stderr=output)
        try:
            for life in range(kills):
                last_step = subject.num_steps - SAVE_EVERY
                happened += kill_one(process, checkpoints, life % 2 == 0, last_step, chance)
            exit_code = process.wait(DEADLINE_S)
        finally:
            if process.poll() is None:
                # Its workers end with it: torchrun stops them when it is asked to end.
                process.terminate()
                process.wait(60)
    text = (folder / "output.txt").read_text()[-3000:]
    return Launch(exit_code, subject.numbers(folder), happened, text)


def kill_one(
    process: "subprocess.Popen[bytes]",
    checkpoints: Path,
    is_while_saving: bool,
    last_step: int,
    chance: random.Random,
) -> list[str]:
    """Kill a worker after a few more checkpoints have begun: at once, or some time later."""
    wanted = newest(checkpoints) + SAVE_EVERY * chance.randint(1, 3)
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        if newest(checkpoints) >= min(wanted, last_step):
            break
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.01 if is_while_saving else 0.3))
    workers = children(process.pid)
    if process.poll() is not None or not workers:
        return []
    is_unfinished = not (checkpoints / str(newest(checkpoints)) / ".metadata").exists()
    os.kill(chance.choice(workers), signal.SIGKILL)
    where = f"in the save of {newest(checkpoints)}" if is_unfinished else "between saves"
    return [f"{where}, after {newest(checkpoints)}"]


def newest(checkpoints: Path) -> int:
    if not checkpoints.is_dir():
        return 0
    names = (path.name for path in checkpoints.iterdir())
    return max((int(name) for name in names if name.isdecimal()), default=0)


def children(pid: int) -> list[int]:
    workers = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, which may hold anything, ends with the last parenthesis.
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # The process has ended meanwhile.
        if parent == pid:
            workers.append(int(status.parent.name))
    return workers


def main() -> int:
    """Kill workers as often as asked, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", choices=SUBJECTS, default="library")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    subject, chance = SUBJECTS[options.of], random.Random(options.seed)
    num_killed = num_launches = 0
    expected: dict[str, Launch] = {}
    bad: list[str] = []
    print("| variant | kills | numbers compared | differ |\n| --- | --- | ---: | ---: |")
    while num_killed < options.kills:
        variant = subject.variants[num_launches % len(subject.variants)]
        kills = min(MAX_RESTARTS, options.kills - num_killed)
        num_launches += 1
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if variant not in expected:
                through = launch(subject, variant, folder / "through", kills=0, chance=chance)
                expected[variant] = through
            done = launch(subject, variant, folder / "killed", kills=kills, chance=chance)
        num_killed += max(1, len(done.kills))
        different = done.differences(expected[variant])
        row = (variant, "; ".join(done.kills), len(done.numbers), len(different))
        print("| " + " | ".join(map(str, row)) + " |", *different[:5], sep="\n", flush=True)
        bad += [variant] if different or not done.numbers else []
    print(f"\n{num_killed} kills; bad: {bad or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        library_worker(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
