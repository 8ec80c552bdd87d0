"""Kill workers of torchrun at random moments, and compare what goes on with a run without kills.

Run as ``python -m tests.support.kills --kills 20``. Each launch of torchrun gets up to three kills,
as many as it may restart; half of them come while a checkpoint is saved. A loss that differs in any
bit from that of the uninterrupted run, and an exit code, is a failure. Prints a table.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.rank_worker import REPOSITORY
from tests.support.ranks import RankPool

MAX_RESTARTS = 3
SAVE_EVERY, KEPT = 4, 2
DEADLINE_S = 900
CHOSEN = (
    "gradient",
    "every 1",
    "every 3",
    "after",
    "hot refresh",
    "hash hot refresh",
    "row pipeline",
    "row pipeline hot refresh",
    "delay",
)


@dataclass
class Outcome:
    """The result of a launch with kills."""

    variant: str
    exit_code: int = 0
    kills: list[str] = field(default_factory=list)
    """When each came."""
    num_lives: int = 0
    num_losses: int = 0
    """Steps of all lives and ranks that were compared."""
    different: list[str] = field(default_factory=list)
    """Losses that differ, and steps that nobody has trained."""
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Tell whether nobody could tell that there were kills."""
        return not self.exit_code and not self.different


def worker(variant: str, folder: Path, steps: int) -> None:
    """Train on from the newest checkpoint, as torchrun's worker, and log each event."""
    import torch.distributed as dist

    import torchrec_2dsp as tdsp
    from tests.support.resuming import Run, variant_for

    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    with (folder / f"log_{life}_{rank}.jsonl").open("a") as log:

        def note(**what: object) -> None:
            log.write(json.dumps({"pid": os.getpid(), **what}) + "\n")
            log.flush()

        run = Run(variant_for(variant, dist.get_world_size()))
        checkpoints = folder / "checkpoints"
        if (path := tdsp.latest_checkpoint(checkpoints)) is not None:
            run.load(path)
        note(event="ready", step=run.state.step)
        while run.state.step < steps:
            loss = run.step()
            note(event="step", step=run.state.step, loss=loss.hex())
            if run.state.step % SAVE_EVERY == 0:
                note(event="save", step=run.state.step)
                run.save(checkpoints)
                tdsp.drop_old_checkpoints(checkpoints, keep=KEPT)
    dist.barrier()
    dist.destroy_process_group()


def uninterrupted(
    rank: int, world_size: int, variant: str, folder: Path, steps: int
) -> dict[int, str]:
    """Return the losses of a run that saves at the same steps."""
    from tests.support.resuming import Run, variant_for

    run, losses = Run(variant_for(variant, world_size)), {}
    while run.state.step < steps:
        loss = run.step()
        losses[run.state.step] = loss.hex()
        if run.state.step % SAVE_EVERY == 0:
            run.save(folder)
    return losses


def launch(
    variant: str, folder: Path, *, num_ranks: int, steps: int, kills: int, chance: random.Random
) -> Outcome:
    """Launch torchrun once, with kills; don't compare losses yet."""
    started, outcome = time.monotonic(), Outcome(variant)
    arguments = ["tests.support.kills", "--worker", variant, str(folder), str(steps)]
    outcome.exit_code = run_killed(
        arguments,
        folder,
        num_ranks,
        kills,
        lambda process, life: kill_one(process, folder, life, num_ranks, steps, chance, outcome),
    )
    outcome.seconds = time.monotonic() - started
    return outcome


def run_killed(
    arguments: list[str],
    folder: Path,
    num_ranks: int,
    kills: int,
    kill: Callable[["subprocess.Popen[bytes]", int], None],
) -> int:
    """Run a module under torchrun while ``kill`` is called for each life; return the exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), "--max-restarts", str(MAX_RESTARTS)]
    command += ["--monitor-interval", "0.1", "-m", *arguments]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        "GLOO_SOCKET_IFNAME": "lo",
        # Without it gloo reads the addresses of the dead life, in plain torch as well.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=output, stderr=output)
        try:
            for life in range(kills):
                kill(process, life)
            return process.wait(DEADLINE_S)
        finally:
            if process.poll() is None:
                # Its workers end with it: torchrun stops them when it is asked to end.
                process.terminate()
                process.wait(60)


def kill_one(
    process: "subprocess.Popen[bytes]",
    folder: Path,
    life: int,
    num_ranks: int,
    steps: int,
    chance: random.Random,
    outcome: Outcome,
) -> None:
    """Kill a worker of this life after a random step or in a random save, if it lives so long."""
    victim, observed = chance.randrange(num_ranks), chance.randrange(num_ranks)
    event = chance.choice(["step", "save"])
    first = chance.randint(1, max(1, steps // 3))
    log, begun = folder / f"log_{life}_{observed}.jsonl", 0
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        seen = list(entries(log))
        ready = [entry for entry in seen if entry["event"] == "ready"]
        begun = ready[0]["step"] if ready else 0
        if ready and any(
            entry["event"] == event and entry["step"] >= min(begun + first, steps - SAVE_EVERY)
            for entry in seen
        ):
            break
        time.sleep(0.002)
    delay = chance.uniform(0, 0.06 if event == "save" else 0.03)
    time.sleep(delay)
    pids = [entry["pid"] for entry in entries(folder / f"log_{life}_{victim}.jsonl")]
    if process.poll() is None and pids:
        os.kill(pids[0], signal.SIGKILL)
        last = [entry["step"] for entry in entries(log)][-1]
        outcome.kills.append(f"rank {victim} after {event} {last}")


def entries(path: Path) -> Iterator[dict]:  # type: ignore[type-arg]
    """Yield what a worker has noted so far; the last line may be cut."""
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def compare(outcome: Outcome, folder: Path, expected: list[dict[int, str]]) -> None:
    """Compare the losses in all lives with the uninterrupted run's, bit by bit."""
    for rank, losses in enumerate(expected):
        trained = set()
        logs = sorted(folder.glob(f"log_*_{rank}.jsonl"))
        outcome.num_lives = max(outcome.num_lives, len(logs))
        for path in logs:
            for entry in entries(path):
                if entry["event"] != "step":
                    continue
                step = entry["step"]
                trained.add(step)
                outcome.num_losses += 1
                if entry["loss"] != losses[step]:
                    values = [float.fromhex(text) for text in (entry["loss"], losses[step])]
                    outcome.different.append(f"{path.stem} step {step}: {values}")
        if missing := losses.keys() - trained:
            outcome.different.append(f"rank {rank} has never trained {sorted(missing)}")


def run_variant(
    pool: RankPool, variant: str, *, kills: int, steps: int, chance: random.Random
) -> Outcome:
    """Run a variant with kills and compare it with itself without."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_ranks = pool.world_size
        expected = pool.run(uninterrupted, variant, folder / "through", steps, timeout_s=DEADLINE_S)
        outcome = launch(
            variant, folder, num_ranks=num_ranks, steps=steps, kills=kills, chance=chance
        )
        compare(outcome, folder, expected)
        if outcome.exit_code:
            outcome.different.append((folder / "output.txt").read_text()[-3000:])
    return outcome


def main() -> int:
    """Kill until there were enough, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", nargs="+", default=list(CHOSEN))
    options = parser.parse_args()
    chance, outcomes = random.Random(options.seed), []
    print("| variant | kills | lives | losses compared | differ | exit code | seconds |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    num_killed = 0
    with RankPool(options.ranks) as pool:
        while num_killed < options.kills:
            variant = options.variants[len(outcomes) % len(options.variants)]
            kills = min(MAX_RESTARTS, options.kills - num_killed)
            outcome = run_variant(pool, variant, kills=kills, steps=options.steps, chance=chance)
            outcomes.append(outcome)
            num_killed += max(1, len(outcome.kills))
            row = [variant, "; ".join(outcome.kills), outcome.num_lives, outcome.num_losses]
            row += [len(outcome.different), outcome.exit_code, round(outcome.seconds)]
            print("| " + " | ".join(str(cell) for cell in row) + " |", flush=True)
            for text in outcome.different[:5]:
                print(text)
    bad = [outcome.variant for outcome in outcomes if not outcome.is_good]
    total = sum(len(outcome.kills) for outcome in outcomes)
    num_losses = sum(outcome.num_losses for outcome in outcomes)
    print(f"\n{total} kills, {num_losses} losses; bad: {bad or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
