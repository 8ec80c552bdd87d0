"""A whole benchmark: measured and failed contestants, and their numbers."""

import statistics
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.bench_results import NO_LINKS, bench_result, with_figures
from tests.support.faulty_bench import CONFIG
from tests.support.parity import local_shards
from tests.support.programs import forked
from tests.support.ranks import RankPool
from tests.support.train_runs import SEQUENCES, click_data
from torchrec_2dsp.cost.step_cost import StepCost
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.programs.bench.config import BenchConfig
from torchrec_2dsp.programs.bench.contestants import build_trainer
from torchrec_2dsp.programs.bench.page import markdown_report
from torchrec_2dsp.programs.bench.replay import Mode, ReplayGroup, replay_backend
from torchrec_2dsp.programs.bench.results import BenchResult, ContestantResult, Outcome
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.data.synthetic import make_batch

WHOLE = pytest.mark.dealt_suite("a whole benchmark", seconds=60)


@pytest.fixture(scope="module")
def result_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "result.json"
    done = forked("tests.support.faulty_bench", str(path))
    assert path.exists(), done.stdout + done.stderr
    return path


@pytest.fixture(scope="module")
def result(result_path: Path) -> BenchResult:
    return BenchResult.load(result_path)


def named(result: BenchResult, name: str) -> ContestantResult:
    return next(contestant for contestant in result.contestants if contestant.name == name)


@WHOLE
def test_failures_are_told_apart_and_the_others_are_measured(
    result_path: Path, result: BenchResult
) -> None:
    assert result_path.with_suffix(".states").read_text() == "T", "others rested meanwhile"
    outcomes = {contestant.name: contestant.outcome.value for contestant in result.contestants}
    assert outcomes == dict.fromkeys(CONFIG["contestants"], "measured") | {
        "refused": "crashed",
        "dies": "crashed",
        "hangs": "hung",
        "learns_faster": "disqualified",
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("refused", "in warm_up: rank 0: "),
        ("dies", "rank 1: the process died in "),
        ("hangs", "block took over 12 s"),
        ("learns_faster", "from that of planner"),
    ],
)
@WHOLE
def test_reasons_are_given(result: BenchResult, name: str, message: str) -> None:
    assert message in named(result, name).reason


@pytest.mark.parametrize("name", ["row_wise", "data_parallel", "exact", "hot", "duplex"])
@WHOLE
def test_exact_contestants_train_as_the_reference_does(result: BenchResult, name: str) -> None:
    contestant, reference = named(result, name), named(result, "planner")

    assert contestant.loss_gap is not None
    assert contestant.loss_gap < 2e-6
    assert len(contestant.losses) >= 4 + 5
    # There was something to learn, or equal losses would say nothing.
    assert max(reference.losses) - min(reference.losses) > 1e-3


@WHOLE
def test_every_measured_contestant_has_all_figures(result: BenchResult) -> None:
    for contestant in result.measured():
        assert [block.round for block in contestant.blocks] == list(range(5))
        assert all(block.step_s > 0 and 1 <= block.num_steps <= 4 for block in contestant.blocks)
        assert all(block.probe_s for block in contestant.blocks)
        assert contestant.peak_memory_bytes
        assert contestant.phases
        assert contestant.sharding


@WHOLE
def test_steps_are_predicted_from_the_calibration(result: BenchResult) -> None:
    costs = {
        contestant.name: StepCost(**contestant.predicted)
        for contestant in result.contestants
        if contestant.predicted is not None
    }
    ceilings = {"ceiling", "ceiling_of_one"}
    assert {contestant.name for contestant in result.measured()} - set(costs) == ceilings
    # The same for all: the rest of the model, as the ceiling of one copy shows.
    assert {cost.dense_s for cost in costs.values()} == {costs["planner"].dense_s}
    assert result.dense_from == ("ceiling_of_one",)
    blocks = named(result, "ceiling_of_one").blocks
    planner = costs["planner"]
    computed_s = planner.lookup_s + planner.rows_s + planner.update_s
    ceiling_s = statistics.median(block.step_s for block in blocks)
    assert planner.dense_s + computed_s == pytest.approx(ceiling_s)
    assert (costs["hot"].hot_rows_s > 0, costs["exact"].sync_s > 0) == (True, True)
    assert (costs["planner"].hot_rows_s, costs["planner"].sync_s) == (0, 0)
    assert costs["data_parallel"].forward_exchange_s == 0 < costs["row_wise"].forward_exchange_s


@WHOLE
def test_row_gradients_travel_only_where_replicas_merge_them(result: BenchResult) -> None:
    travelling = {contestant.name for contestant in result.measured() if contestant.row_travel}
    # The search may choose several groups, or one.
    assert travelling - {"searched"} == {"exact", "hot", "rounded", "ceiling"}
    for name in travelling:
        travel = named(result, name).row_travel
        assert travel is not None
        # For one step, not the time in which others were measured.
        longest_s = 10 * max(block.step_s for block in named(result, name).blocks)
        assert 0 < travel.window_s < longest_s
        assert 0 < travel.waited_s < longest_s


@WHOLE
def test_transports_say_what_they_save(result: BenchResult) -> None:
    encoded = {measured.name: measured.encoded for measured in result.measured()}
    encoded = {name: saved for name, saved in encoded.items() if saved}
    assert set(encoded) == {"rounded"}
    rounded = encoded["rounded"]
    # Rows with 8 numbers become 8 bytes and a scale with two.
    assert rounded.rows_bytes == pytest.approx(rounded.rows_fp32_bytes * 10 / 32)
    assert rounded.rows_bytes > 0
    # Hot rows' gradients are halved, and their row numbers aren't.
    assert 1 < rounded.replicas_fp32_bytes / rounded.replicas_bytes < 2


@WHOLE
def test_dense_gradients_are_counted_where_they_are_thresholded(result: BenchResult) -> None:
    dense = {measured.name: measured.dense for measured in result.measured() if measured.dense}
    assert set(dense) == {"touched"}
    # All layers are small enough to be sent as a whole.
    assert dense["touched"].density == dense["touched"].residual_norm == 0
    assert dense["touched"].sent_bytes == dense["touched"].fp32_bytes > 0


@WHOLE
def test_the_interface_carries_what_the_collectives_send(result: BenchResult) -> None:
    """It carries more than that: the loopback also has other programs' traffic."""
    for name in ("planner", "row_wise", "data_parallel", "duplex"):
        contestant = named(result, name)
        counted = sum(traffic.sent_bytes for traffic in contestant.traffic)
        assert counted > 1_000
        for block in contestant.blocks:
            assert block.link_bytes is not None
            assert block.link_bytes > counted


@WHOLE
def test_the_full_duplex_exchange_is_counted_too(result: BenchResult) -> None:
    planner, duplex = (named(result, name).traffic for name in ("planner", "duplex"))
    calls = [{part.name: part.calls for part in traffic} for traffic in (planner, duplex)]
    assert calls[0]["all_to_all_single"] == calls[1]["all_to_all_single"] > 0


@WHOLE
def test_a_ceiling_communicates_nothing_and_waits_for_nobody(result: BenchResult) -> None:
    ceiling = named(result, "ceiling")

    assert ceiling.losses == ()
    assert ceiling.loss_gap is None
    assert not any(phase.waiting for phase in ceiling.phases)


def learning(rank: int, world_size: int, name: str) -> list[list[torch.Tensor]]:
    """Return all weights after one step, after two, and after a step without learning."""
    config = make_config(BenchConfig, CONFIG)
    mesh = config.mesh(name, world_size, world_size)
    trainer = build_trainer(config, config.planned[name], mesh, NO_LINKS)
    batches = iter(
        make_batch(
            click_data(config), step=step, global_batch_size=32, rank=rank, world_size=world_size
        )
        for step in range(9)
    )
    seen = []
    for step in range(3):
        if step == 2:
            trainer.stop_learning()
        trainer.pipeline.progress(batches)
        weights = trainer.model.state_dict().values()
        seen.append([part.clone() for weight in weights for part, _ in local_shards(weight)])
    return seen


@pytest.mark.parametrize("name", ["planner", "exact", "data_parallel"])
def test_a_ceiling_can_train_without_learning(ranks2: RankPool, name: str) -> None:
    for first, second, third in ranks2.run(learning, name):
        assert any(not torch.equal(*pair) for pair in zip(first, second, strict=True))
        assert all(torch.equal(*pair) for pair in zip(second, third, strict=True))


def replayed(rank: int, world_size: int) -> list[float]:
    group = dist.new_group(backend=replay_backend())
    assert group is not None

    def step(value: float) -> float:
        contestant = torch.full((2,), value + rank)
        dist.all_reduce(contestant, group=group)
        whole = torch.empty(2 * world_size)
        work = dist.all_to_all_single(
            whole, contestant.repeat(world_size), group=group, async_op=True
        )
        assert work is not None
        work.wait()
        return whole.sum().item()

    live = step(1.0)
    ReplayGroup.mode = Mode.RECORD
    recorded = [step(1.0), step(2.0)]
    ReplayGroup.mode = Mode.REPLAY
    # Nobody else takes part any more, and the inputs don't matter.
    again = [step(7.0) for _ in range(5)] if rank == 0 else []
    ReplayGroup.mode = Mode.LIVE
    dist.barrier()
    assert live == recorded[0]
    return [*recorded, *again]


def test_collectives_are_replayed_in_a_circle_and_alone(ranks2: RankPool) -> None:
    first, *_ = ranks2.run(replayed)

    assert first == [12.0, 20.0, 12.0, 20.0, 12.0, 20.0, 12.0]


@pytest.mark.dealt_suite
def test_the_command_shows_a_table_and_writes_a_report(tmp_path: Path) -> None:
    report = tmp_path / "deep" / "report.md"
    done = forked(
        *("torchrec_2dsp", "bench", "--config", "configs/runs/bench.toml"),
        *("--set", "schedule.block_s=0.05", "--set", "schedule.batch_size=32"),
        *("--only", "table_wise", "--output", str(report)),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "table_wise" in done.stdout
    assert "round 5 of 5" in done.stdout
    assert "Traceback" not in done.stderr
    result = BenchResult.load(report.with_suffix(".json"))
    assert [contestant.outcome for contestant in result.contestants] == [Outcome.MEASURED] * 2
    assert "table_wise" in report.read_text()
    assert "--set schedule.block_s=0.05" in result.setting.command


def test_a_network_interface_that_is_not_there_is_refused() -> None:
    done = forked(
        *("torchrec_2dsp", "bench", "--config", "configs/runs/bench.toml"),
        *("--set", "network.interface=eth77"),
    )

    assert done.returncode != 0
    assert "network.interface='eth77' is not here; use one of lo" in done.stderr


DENSE_CONFIG = make_config(
    BenchConfig,
    SEQUENCES
    | {
        "calibration": "emulated_1gbit",
        "schedule": {"batch_size": 16},
        "contestants": {
            "ddp": {"kind": "stock"},
            "planned": {"kind": "stock", "dense": {"kind": "planned"}},
        },
    },
)


def dense_plans(rank: int, world_size: int) -> list[str]:
    """Return each contestant's plan for its dense part."""
    mesh = Mesh2D(1, world_size)
    return [
        build_trainer(DENSE_CONFIG, contestant, mesh, NO_LINKS).dense_plan
        for contestant in DENSE_CONFIG.planned.values()
    ]


@pytest.mark.dealt_suite
def test_a_planned_dense_part_is_named(ranks2: RankPool) -> None:
    first, second = ranks2.run(dense_plans)
    assert first == second
    assert [bool(plan) for plan in first] == [False, True]


def test_the_report_names_it() -> None:
    result = with_figures(bench_result(), {"stock": {"dense_plan": "dp 2, pp 2"}})
    description = result.contestants[0].description
    assert f"- stock: {description}: dp 2, pp 2\n" in markdown_report([result])
