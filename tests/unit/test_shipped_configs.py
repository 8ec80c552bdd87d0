"""Configs that ship with the package are found by name, from any folder."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.plan.sync import GradientSync
from torchrec_2dsp.programs.bench.config import BenchConfig
from torchrec_2dsp.programs.cli.app import app
from torchrec_2dsp.programs.config.config_file import find_config, load_config, shipped_configs
from torchrec_2dsp.programs.plan import PlanConfig
from torchrec_2dsp.programs.train.config import TrainConfig

CONFIGS = Path(__file__).parents[2] / "configs"
OF_LOGS = ("avazu", "criteo", "movielens")
"""The configs of logs that a user brings."""
FOLDERS = ("hardware", "runs", "workloads")
RUNS: dict[str, type[TrainConfig | BenchConfig | PlanConfig]] = {
    "avazu": TrainConfig,
    "bench": BenchConfig,
    "bench_criteo": BenchConfig,
    "bench_dense": BenchConfig,
    "bench_sequences": BenchConfig,
    "criteo": TrainConfig,
    "demo": TrainConfig,
    "dense_async_quality": TrainConfig,
    "dense_async_sequences": TrainConfig,
    "dense_quality": TrainConfig,
    "fewer_bits_quality": TrainConfig,
    "movielens": TrainConfig,
    "plan": PlanConfig,
    "quality": TrainConfig,
    "scale": PlanConfig,
    "scale_clicks": PlanConfig,
    "sequence": TrainConfig,
    "trillions": PlanConfig,
}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_config_of_the_repository_ships(folder: str) -> None:
    files = sorted((CONFIGS / folder).glob("*.toml"))
    assert files
    assert list(shipped_configs(folder)) == [file.stem for file in files]
    for file in files:
        assert find_config(file.stem, folder).samefile(file)
        assert find_config(f"{folder}/{file.stem}").samefile(file)


def test_every_run_is_a_config_of_a_program() -> None:
    assert list(shipped_configs("runs")) == list(RUNS)
    for name, kind in RUNS.items():
        load_config(kind, name, ["data.files=log.gz"] if name in OF_LOGS else [])


@pytest.mark.parametrize("name", OF_LOGS)
def test_a_config_of_a_log_compares_with_torchrec_alone(name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^{name}: data\\.files is missing; .* --set data.files="
    ):
        load_config(TrainConfig, name)
    config = load_config(TrainConfig, name, ["data.files=logs/*.gz"])
    assert getattr(config.data, "files") == ("logs/*.gz",)  # noqa: B009
    meshes = {key: (run.stock, config.mesh(key, 4)) for key, run in config.runs.items()}
    assert meshes == {
        "stock": (True, Mesh2D(1, 4)),
        "one_group": (False, Mesh2D(1, 4)),
        "exact": (False, Mesh2D(2, 2)),
    }
    assert config.runs["exact"].sync_config == GradientSync()
    assert config.metric == ("ndcg@10" if name == "movielens" else "auc")


def test_no_folder_is_left_out() -> None:
    assert sorted(path.name for path in CONFIGS.iterdir()) == sorted(FOLDERS)


def test_a_path_stays_a_path() -> None:
    assert find_config("demo.toml") == Path("demo.toml")
    assert find_config("x/run.toml", beside="/there") == Path("/there/x/run.toml")
    assert find_config("/x/run.toml", beside="/there") == Path("/x/run.toml")
    Path("mine").touch()
    assert find_config("mine") == Path("mine")
    # A shipped config wins over a file with the same name, whatever is in the folder.
    Path("demo").touch()
    assert find_config("demo").samefile(CONFIGS / "runs" / "demo.toml")
    assert find_config("./demo") == Path("demo")


@pytest.mark.parametrize("name", ["dmo", "", "elsewhere/demo", "../pyproject", "/runs/demo"])
def test_an_unknown_name_lists_those_that_ship(name: str) -> None:
    hint = "did you mean 'demo'? Otherwise " if name == "dmo" else ""
    text = f"{name!r} is no file, and no config of that name ships with the package; {hint}"
    runs = ", ".join(sorted(path.stem for path in (CONFIGS / "runs").glob("*.toml")))
    with pytest.raises(ConfigError, match=re.escape(f"{text}use a path, or one of {runs}") + "$"):
        find_config(name)


def test_a_name_brings_what_its_file_refers_to() -> None:
    config = load_config(PlanConfig, "plan")
    assert Path(config.machines.calibration).samefile(CONFIGS / "hardware" / "emulated_1gbit.toml")
    one_hot = load_config(BenchConfig, "bench_criteo")
    steep = load_config(BenchConfig, "bench_criteo", include="criteo_steep")
    assert one_hot.data != steep.data
    path = CONFIGS / "workloads" / "criteo_steep.toml"
    assert load_config(BenchConfig, "bench_criteo", include=path) == steep


def test_a_file_may_refer_to_names() -> None:
    own = Path("below", "mine.toml")
    own.parent.mkdir()
    own.write_text('include = "criteo_one_hot"\n[machines]\ncalibration = "emulated_200mbit"\n')
    shipped = load_config(PlanConfig, "plan")
    config = load_config(PlanConfig, own)
    assert config.data == shipped.data
    expected = CONFIGS / "hardware" / "emulated_200mbit.toml"
    assert Path(config.machines.calibration).samefile(expected)
    override = "machines.calibration=emulated_1gbit"
    config = load_config(PlanConfig, own, [override])
    assert config.machines.calibration == shipped.machines.calibration
    # The user's own file is still found beside it.
    own.write_text(own.read_text().replace("emulated_200mbit", "../known.toml"))
    assert load_config(PlanConfig, own).machines.calibration == "known.toml"


def test_an_unknown_calibration_names_its_key_and_those_that_ship() -> None:
    with pytest.raises(ConfigError, match=r"^plan: machines\.calibration='1gbit': .* one of emul"):
        load_config(PlanConfig, "plan", ["machines.calibration=1gbit"])


@pytest.mark.parametrize("command", ["train", "bench", "plan", "simulate"])
def test_every_command_with_a_config_names_those_that_it_takes(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    ranks = ("--ranks", "4") if command == "simulate" else ()
    result = CliRunner().invoke(app, [command, "--config", "dmo", *ranks])
    assert result.exit_code == 2
    assert "error: 'dmo' is no file, and no config of that name ships" in result.stderr
    *_, names = result.stderr.strip().rpartition("one of ")
    kinds = {"train": [TrainConfig], "bench": [BenchConfig]}.get(command, [TrainConfig, PlanConfig])
    assert names.split(", ") == [name for name, kind in RUNS.items() if kind in kinds]
