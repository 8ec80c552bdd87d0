"""Calibration files: written, read, refused, and turned into TorchRec's topology."""

import re
from pathlib import Path

import pytest

import torchrec_2dsp as tdsp

SHIPPED = sorted(Path("configs/hardware").glob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_calibrations_are_read_and_written_alike(path: Path, tmp_path: Path) -> None:
    calibration = tdsp.Calibration.load(path)
    calibration.save(tmp_path / "again.toml")
    assert tdsp.Calibration.load(tmp_path / "again.toml") == calibration
    assert calibration.hardware.name == path.stem


def test_something_is_shipped() -> None:
    assert {"emulated_200mbit", "emulated_1gbit", "emulated_no_limit"} <= {
        path.stem for path in SHIPPED
    }


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("format = 2", "is no calibration of format 3: format: .* make one with the calibrate"),
        ("format = 3", "is no calibration of format 3: hardware: Field required"),
        ("format = ", "is not TOML"),
    ],
)
def test_other_files_are_refused(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(tdsp.errors.CalibrationError, match=error):
        tdsp.Calibration.load(path)


def test_a_negative_or_unknown_constant_is_named(tmp_path: Path) -> None:
    text = Path("configs/hardware/emulated_1gbit.toml").read_text()
    path = tmp_path / "x.toml"
    path.write_text(text.replace("base_s = ", "base_s = -1", 1))
    with pytest.raises(
        tdsp.errors.CalibrationError, match=r"collectives\.all_to_all\.base_s: .*greater"
    ):
        tdsp.Calibration.load(path)
    path.write_text(text.replace("base_s = ", "bass_s = ", 1))
    with pytest.raises(tdsp.errors.CalibrationError, match=r"collectives\.all_to_all\."):
        tdsp.Calibration.load(path)


@pytest.mark.parametrize("value", ["inf", "nan", "-1.0", "true", '"1.0"', "9" * 5_000])
def test_constants_are_finite_numbers(value: str, tmp_path: Path) -> None:
    text = Path("configs/hardware/emulated_1gbit.toml").read_text()
    path = tmp_path / "x.toml"
    path.write_text(re.sub(r"base_s = .*", f"base_s = {value}", text, count=1))
    with pytest.raises(tdsp.errors.CalibrationError, match=r"x\.toml is no"):
        tdsp.Calibration.load(path)
    path.write_text(f"turn_s = {value}\n{text}")
    with pytest.raises(tdsp.errors.CalibrationError, match=r"x\.toml is no"):
        tdsp.Calibration.load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hosts", "10_000_000"),
        ("ranks_per_host", "100_000"),
        ("memory_bytes", f"{10**18}"),
        ("base_s", "1e23"),
        ("per_peer_s", "1e5"),
        ("turn_s", "1e23"),
        ("local_s_per_byte", "2.0"),
        ("link_s_per_byte", "1e23"),
        ("per_item_s", "2.0"),
        ("per_byte_s", "1e23"),
        ("per_vector_byte_s", "2.0"),
        ("per_row_byte_s", "2.0"),
    ],
)
def test_absurd_numbers_are_refused(name: str, value: str, tmp_path: Path) -> None:
    text = Path("configs/hardware/emulated_1gbit.toml").read_text()
    path = tmp_path / "x.toml"
    text, count = re.subn(rf"^{name} = .*", f"{name} = {value}", text, count=1, flags=re.MULTILINE)
    assert count == 1
    path.write_text(text)
    with pytest.raises(tdsp.errors.CalibrationError, match=rf"{name}: Input should be less than"):
        tdsp.Calibration.load(path)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(
        tdsp.errors.CalibrationError, match=r"nowhere\.toml can't be read: No such file"
    ):
        tdsp.Calibration.load("nowhere.toml")


def test_the_topology_has_the_speed_of_a_rank_and_its_share_of_the_link() -> None:
    calibration = tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml")
    topology = calibration.topology(world_size=8, local_world_size=2)
    cost = calibration.all_to_all(full_duplex=True)
    assert cost.local_s_per_byte
    assert cost.link_s_per_byte
    # TorchRec counts bytes per millisecond.
    assert topology.intra_host_bw == pytest.approx(1e-3 / cost.local_s_per_byte)
    assert topology.inter_host_bw == pytest.approx(1e-3 / cost.link_s_per_byte / 2)
    assert topology.compute_device == "cpu"
    assert (topology.world_size, topology.local_world_size) == (8, 2)


def test_without_a_full_duplex_all_to_all_there_is_one() -> None:
    calibration = tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml")
    collectives = calibration.collectives.model_copy(update={"full_duplex_all_to_all": None})
    nccl = calibration.model_copy(update={"collectives": collectives})
    assert nccl.all_to_all(full_duplex=True) == nccl.all_to_all(full_duplex=False)
    assert calibration.all_to_all(full_duplex=True) != calibration.all_to_all(full_duplex=False)


def test_a_calibration_of_one_host_does_not_cover_two() -> None:
    known = tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml")
    known.check_covers(world_size=8, local_world_size=2)
    cost = known.collectives.all_to_all.model_copy(update={"link_s_per_byte": None})
    collectives = known.collectives.model_copy(update={"all_to_all": cost})
    one_host = known.model_copy(update={"collectives": collectives})
    one_host.check_covers(world_size=2, local_world_size=2)
    with pytest.raises(
        tdsp.errors.CalibrationError, match="nothing travels across hosts, and here are 8"
    ):
        one_host.check_covers(world_size=8, local_world_size=2)


def test_other_hardware_is_told_apart() -> None:
    calibration = tdsp.Calibration.load("configs/hardware/emulated_1gbit.toml")
    assert calibration.differences(local_world_size=2, device="cpu") == []
    assert calibration.differences(local_world_size=8, device="cuda") == [
        "hosts have 8 ranks, and had 2",
        "tables are on cuda, and were on cpu",
    ]
