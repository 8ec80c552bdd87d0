"""The code in README, migration guide and examples runs as printed."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

import torchrec_2dsp as tdsp
from tests.support.loops import LossModel
from tests.support.models import ModelSpec, make_batch
from tests.support.parity import make_optimizer
from tests.support.programs import python
from tests.support.ranks import RankPool
from tests.support.slices import Deal
from torchrec_2dsp.parallel import planning

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
MIGRATION = ROOT / "docs" / "guides" / "migrate.md"


def blocks(page: Path, info: str) -> list[str]:
    """Return a page's fenced blocks whose info string is ``info``."""
    return re.findall(rf"^```{info}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.dealt_suite(seconds=30)
def test_the_script_of_the_readme_runs_when_it_is_pasted(tmp_path: Path) -> None:
    (source,) = blocks(README, "python script")
    script = tmp_path / "train.py"
    script.write_text(source)
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    done = python("-m", "tests.support.forks", "scripts", str(script), cwd=tmp_path, env=cache)
    assert done.stdout.endswith(f"{script} 0 0 0 0\n"), done.stderr[-5000:]
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", done.stdout)]
    assert len(losses) == 20
    assert len(set(losses)) > 10


def chosen_by_the_readme(rank: int, world_size: int, source: str) -> set[str]:
    """Return the exchanges that the README's call chooses on two slow hosts."""
    setup = source[: source.index("pipeline = ")].replace('dist.init_process_group("gloo")\n', "")
    known = tdsp.Calibration.load("emulated_200mbit")
    script: dict[str, Any] = {}
    with mock.patch.object(planning, "calibration_of_world", return_value=known):
        exec(setup, script)
    tables = [table for _, part in script["model"].plan.modules() for _, table in part.tables()]
    return {table.exchange.value for table in tables}


def test_the_script_of_the_readme_exchanges_rows_on_a_slow_network(two_hosts: RankPool) -> None:
    (source,) = blocks(README, "python script")
    for exchanges in two_hosts.run(chosen_by_the_readme, source):
        assert exchanges <= {"row", "row_per_host"}
        assert exchanges


def swapped() -> str:
    """Return the code after applying the migration guide's diff."""
    (block,) = blocks(MIGRATION, "diff")
    lines = [line for line in block.splitlines() if not line.startswith("- ")]
    return "\n".join(line[2:] for line in lines)


def run_swap(rank: int, world_size: int, source: str) -> list[float]:
    """Return the losses in a few steps after the swap."""
    calibration = tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml")
    spec = ModelSpec()
    script: dict[str, Any] = {
        "dist": dist,
        "model": LossModel(spec),
        "device": torch.device("cpu"),
        "topology": calibration.topology(world_size, local_world_size=2),
        "constraints": {},
        "TrainPipelineSparseDist": TrainPipelineSparseDist,
    }
    before, last = source.rstrip().rsplit("\n", 1)
    exec(before, script)
    # A user builds the optimizer from the sharded model's parameters.
    script["optimizer"] = make_optimizer(script["model"])
    exec(last, script)
    batches = iter([make_batch(spec, seed=10 * step + rank) for step in range(3)])
    return [script["pipeline"].progress(batches)[0].item() for _ in range(3)]


def test_the_swap_of_the_migration_guide_runs(ranks2: RankPool) -> None:
    source = swapped().replace("my_cluster.toml", "configs/hardware/emulated_1gbit.toml")
    assert "Planner2D" in source
    assert "emulated_1gbit" in source
    assert source.rstrip().rpartition("\n")[2].startswith("pipeline = ")
    for losses in ranks2.run(run_swap, source):
        assert len(set(losses)) == 3


EXAMPLES = ROOT / "docs" / "examples"
RUN_ELSEWHERE = {"serve.py", "serve_next_items.py", "experiment_trackers.py"}
"""The examples that read what `export` writes, or that `train` loads; their own tests run them."""


def test_the_examples_run(dealt: Deal) -> None:
    every = sorted(EXAMPLES.glob("*.py"))
    scripts = dealt([str(script) for script in every if script.name not in RUN_ELSEWHERE])
    assert scripts
    done = python("-m", "tests.support.forks", "scripts", *scripts)
    assert done.returncode == 0, done.stderr[-5000:]
    for script in scripts:
        assert f"done\n{script} 0 0 0 0\n" in done.stdout, done.stdout
