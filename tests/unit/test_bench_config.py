"""Benchmark configs: valid and refused fields, and contestants' meshes."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchrec_2dsp as tdsp
from tests.support.bench_results import bench_result, config_of
from tests.support.planning import SHARDERS, planner
from tests.support.traces import COMPUTING_US, WAITING_US, step_events
from tests.support.train_runs import click_data, click_model
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.cost.workload import DenseWork
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench import contestants, program
from torchrec_2dsp.programs.bench.config import BenchConfig, StockContestant, is_reference
from torchrec_2dsp.programs.bench.contestants import (
    planner_topology,
    tables_work,
    workload_of,
)
from torchrec_2dsp.programs.bench.process import Place
from torchrec_2dsp.programs.bench.program import calibration_warning, predicted_steps
from torchrec_2dsp.programs.bench.tracing import phases_of, profiled
from torchrec_2dsp.programs.config.config_file import load_config, make_config
from torchrec_2dsp.programs.link_speeds import LinkSpeeds
from torchrec_2dsp.programs.models.model import build_model
from torchrec_2dsp.programs.traces import RankSplit, RankTrace, StepPhase, step_mark
from torchrec_2dsp.programs.train.config import TrainConfig

CONFIGS = Path(__file__).parents[2] / "configs"
WORKLOADS = sorted((CONFIGS / "workloads").glob("*.toml"))
CONTESTANTS = {
    "fp16": {"kind": "stock", "qcomms": "fp16"},
    "duplex": {"kind": "stock", "full_duplex": True},
    "plain": {"kind": "stock"},
    "exact": {"kind": "two_d"},
    "strided": {"kind": "two_d", "num_groups": "ranks_per_host", "layout": "strided"},
    "one": {"kind": "two_d", "num_groups": 1, "hot_rows": 8},
    "ceiling": {"kind": "ceiling", "of": "exact"},
}


def test_the_reference_is_torchrec_with_nothing_changed() -> None:
    assert config_of(CONTESTANTS).reference == "plain"


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("plain", tdsp.Mesh2D(1, 8)),
        ("exact", tdsp.Mesh2D(4, 2, tdsp.RankLayout.CONTIGUOUS)),
        ("strided", tdsp.Mesh2D(2, 4, tdsp.RankLayout.STRIDED)),
        ("one", tdsp.Mesh2D(1, 8, tdsp.RankLayout.CONTIGUOUS)),
        ("ceiling", tdsp.Mesh2D(4, 2, tdsp.RankLayout.CONTIGUOUS)),
    ],
)
def test_groups_follow_hosts(name: str, mesh: tdsp.Mesh2D) -> None:
    assert config_of(CONTESTANTS).mesh(name, world_size=8, local_world_size=2) == mesh


PLAIN = {"plain": {"kind": "stock"}}


def beside(**contestant: Any) -> dict[str, dict[str, Any]]:
    """Return contestants: TorchRec, and another one."""
    return PLAIN | {"other": contestant}


def test_groups_that_do_not_divide_the_world_are_refused() -> None:
    config = config_of(beside(kind="two_d", num_groups=3))

    with pytest.raises(ConfigError, match=r"contestants\.other\.num_groups=3 does not divide"):
        config.check_world(8, 2)


@pytest.mark.parametrize(
    ("contestants", "message"),
    [
        ({}, 'none has kind = "stock" with qcomms = "fp32"'),
        ({"fp16": CONTESTANTS["fp16"]}, "nothing to compare with"),
        ({"a b": {"kind": "stock"}}, "'a b' has one of"),
        ({"a|b": {"kind": "stock"}}, r"'a|b' has one of"),
        (
            beside(kind="ceiling", of="other"),
            "contestants.other.of='other' isn't a contestant that trains; use one of plain",
        ),
        ({"plain": {"kind": "stock", "sharding_types": ["by_hand"]}}, "'by_hand' has no 2D form"),
        (
            {"plain": {"kind": "stock", "hot_rows": 3}},
            "contestants.plain.hot_rows is unknown; use one of ne_bound",
        ),
        (
            {"plain": {"kind": "magic"}},
            "kind='magic': use one of 'stock', 'two_d', 'parallelized', 'ceiling'",
        ),
        (beside(kind="two_d", num_groups="any"), 'num_groups = "any" is for by_cost = true'),
        (
            beside(kind="two_d", num_groups="any", by_cost=True, sync="WeightSync"),
            'for by_cost = true and sync = "GradientSync"',
        ),
        (
            beside(kind="two_d", by_cost=True, hot_rows=3),
            "by_cost = true chooses by itself; leave out: 3 hot rows per table",
        ),
        (
            beside(kind="parallelized", sync="WeightSync"),
            """sync='WeightSync' is chosen by kind = "parallelized"; leave it out""",
        ),
        (
            beside(kind="parallelized", num_groups=2),
            'kind = "parallelized" chooses groups by cost; leave num_groups and by_cost out',
        ),
    ],
)
def test_what_makes_no_sense_is_refused(contestants: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(contestants)

    assert message in str(caught.value)


OF_SEQUENCES = {
    "data": {"kind": "synthetic_sequences", "num_items": 50},
    "model": {"kind": "sequence"},
}


@pytest.mark.parametrize(
    ("dense", "sections", "message"),
    [
        ({"kind": "planned"}, {}, 'kind="planned" is for models with a LayerStack, and model.kind'),
        ({"kind": "planned"}, OF_SEQUENCES, 'kind="planned" needs to know the machines'),
        ({"kind": "pipelined", "recut_every": 5}, OF_SEQUENCES, "recut_every is for training"),
    ],
)
def test_dense_parts_that_cant_be_compared_are_refused(
    dense: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"contestants.plain.dense.{message}"):
        config_of({"plain": {"kind": "stock", "dense": dense}}, **sections)


def test_tables_that_torchrec_cant_look_up_are_refused() -> None:
    for device in ("cpu", "cuda"):
        overrides = ["model.table_dtype=bf16", f"schedule.device={device}"]
        with pytest.raises(ConfigError, match="can't look up tables in bf16; use"):
            load_config(BenchConfig, "bench", overrides)
    load_config(BenchConfig, "bench", ["model.table_dtype=fp16"])


def test_fewer_rounds_than_a_median_needs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"schedule\.rounds=3"):
        config_of(PLAIN, schedule={"rounds": 3})


def test_some_contestants_keep_what_they_are_compared_with() -> None:
    kept = config_of(CONTESTANTS).only(["ceiling"])

    assert list(kept.contestants) == ["plain", "exact", "ceiling"]


def test_an_unknown_contestant_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no contestant .fast.; the config has fp16"):
        config_of(CONTESTANTS).only(["fast"])


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda path: path.stem)
def test_every_workload_fits_the_comparison(workload: Path) -> None:
    config = load_config(BenchConfig, CONFIGS / "runs/bench_criteo.toml", include=workload)

    config.check_world(8, 2)
    assert click_data(config).features
    assert config.model.dim == {"mixed_bags": 96, "many_small": 32}.get(workload.stem, 64)


def test_an_override_comes_after_what_is_included() -> None:
    config = load_config(
        BenchConfig, CONFIGS / "runs/bench_criteo.toml", ["model.dim=128", "network.interface=eth9"]
    )

    assert config.model.dim == 128
    assert config.network.interface == "eth9"
    assert len(click_data(config).features) == 26


def test_a_section_gets_the_kind_of_the_included_one_before_its_paths(tmp_path: Path) -> None:
    log = '[data]\nkind = "table"\nlabel = "y"\nfeatures = [{ name = "f", num_rows = 9 }]\n'
    (tmp_path / "log.toml").write_text(log)
    (tmp_path / "run.toml").write_text(
        'include = "log.toml"\n[data]\nfiles = ["day.csv"]\n[runs.a]\n'
    )
    data: Any = load_config(TrainConfig, tmp_path / "run.toml").data
    assert data.files == (str(tmp_path / "day.csv"),)


def test_a_missing_include_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('include = "nowhere.toml"\n')

    with pytest.raises(ConfigError, match=r"nowhere\.toml can't be read"):
        load_config(BenchConfig, tmp_path / "run.toml")


def test_what_this_package_adds_to_dense_parts_is_not_stock() -> None:
    kinds = ("ddp", "fp16", "powersgd", "thresholded", "delayed", "fully_sharded", "local")
    contestants = {kind: {"kind": "stock", "dense": {"kind": kind}} for kind in kinds}
    result = bench_result(contestants=contestants, steps_ms=dict.fromkeys(kinds, [100.0] * 5))
    assert [contestant.name for contestant in result.stock()] == ["ddp", "fp16", "powersgd"]
    config = config_of(contestants)
    assert [name for name in kinds if is_reference(config.contestants[name])] == ["ddp"]


SPEEDS = LinkSpeeds(
    in_host={"all-to-all": 3e9, "all-reduce": 2e9},
    across_hosts={"all-to-all": 60e6, "all-reduce": 55e6},
)


def test_a_calibration_of_other_machines_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "configs/hardware/emulated_1gbit.toml"
    config = config_of(PLAIN, calibration=path)
    known = tdsp.Calibration.load(path).hardware.processor
    monkeypatch.setattr(program, "processor_name", lambda device: known)
    assert calibration_warning(config, local_world_size=2) == ""
    assert calibration_warning(config, local_world_size=4) == (
        f"{path} is of other machines: ranks per host: 4, and 2 when measured"
    )
    assert calibration_warning(config_of(PLAIN), 4) == ""
    monkeypatch.setattr(program, "processor_name", lambda device: "another")
    assert calibration_warning(config, local_world_size=2) == (
        f"{path} is of other machines: the processor is another, and was {known}"
    )


def test_planners_know_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(contestants, "get_local_size", lambda world_size: 2)
    config = config_of(PLAIN)
    measured = planner_topology(config, "measured", SPEEDS)
    # TorchRec counts bytes per millisecond.
    assert (measured.intra_host_bw, measured.inter_host_bw) == (3e6, 60e3)
    default = planner_topology(config, "default", SPEEDS)
    assert default.intra_host_bw > default.inter_host_bw > 1e6


def test_the_mean_ranks_phases_add_up_to_its_step_and_ranks_may_lack_one() -> None:
    split = RankSplit.of_trace(0, RankTrace.of_events(step_events()))

    phases = phases_of([split, replace(split, waiting_us={})])

    step_us = split.all_computing_us + split.all_waiting_us / 2
    assert sum(phase.seconds for phase in phases) == pytest.approx(step_us * 1e-6)
    seconds = {(phase.name, phase.waiting): phase.seconds for phase in phases}
    assert seconds["rows", True] == pytest.approx(WAITING_US[StepPhase.ROWS] / 2 * 1e-6)
    assert seconds["rows", False] == pytest.approx(COMPUTING_US[StepPhase.ROWS] * 1e-6)


def test_a_profile_has_the_steps_and_their_operators() -> None:
    def step() -> None:
        torch.ones(64, 64).mm(torch.ones(64, 64)).sum()

    def settle() -> None:
        torch.ones(4, 4).mm(torch.ones(4, 4))

    trace = profiled(step, 3, settle)

    assert [span.name for span in trace.steps] == [step_mark(number) for number in (1, 2, 3)]
    products = [span for span in trace.training if span.name == "aten::mm"]
    assert len(products) == 4
    assert trace.steps[-1].end_us <= products[-1].start_us, "settling ends inside the profile"


CONFIG = config_of(
    {
        "plain": {"kind": "stock"},
        "copies": {"kind": "two_d", "num_groups": 2},
        "ceiling": {"kind": "ceiling", "of": "plain"},
        "ceiling_2d": {"kind": "ceiling", "of": "copies"},
    },
    calibration=str(CONFIGS / "hardware/emulated_1gbit.toml"),
)
DENSE = DenseWork(forward_s=0.01, backward_s=0.03)
PLACE = Place(0, 4, 2)


@cache
def plans() -> dict[str, tdsp.Plan2D]:
    model = build_model(click_data(CONFIG).dataset(), click_model(CONFIG), tables_device="meta")
    one_group, two_groups = (
        planner(mesh=tdsp.Mesh2D(num_groups, 4 // num_groups)).plan(model, SHARDERS)
        for num_groups in (1, 2)
    )
    return {
        "plain": one_group,
        "copies": two_groups,
        "ceiling": one_group,
        "ceiling_2d": two_groups,
    }


def test_a_ceiling_says_what_a_step_takes_beside_its_tables() -> None:
    ceilings = {"ceiling": 0.1, "ceiling_2d": 0.5}
    steps, dense_from = predicted_steps(CONFIG, plans(), DENSE, PLACE, ceilings)
    assert set(steps) == {"plain", "copies"}
    assert dense_from == ("ceiling",)
    of_tables = StepCost(**steps["plain"])
    computed_s = of_tables.lookup_s + of_tables.rows_s + of_tables.update_s
    assert 0 < computed_s < 0.1
    assert of_tables.dense_s + computed_s == pytest.approx(0.1)
    assert steps["copies"]["dense_s"] == of_tables.dense_s


@pytest.mark.parametrize("ceilings", [{}, {"ceiling_2d": 0.5}, {"ceiling": 1e-9}])
def test_without_a_ceiling_that_can_tell_the_timed_model_counts(ceilings: dict[str, float]) -> None:
    steps, dense_from = predicted_steps(CONFIG, plans(), DENSE, PLACE, ceilings)
    assert dense_from == ()
    assert steps["plain"]["dense_s"] == pytest.approx(0.04)


def test_without_a_calibration_nothing_is_predicted() -> None:
    assert predicted_steps(CONFIG, plans(), None, PLACE, {"ceiling": 0.1}) == ({}, ())


def test_one_call_is_priced_with_the_buckets_that_it_makes() -> None:
    contestants = PLAIN | {"one": {"kind": "parallelized"}}
    config = config_of(contestants, calibration=CONFIG.calibration)
    same = dict.fromkeys(contestants, plans()["plain"])
    dense = replace(DENSE, gradient_bytes=1e6)
    over_hosts, in_host = (
        predicted_steps(config, same, dense, Place(0, 4, ranks_per_host), {})[0]
        for ranks_per_host in (2, 4)
    )
    assert over_hosts["one"]["hidden_s"] < over_hosts["plain"]["hidden_s"] <= 0
    assert in_host["one"] == in_host["plain"]


def test_a_search_prices_the_buckets_that_it_is_told() -> None:
    calibration, hidden_s = tdsp.Calibration.load("emulated_200mbit_per_rank"), []
    for has_small_buckets in (False, True):
        search = tdsp.Planner2D(calibration.topology(4, 2), 1024, calibration=calibration)
        if has_small_buckets:
            search.expect_small_buckets()
        model = build_model(click_data(CONFIG).dataset(), click_model(CONFIG), tables_device="meta")
        search.plan(model, SHARDERS)
        hidden_s.append(search.explain().cost.hidden_s)
    assert hidden_s[1] < hidden_s[0] == 0


def test_numbers_in_bf16_travel_as_those_in_fp16() -> None:
    tables = tables_work(CONFIG)
    in_fp16, in_bf16 = (
        workload_of(make_config(StockContestant, {"qcomms": qcomms}), tables, 8, DENSE)
        for qcomms in ("fp16", "bf16")
    )
    assert in_bf16 == in_fp16
    assert in_bf16.forward_wire_bytes == 2
