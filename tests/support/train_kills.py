"""Kill workers of the training program under torchrun, and compare with a run without kills.

Run as ``python -m tests.support.train_kills --kills 20``. Each launch gets up to three kills, as
many as torchrun may restart; every other one comes while a checkpoint is written. A loss, an
evaluation or an exit code that differs from that of the uninterrupted program is a failure.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from tests.support.kills import DEADLINE_S, MAX_RESTARTS, run_killed
from torchrec_2dsp.programs.train.record import RunRecord, TrainRecord

STEPS, SAVE_EVERY = 40, 4
CONFIG = {
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
    "loop": {
        "steps": STEPS,
        "global_batch_size": 64,
        "eval_every": 10,
        "eval_steps": 2,
        "report_every": 1,
    },
    "checkpoint": {"every": SAVE_EVERY},
}
RUNS = {
    "exact": {"num_groups": 2},
    "averaged": {"num_groups": 2, "sync": "WeightSync", "sync_policy": "every(3)"},
    "prefetch": {"sharding_types": ["row_wise"], "exchange": "row", "prefetch_rows": True},
}


@dataclass
class Launch:
    """The result of a launch."""

    record: RunRecord | None
    """The record of its run; none if it failed."""
    kills: list[str] = field(default_factory=list)
    """When each kill came."""
    output: str = ""
    """The end of what it said."""


def launch(folder: Path, run: str, *, ranks: int, kills: int, chance: random.Random) -> Launch:
    """One launch of torchrun, with kills."""
    config = folder / "run.toml"
    tree = CONFIG | {"runs": {run: RUNS[run]}}
    tree["checkpoint"] = CONFIG["checkpoint"] | {"folder": str(folder / "checkpoints")}
    config.write_text(tomli_w.dumps(tree))
    record = folder / "record.json"
    arguments = ["torchrec_2dsp", "train", "--config", str(config), "--resume", "auto"]
    arguments += ["--output", str(record)]
    done, checkpoints = Launch(None), folder / "checkpoints" / run / "last"
    exit_code = run_killed(
        arguments,
        folder,
        ranks,
        kills,
        lambda process, life: kill_one(process, checkpoints, life, chance, done),
    )
    if not exit_code and record.exists():
        (done.record,) = TrainRecord.load(record).runs
    done.output = (folder / "output.txt").read_text()[-3000:]
    return done


def kill_one(
    process: "subprocess.Popen[bytes]",
    checkpoints: Path,
    number: int,
    chance: random.Random,
    done: Launch,
) -> None:
    """Kill a worker once a few more checkpoints have begun: at once, or some time later."""
    before = newest(checkpoints)
    wanted = before + SAVE_EVERY * chance.randint(1, 3)
    is_while_saving = number % 2 == 0
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        if newest(checkpoints) >= min(wanted, STEPS - SAVE_EVERY):
            break
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.01 if is_while_saving else 0.3))
    workers = children(process.pid)
    if process.poll() is None and workers:
        is_unfinished = not (checkpoints / str(newest(checkpoints)) / ".metadata").exists()
        os.kill(chance.choice(workers), signal.SIGKILL)
        where = f"in the save of {newest(checkpoints)}" if is_unfinished else "between saves"
        done.kills.append(f"{where}, after {newest(checkpoints)}")


def newest(checkpoints: Path) -> int:
    if not checkpoints.is_dir():
        return 0
    return max((int(path.name) for path in checkpoints.iterdir()), default=0)


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


def differences(run: RunRecord, expected: RunRecord) -> list[str]:
    """Return the steps whose losses differ, and the evaluations."""
    losses, expected_losses = (
        {point.step: point.loss for point in record.curve} for record in (run, expected)
    )
    steps = sorted(losses.keys() | expected_losses.keys())
    different = [
        f"step {step}: {losses.get(step)} for {expected_losses.get(step)}"
        for step in steps
        if losses.get(step) != expected_losses.get(step)
    ]
    if run.evaluations != expected.evaluations:
        different.append(f"evaluations: {run.evaluations} for {expected.evaluations}")
    return different


def main() -> int:
    """Kill until there were enough, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, num_killed, bad, number = random.Random(options.seed), 0, [], 0
    expected: dict[str, Launch] = {}
    print("| run | kills | steps compared | differ |\n| --- | --- | ---: | ---: |")
    while num_killed < options.kills:
        run = list(RUNS)[number % len(RUNS)]
        number += 1
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for part in ("through", "killed"):
                (folder / part).mkdir()
            if run not in expected:
                expected[run] = launch(
                    folder / "through", run, ranks=options.ranks, kills=0, chance=chance
                )
            kills = min(MAX_RESTARTS, options.kills - num_killed)
            done = launch(folder / "killed", run, ranks=options.ranks, kills=kills, chance=chance)
        num_killed += max(1, len(done.kills))
        whole = expected[run].record
        if done.record is None or whole is None:
            different = [f"no record: {done.output}{expected[run].output}"]
        else:
            different = differences(done.record, whole)
        num_compared = 0 if done.record is None else len(done.record.curve)
        print(
            f"| {run} | {'; '.join(done.kills)} | {num_compared} | {len(different)} |", flush=True
        )
        for text in different[:5]:
            print(text)
        bad += [run] if different or num_compared < STEPS else []
    print(f"\n{num_killed} kills; bad: {bad or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
