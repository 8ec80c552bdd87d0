"""Calibrations: files, fits and topologies; and workloads from models."""

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

import torchrec_2dsp as tdsp
from tests.support.planning import with_part
from torchrec_2dsp.access.table_access import TableAccess
from torchrec_2dsp.cost.calibration import BagCost, KernelCost
from torchrec_2dsp.cost.collectives import CollectiveCost, Span, Traffic, all_to_all
from torchrec_2dsp.cost.measuring.calibrate import memory_limits
from torchrec_2dsp.cost.measuring.fit import (
    CollectiveSample,
    KernelSample,
    KernelWork,
    Timed,
    fit_collective,
    fit_kernel,
    unexplained,
)
from torchrec_2dsp.cost.workload import TableWork, Workload
from torchrec_2dsp.errors import CalibrationError
from torchrec_2dsp.programs.data.synthetic import SparseFeature, SyntheticConfig
from torchrec_2dsp.programs.models.planned import true_access

SHIPPED = sorted(Path("configs/hardware").glob("*.toml"))
KNOWN = Path("configs/hardware/emulated_1gbit.toml").read_text()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_calibrations_are_read_and_written_alike(path: Path, tmp_path: Path) -> None:
    calibration = tdsp.Calibration.load(path)
    calibration.save(tmp_path / "again.toml")
    assert tdsp.Calibration.load(tmp_path / "again.toml") == calibration
    assert calibration.hardware.name == path.stem


def refusal(text: str, folder: Path) -> str:
    """Return the error text for a calibration file with this content."""
    path = folder / "x.toml"
    path.write_text(text)
    with pytest.raises(CalibrationError) as refused:
        tdsp.Calibration.load(path)
    return str(refused.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("format = 2", "is no calibration of format 3: format: .* make one with the calibrate"),
        ("format = 3", "is no calibration of format 3: hardware: Field required"),
        ("format = ", "is not TOML"),
    ],
)
def test_other_files_are_refused(text: str, error: str, tmp_path: Path) -> None:
    assert re.search(error, refusal(text, tmp_path))


def test_a_negative_or_unknown_constant_is_named(tmp_path: Path) -> None:
    negative = refusal(KNOWN.replace("base_s = ", "base_s = -1", 1), tmp_path)
    assert re.search(r"collectives\.all_to_all\.base_s: .*greater", negative)
    unknown = refusal(KNOWN.replace("base_s = ", "bass_s = ", 1), tmp_path)
    assert "collectives.all_to_all." in unknown


@pytest.mark.parametrize("value", ["inf", "nan", "-1.0", "true", '"1.0"', "9" * 5_000])
def test_constants_are_finite_numbers(value: str, tmp_path: Path) -> None:
    of_call = re.sub(r"base_s = .*", f"base_s = {value}", KNOWN, count=1)
    for text in (of_call, f"turn_s = {value}\n{KNOWN}"):
        assert "x.toml is no" in refusal(text, tmp_path)


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
    text, count = re.subn(rf"^{name} = .*", f"{name} = {value}", KNOWN, count=1, flags=re.MULTILINE)
    assert count == 1
    assert f"{name}: Input should be less than" in refusal(text, tmp_path)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(
        CalibrationError,
        match=r"nowhere\.toml can't be read: No such file or directory; use a path, or one of .*, "
        "emulated_200mbit,",
    ):
        tdsp.Calibration.load("nowhere.toml")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_calibrations_load_by_name_from_anywhere(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tdsp.Calibration.load(path)
    monkeypatch.chdir(tmp_path)
    assert tdsp.Calibration.load(path.stem) == shipped


def test_the_topology_has_the_speed_of_a_rank_and_its_share_of_the_link() -> None:
    calibration = tdsp.Calibration.load("emulated_1gbit")
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
    calibration = tdsp.Calibration.load("emulated_1gbit")
    nccl = with_part(calibration, "collectives", full_duplex_all_to_all=None)
    assert nccl.all_to_all(full_duplex=True) == nccl.all_to_all(full_duplex=False)
    assert calibration.all_to_all(full_duplex=True) != calibration.all_to_all(full_duplex=False)


def test_a_calibration_of_one_host_does_not_cover_two() -> None:
    known = tdsp.Calibration.load("emulated_1gbit")
    known.check_covers(world_size=8, local_world_size=2)
    cost = known.collectives.all_to_all.model_copy(update={"link_s_per_byte": None})
    one_host = with_part(known, "collectives", all_to_all=cost)
    one_host.check_covers(world_size=2, local_world_size=2)
    with pytest.raises(CalibrationError, match="nothing travels across hosts, and here are 8"):
        one_host.check_covers(world_size=8, local_world_size=2)


def test_other_hardware_is_told_apart() -> None:
    calibration = tdsp.Calibration.load("emulated_1gbit")
    known = calibration.hardware.processor
    assert calibration.differences(local_world_size=2, device="cpu") == []
    assert calibration.differences(local_world_size=2, device="cpu", processor=known) == []
    two = with_part(calibration, "hardware", processor=f"another and {known}")
    assert two.differences(local_world_size=2, device="cpu", processor=known) == []
    assert calibration.differences(local_world_size=2, device="cpu", processor="another") == [
        f"the processor is another, and was {known}"
    ]
    assert calibration.differences(local_world_size=8, device="cuda") == [
        "ranks per host: 8, and 2 when measured",
        "tables are on cuda, and were on cpu",
    ]


def test_a_topology_may_be_of_other_devices_of_which_the_memory_is_not_known() -> None:
    known = tdsp.Calibration.load("emulated_1gbit")
    known = with_part(known, "hardware", memory_bytes=12_345)
    own, other = known.topology(4, 2), known.topology(4, 2, device="cuda")
    assert (own.compute_device, own.devices[0].storage.ddr) == ("cpu", 12_345)
    assert other.compute_device == "cuda"
    assert other.devices[0].storage.hbm != 12_345
    assert other.inter_host_bw == own.inter_host_bw


@pytest.mark.parametrize(
    ("own_groups", "files", "limits"),
    [
        ("0::/", {"memory.max": "4096"}, [4096]),
        ("0::/", {"memory.max": "max"}, []),
        ("0::/job/step", {"job/memory.max": "7", "job/step/memory.max": "max"}, [7]),
        ("3:cpu:/a\n4:memory:/a", {"memory/a/memory.limit_in_bytes": "9", "memory.max": "1"}, [9]),
        ("0::/elsewhere", {"memory.max": "5"}, [5]),
        (None, {"memory.max": "5"}, []),
    ],
)
def test_the_memory_of_a_container_is_known(
    tmp_path: Path, own_groups: str | None, files: dict[str, str], limits: list[int]
) -> None:
    listed, root = tmp_path / "cgroup", tmp_path / "root"
    if own_groups is not None:
        listed.write_text(f"{own_groups}\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    assert list(memory_limits(listed, root)) == limits


IN_HOST, ACROSS, ALL = Span(2, 2, 1), Span(2, 1, 2), Span(4, 2, 1)
TRUTH = CollectiveCost(
    base_s=0.0004, per_peer_s=0.0002, local_s_per_byte=2e-9, link_s_per_byte=8e-9
)
SIZES = [2.0**power for power in range(12, 25, 3)]


def samples(truth: CollectiveCost, spans: list[Span], noise: float = 0.0) -> list[CollectiveSample]:
    generator = np.random.default_rng(3)
    fitted = []
    for span in spans:
        for size in SIZES:
            moved = all_to_all(span, size / span.num_ranks)
            seconds = truth.seconds(span, moved) * (1 + noise * generator.standard_normal())
            fitted.append(CollectiveSample(span, moved, Timed(seconds, noise * seconds)))
    return fitted


@pytest.mark.parametrize("link", [8e-9, 2e-10], ids=["slow link", "link faster than the host"])
def test_planted_coefficients_are_found(link: float) -> None:
    truth = TRUTH.model_copy(update={"link_s_per_byte": link})
    fitted = fit_collective(samples(truth, [IN_HOST, ACROSS, ALL]))
    for name in ("base_s", "per_peer_s", "local_s_per_byte", "link_s_per_byte"):
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=0.02), name
    assert fitted.median_error < 1e-3


def test_noise_leaves_the_bytes_known() -> None:
    fitted = fit_collective(samples(TRUTH, [IN_HOST, ACROSS, ALL], noise=0.1))
    assert fitted.link_s_per_byte == pytest.approx(8e-9, rel=0.15)
    assert fitted.local_s_per_byte == pytest.approx(2e-9, rel=0.3)
    assert 0.01 < fitted.median_error < 0.2


def test_what_no_sample_tells_of_stays_unknown_and_is_refused_when_used() -> None:
    fitted = fit_collective(samples(TRUTH, [IN_HOST]))
    assert fitted.link_s_per_byte is None
    assert fitted.seconds(IN_HOST, all_to_all(IN_HOST, 1e6)) > 0.001
    with pytest.raises(CalibrationError, match="nothing travels across hosts"):
        fitted.seconds(ALL, all_to_all(ALL, 1e6))


def test_the_slower_way_counts() -> None:
    """Ranks send inside their host and across hosts at the same time, so the longer one counts."""
    constant = TRUTH.base_s + 3 * TRUTH.per_peer_s
    assert TRUTH.seconds(ALL, Traffic(1e6, 1e6)) == pytest.approx(constant + 8e-3)
    assert TRUTH.seconds(ALL, Traffic(1e7, 1e6)) == pytest.approx(constant + 2e-2)


def test_kernels_are_found() -> None:
    truth = KernelCost(base_s=1e-4, per_item_s=5e-8, per_byte_s=1e-9)
    fitted = fit_kernel(
        [
            KernelSample(work, Timed(1e-4 + truth.seconds(*work[:2])))
            for items in (4_096.0, 16_384.0, 65_536.0)
            for dim in (16, 64, 128)
            for work in [KernelWork(items, items * dim * 4)]
        ],
    )
    assert fitted.base_s == pytest.approx(1e-4, rel=0.01)
    assert fitted.per_item_s == pytest.approx(5e-8, rel=0.01)
    assert fitted.per_byte_s == pytest.approx(1e-9, rel=0.01)


def test_work_on_bags_is_told_apart() -> None:
    """Costs per id, vector and row are fitted from bags with 1 or 16 equal or distinct ids."""
    truth = BagCost(
        base_s=1e-4,
        per_item_s=5e-9,
        per_byte_s=1e-11,
        per_vector_byte_s=3e-10,
        per_row_byte_s=4e-10,
    )
    samples: list[KernelSample] = []
    for ids, dim, bag, distinct in product((4_096.0, 65_536.0), (16, 64, 128), (1, 16), (1, 0)):
        row = dim * 4.0
        bags = {"vector_bytes": ids / bag * row, "row_bytes": distinct * ids * row}
        seconds = truth.base_s + truth.of_bags(ids, ids * row, **bags)
        samples.append(KernelSample(KernelWork(ids, ids * row, **bags), Timed(seconds)))
    fitted = fit_kernel(samples)
    assert isinstance(fitted, BagCost)
    for name in ("base_s", "per_item_s", "per_byte_s", "per_vector_byte_s", "per_row_byte_s"):
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=0.01), name


def test_work_is_never_free_because_times_scatter() -> None:
    """The shortest time becomes the cost per call where longer work happened to be quicker."""
    seconds = {4_096.0: 3e-3, 16_384.0: 2e-3, 65_536.0: 2.5e-3}
    fitted = fit_kernel(
        [KernelSample(KernelWork(n, 256 * n), Timed(took)) for n, took in seconds.items()]
    )
    assert fitted.base_s == pytest.approx(2e-3)
    assert fitted.seconds(65_536.0, 256 * 65_536.0) > 0


def test_times_that_nothing_explains_are_named() -> None:
    generator = np.random.default_rng(1)
    wild = [
        CollectiveSample(ALL, Traffic(size, size), Timed(float(10 ** generator.uniform(-3, 0))))
        for size in SIZES * 4
    ]
    calibration = tdsp.Calibration.load("emulated_1gbit")
    assert not unexplained(calibration, 1.0)
    doubtful = with_part(calibration, "collectives", all_reduce=fit_collective(wild))
    assert re.search("^all_reduce: the cost model doesn't fit .* idle", unexplained(doubtful, 1.0))
    assert not unexplained(doubtful, 10.0)
    find = fit_kernel([KernelSample(KernelWork(1.0, 0.0), sample.timed) for sample in wild])
    assert unexplained(with_part(calibration, "kernels", find=find), 1.0).startswith("find:")


def test_the_median_of_repeats_counts_and_half_of_them_scatter() -> None:
    assert Timed.of([3.0, 1.0, 2.0, 9.0, 2.0]) == Timed(2.0, 1.0)


def model() -> nn.Module:
    bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name="t_item",
                num_embeddings=1_000,
                embedding_dim=8,
                feature_names=["item", "last_item"],
                data_type=DataType.FP16,
            )
        ],
        device=torch.device("meta"),
    )
    sequences = EmbeddingCollection(
        tables=[
            EmbeddingConfig(
                name="t_word", num_embeddings=500, embedding_dim=16, feature_names=["words"]
            )
        ],
        device=torch.device("meta"),
    )
    return nn.ModuleDict({"bags": bags, "sequences": sequences})


def stats(**tables: TableAccess) -> tdsp.AccessStats:
    return tdsp.AccessStats(tables)


def test_tables_of_bags_and_sequences() -> None:
    fitted = Workload.of_model(model(), batch_size=32)
    item, word = fitted.table("t_item"), fitted.table("t_word")
    assert (item.num_rows, item.dim, item.element_bytes) == (1_000, 8, 2)
    assert (item.num_features, item.ids_per_sample, item.is_sequence) == (2, 2.0, False)
    assert (word.num_features, word.ids_per_sample, word.is_sequence) == (1, 1.0, True)
    assert fitted.num_without_access == 2


@pytest.mark.parametrize(
    ("constraint", "ids"),
    [
        (ParameterConstraints(pooling_factors=[3.0, 0.5]), 3.5),
        (ParameterConstraints(pooling_factors=[3.0]), 6.0),
        (ParameterConstraints(pooling_factors=[3.0, 0.5], num_poolings=[1.0, 2.0]), 4.0),
        (ParameterConstraints(num_poolings=[2.0, 3.0]), 5.0),
        (ParameterConstraints(pooling_factors=[3.0, 0.5], batch_sizes=[8, 2]), 6.25),
        (ParameterConstraints(sharding_types=["row_wise"]), 2.0),
    ],
)
def test_ids_per_sample_follow_pooling_factors(
    constraint: ParameterConstraints, ids: float
) -> None:
    fitted = Workload.of_model(model(), batch_size=4, constraints={"t_item": constraint})
    assert fitted.table("t_item").ids_per_sample == ids


@pytest.mark.parametrize(
    ("what", "constraint"),
    [
        ("pooling_factors", ParameterConstraints(pooling_factors=[3.0, 1.0, 2.0])),
        ("num_poolings", ParameterConstraints(pooling_factors=[3.0], num_poolings=[1.0] * 3)),
        ("batch_sizes", ParameterConstraints(batch_sizes=[1, 2, 3])),
    ],
)
def test_numbers_for_other_features_are_refused(
    what: str, constraint: ParameterConstraints
) -> None:
    error = f"table 't_item': {what} has 3 numbers, and the table 2 features; give one for each"
    with pytest.raises(tdsp.errors.ConfigError, match=error):
        Workload.of_model(model(), batch_size=1, constraints={"t_item": constraint})


def test_a_log_says_how_many_ids_there_are_where_nobody_else_does() -> None:
    access = stats(t_item=TableAccess.of_counts([30.0, 10.0], num_samples=10))
    counted = Workload.of_model(model(), batch_size=1, access=access)
    assert counted.table("t_item").ids_per_sample == 4.0
    assert counted.num_without_access == 1
    reported = ParameterConstraints(pooling_factors=[2.5])
    both = Workload.of_model(model(), batch_size=1, access=access, constraints={"t_item": reported})
    assert both.table("t_item").ids_per_sample == 5.0


def test_statistics_of_another_model_are_refused() -> None:
    access = stats(t_user=TableAccess.of_counts([1.0], num_samples=1))
    with pytest.raises(
        tdsp.errors.ConfigError, match="'t_user', which the model doesn't have; it has t_"
    ):
        Workload.of_model(model(), batch_size=1, access=access)


def work(access: TableAccess | None = None) -> TableWork:
    return TableWork(name="t", num_rows=1_000, dim=4, ids_per_sample=1.0, access=access)


@pytest.mark.parametrize("num_hot", [0, 100, 1_000])
def test_without_statistics_rows_are_used_alike(num_hot: int) -> None:
    """The expected number of distinct rows matches random draws."""
    generator = np.random.default_rng(0)
    draws = [set(generator.integers(0, 1_000, 700).tolist()) for _ in range(300)]
    drawn = np.mean([len({row for row in entry if row >= num_hot}) for entry in draws])
    fitted = work().expected_distinct(700, num_hot=num_hot)
    assert fitted == pytest.approx(drawn, rel=0.01, abs=1e-9)
    assert work().hot_share(num_hot) == num_hot / 1_000


def test_with_statistics_hot_rows_are_the_hottest() -> None:
    access = TableAccess.of_counts(1e5 / np.arange(1, 1_001), num_samples=1e6)
    counted = work(access)
    share = float((1 / np.arange(1, 11)).sum() / (1 / np.arange(1, 1_001)).sum())
    assert counted.hot_share(10) == pytest.approx(share)
    whole, cold = counted.expected_distinct(500), counted.expected_distinct(500, num_hot=10)
    # The ten hottest rows are in nearly every 500 lookups.
    assert whole - cold == pytest.approx(10, abs=0.5)
    blocks = counted.distinct_by_block(500, 4)
    assert blocks.sum() == pytest.approx(whole)
    assert blocks[0] > 2 * blocks[1] > 2 * blocks[3] > 0
    assert counted.distinct_by_block(500, 4, num_hot=250)[0] == pytest.approx(0.0)


def test_of_large_tables_the_hottest_rows_are_known_and_the_others_a_tail() -> None:
    """A tail hardly changes a batch's expected distinct rows, and never lowers them."""
    data = SyntheticConfig(features=(SparseFeature(name="a", num_rows=50_000, skew=1.05),))
    whole, part = (true_access(data, max_rows=known)["t_a"] for known in (50_000, 5_000))
    assert (whole.tail_rows, part.tail_rows, len(part.rows)) == (0, 45_000, 5_000)
    assert part.num_lookups == pytest.approx(whole.num_lookups)
    assert part.lookups_per_sample == pytest.approx(1.0)
    assert part.share_of(100) == pytest.approx(whole.share_of(100))
    for batch in (100, 4_096):
        exact, near = whole.expected_distinct(batch), part.expected_distinct(batch)
        assert exact <= near * (1 + 1e-9) <= 1.02 * exact
