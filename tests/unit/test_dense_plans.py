"""The output of `plan` and `simulate` for a dense part described in a config."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from torchrec_2dsp.cost.calibration import Calibration, KernelCost
from torchrec_2dsp.cost.dense import Transformer
from torchrec_2dsp.errors import CalibrationError
from torchrec_2dsp.programs.cli.app import app

pytestmark = pytest.mark.dealt_file

KNOWN = "configs/hardware/emulated_1gbit.toml"
DATA = '{num_dense=2, features=[{name="a", num_rows=5000}, {name="b", num_rows=9}]}'


MATMUL = KernelCost(base_s=1e-5, per_item_s=1e-11, per_byte_s=1e-10)


def measured(matmul: KernelCost | None = MATMUL) -> Calibration:
    """Return a calibration that knows matrix products, or one from before they were measured."""
    known = Calibration.load(KNOWN)
    return known.model_copy(update={"kernels": known.kernels.model_copy(update={"matmul": matmul})})


def config(folder: Path, calibration: str, dense: str) -> str:
    measured().save(folder / "measured.toml")
    measured(None).save(folder / "old.toml")
    path = folder / "plan.toml"
    path.write_text(
        f"data = {DATA}\n[machines]\ncalibration = '{calibration}'\nreserved = 0.5\n{dense}\n"
    )
    return str(path)


TRANSFORMER = "[dense.transformer]\nnum_blocks = 8\ndim = 128\nlength = 20\n"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, " ".join(result.output.split())


def test_ways_to_run_the_layers_are_compared(tmp_path: Path) -> None:
    code, text = run("plan", "--config", config(tmp_path, "measured.toml", TRANSFORMER))
    assert code == 0, text
    for words in ("The dense part, by predicted time", "DDP", "fully sharded", "pp 2", "tp 2"):
        assert words in text


def test_worlds_have_a_best_way_each(tmp_path: Path) -> None:
    path = config(tmp_path, "measured.toml", TRANSFORMER)
    code, text = run("simulate", "--config", path, "--ranks", "4,16")
    assert code == 0, text
    assert "By itself it is run best so:" in text


@pytest.mark.parametrize(
    ("calibration", "dense", "words"),
    [
        ("old.toml", TRANSFORMER, "is from before products of matrices were"),
        (
            "measured.toml",
            "[dense]\nforward_ms = 1.0\n" + TRANSFORMER,
            "takes the place of forward_ms",
        ),
        (
            "measured.toml",
            TRANSFORMER.replace("dim = 128", "dim = 100000"),
            "no way to run the dense part fits",
        ),
    ],
)
def test_what_can_not_be_is_said(tmp_path: Path, calibration: str, dense: str, words: str) -> None:
    code, text = run("plan", "--config", config(tmp_path, calibration, dense))
    assert code != 0
    assert words in text


def test_a_block_has_the_work_of_its_products() -> None:
    """Twelve products of the width with itself per item, and two in attention."""
    kernels = measured().kernels
    (block,) = Transformer(num_blocks=1, dim=64, length=10).layers(kernels).layers
    products = 10 * (2 * 12 * 64**2 + 4 * 10 * 64)
    moved_bytes = 4 * 10 * 64 * (8 + 4)
    assert block.forward_s == pytest.approx(products * 1e-11 + moved_bytes * 1e-10)
    assert block.backward_s == pytest.approx(2 * block.forward_s)
    assert block.parameter_bytes == 4 * 12 * 64**2
    with pytest.raises(CalibrationError, match="make one with the calibrate command"):
        Transformer(num_blocks=1, dim=64, length=10).layers(measured(None).kernels)
