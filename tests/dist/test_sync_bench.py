"""`bench-sync`, as a user runs it: every sync is timed, and the bytes are those of theory."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.programs import forked, torchrun
from tests.support.ranks import RankPool
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.syncs import SyncBenchConfig, SyncBenchResult, run_sync_bench
from torchrec_2dsp.programs.cli.app import app
from torchrec_2dsp.programs.config.config_file import load_config

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/runs/bench_sync.toml"
NUM_ROWS, DIM = 4096, 64
"""Of a shard of 1 MiB."""


COMMAND = (
    *("torchrec_2dsp", "bench-sync", "--config", str(CONFIG)),
    *("--set", "shard_mib=[1]", "--set", "repeats=2"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench_sync")
    shares = "touched_shares=[0.01, 1.0]"
    output = ("--output", str(folder / "syncs.md"))
    done = forked(*COMMAND, "--set", shares, *output, ranks=4, columns=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 copies of 1 MiB" in done.stdout
    return folder


@pytest.fixture(scope="module")
def result(folder: Path) -> SyncBenchResult:
    return SyncBenchResult.load(folder / "syncs.json")


@pytest.mark.dealt_suite
def test_every_sync_is_timed_in_every_case(result: SyncBenchResult) -> None:
    names = ["dense", "touched", "touched_bf16", "gradients", "gradients_bf16"]
    assert [times.sync for times in result.times] == names * 4
    cases = [(copies, 1.0, share) for copies in (2, 4) for share in (0.01, 1.0)]
    assert list(dict.fromkeys(times.case for times in result.times)) == cases
    for times in result.times:
        assert len(times.seconds) == len(times.tracking_s) == 2
        assert min(times.seconds) > 0
        assert all(seconds > 0 for seconds in times.tracking_s) != times.sync.startswith(
            "gradients"
        )


@pytest.mark.parametrize("num_groups", [2, 4])
def test_bytes_are_those_of_theory(result: SyncBenchResult, num_groups: int) -> None:
    def sent(sync: str, share: float) -> float:
        return result.find((num_groups, 1.0, share), sync).sent_bytes

    dense = 2 * (num_groups - 1) / num_groups * NUM_ROWS * (4 * DIM + 4)
    assert sent("dense", 0.01) == sent("dense", 1.0) == pytest.approx(dense, rel=1e-3)
    # Beyond the break-even share, whole shards are averaged.
    assert sent("touched", 1.0) == pytest.approx(dense, rel=1e-2)
    rows = (num_groups - 1) * round(0.01 * NUM_ROWS)
    for sync, row_bytes in {
        "touched": 4 + 4 * DIM + 4,
        "touched_bf16": 4 + 2 * DIM + 2,
        "gradients": 4 + 4 * DIM,
        "gradients_bf16": 4 + 2 * DIM,
    }.items():
        # Buffers are padded, and headers say how many rows there are.
        assert sent(sync, 0.01) == pytest.approx(rows * row_bytes, abs=48 * (num_groups - 1))


def test_the_page_has_a_plot_and_its_numbers(folder: Path) -> None:
    page = (folder / "syncs.md").read_text()
    for text in (
        "## 2 copies of 1 MiB",
        "(syncs.svg)",
        "(syncs.json)",
        "torchrun",
        " 0.01 | dense ",
    ):
        assert text in page
    assert "<svg" in (folder / "syncs.svg").read_text()


@pytest.mark.slow
def test_the_command_runs_under_torchrun(tmp_path: Path) -> None:
    output = ("--output", str(tmp_path / "syncs.md"))
    done = torchrun(*COMMAND, "--set", "num_groups=[2]", *output, columns=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 copies of 1 MiB" in done.stdout
    assert SyncBenchResult.load(tmp_path / "syncs.json").times


def refused(rank: int, world_size: int) -> str:
    config = load_config(SyncBenchConfig, CONFIG, ["num_groups=[3]"])
    with pytest.raises(ConfigError) as caught:
        run_sync_bench(config)
    return str(caught.value)


def test_groups_that_do_not_divide_the_ranks(ranks4: RankPool) -> None:
    message = set(ranks4.run(refused))
    assert message == {
        "num_groups=3 does not divide the 4 ranks; start as many ranks as a multiple of it"
    }


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reference='sparse'", "reference='sparse' isn't a sync; use one of dense, touched"),
        ("touched_shares=[2.0]", "goes beyond 1, all rows"),
    ],
)
def test_bad_input(override: str, message: str) -> None:
    done = CliRunner().invoke(app, ["bench-sync", "--config", str(CONFIG), "--set", override])
    assert done.exit_code != 0
    assert message in " ".join(done.output.split())
