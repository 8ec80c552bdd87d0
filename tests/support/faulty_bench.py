"""A benchmark whose contestants partly fail on purpose; started by torchrun.

torchrun ... -m tests.support.faulty_bench RESULT.json
"""

import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.train_runs import TREE
from torchrec_2dsp.programs.bench import machine, program
from torchrec_2dsp.programs.bench.config import BenchConfig
from torchrec_2dsp.programs.bench.worker import Worker
from torchrec_2dsp.programs.config.config_file import make_config

EXCHANGED = {"sharding_types": ["table_wise", "row_wise"]}
"""However fast the network seems while the machine does something else."""

CONFIG: dict[str, Any] = {
    "title": "faulty",
    "data": TREE["data"],
    "model": TREE["model"],
    "schedule": {
        "batch_size": 16,
        "rounds": 5,
        "block_s": 0.05,
        "max_block_steps": 4,
        "traced_steps": 2,
        "deadline_s": 12.0,
    },
    "network": {"interface": "lo"},
    "calibration": "configs/hardware/emulated_1gbit.toml",
    "contestants": {
        "planner": {"kind": "stock", **EXCHANGED},
        "row_wise": {"kind": "stock", "sharding_types": ["row_wise"]},
        "data_parallel": {"kind": "stock", "sharding_types": ["data_parallel"]},
        "touched": {
            "kind": "stock",
            "sharding_types": ["data_parallel"],
            "dense": {"kind": "thresholded"},
        },
        "int8": {"kind": "stock", "sharding_types": ["table_wise"], "qcomms": "int8"},
        "refused": {"kind": "stock", "sharding_types": ["row_wise"], "qcomms": "int8"},
        "dies": {"kind": "stock"},
        "hangs": {"kind": "stock"},
        "learns_faster": {"kind": "two_d", "num_groups": 2},
        "exact": {"kind": "two_d", "num_groups": 2},
        "hot": {"kind": "two_d", "num_groups": 1, "hot_rows": 5, **EXCHANGED},
        "rounded": {
            "kind": "two_d",
            "num_groups": 1,
            "hot_rows": 5,
            "row_transport": "int8",
            "transport": "bf16",
            **EXCHANGED,
        },
        "searched": {"kind": "two_d", "num_groups": "any", "by_cost": True},
        "duplex": {"kind": "stock", "full_duplex": True, **EXCHANGED},
        "ceiling": {"kind": "ceiling", "of": "exact"},
        "ceiling_of_one": {"kind": "ceiling", "of": "planner"},
    },
}


class FaultyWorker(Worker):
    """Fails on the last rank, in the way that the contestant's name says."""

    def __init__(self, config: BenchConfig, name: str, place: Any, speeds: Any) -> None:
        self._fault = name if place.rank == place.world_size - 1 else ""
        if name == "learns_faster":
            rule = config.optimizer.model_copy(update={"lr": 3 * config.optimizer.lr})
            config = config.model_copy(update={"optimizer": rule})
        super().__init__(config, name, place, speeds)

    def block(self, num_steps: int) -> float:
        """Run a block of steps; die once warm, or hang a little later."""
        if self._fault == "dies" and len(self._losses) > 3:
            os._exit(9)
        if self._fault == "hangs" and len(self._losses) > 8:
            time.sleep(600)
        return super().block(num_steps)


class States(program.BenchWatcher):
    """Records contestants' process states after each measurement, as the kernel names them."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def block_measured(self, name: str, block: Any) -> None:
        """Record the states of all this rank's processes."""
        time.sleep(0.1)  # A stopped process stops with a small delay.
        for process in multiprocessing.active_children():
            line = Path(f"/proc/{process.pid}/stat").read_text()
            self.seen.add(line.rpartition(")")[2].split()[0])


def main() -> None:
    """Run the benchmark; rank 0 writes the result and the contestants' process states."""
    config = make_config(BenchConfig, CONFIG)
    program.Worker = FaultyWorker
    machine._NUM_PASSES = 2  # Enough where the machine's speed doesn't matter.
    states = States()
    result = program.run_bench(config, states)
    if os.environ["RANK"] == "0":
        path = Path(sys.argv[1])
        result.save(path)
        path.with_suffix(".states").write_text("".join(sorted(states.seen)))


if __name__ == "__main__":
    main()
