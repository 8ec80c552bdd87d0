"""The cost model for dense parts, and the search for the fastest way to run one."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.planning import LINK, only_the_link, with_part
from torchrec_2dsp.cost.calibration import Calibration, KernelCost
from torchrec_2dsp.cost.dense import DenseCostModel, DenseLayers, LayerWork, Transformer
from torchrec_2dsp.errors import CalibrationError, ConfigError, MeshError, PlanError
from torchrec_2dsp.mesh import DenseMesh, RankLayout
from torchrec_2dsp.plan.dense_plan import DenseKind, DensePlan
from torchrec_2dsp.planner.dense_search import DenseChoices, search_dense
from torchrec_2dsp.programs.cli.app import app

BATCH = 100
BLOCK = LayerWork(
    name="block",
    forward_s=1e-5,
    backward_s=2e-5,
    parameter_bytes=1e6,
    output_bytes=400.0,
    kept_bytes=4_000.0,
    sums=2,
)
WORK = DenseLayers(layers=(BLOCK,) * 8, input_bytes=200.0, target_bytes=40.0)
WEIGHTS = WORK.parameter_bytes
COMPUTE_S = 8 * BATCH * 3e-5
MODEL = DenseCostModel(only_the_link(), local_world_size=2)


def plan(kind: DenseKind, *, world: int = 4, tp: int = 1, pp: int = 1, **more: Any) -> DensePlan:
    return DensePlan(kind=kind, mesh=DenseMesh.for_world(world, tp=tp, pp=pp), **more)


DDP = plan(DenseKind.DDP)
TWO_STAGES = plan(DenseKind.PIPELINED, pp=2, num_micro_batches=8, cuts=(4,))
FOUR_STAGES = plan(DenseKind.PIPELINED, pp=4, num_micro_batches=8, cuts=(2, 4, 6))


def search(**more: Any) -> DenseChoices:
    arguments = {
        "calibration": only_the_link(),
        "world_size": 4,
        "local_world_size": 2,
        "batch_size": BATCH,
    }
    return search_dense(more.pop("work", WORK), **(arguments | more))


def test_ddp_sends_all_gradients_in_a_ring() -> None:
    cost = MODEL.step_cost(WORK, DDP, BATCH)
    assert cost.compute_s == pytest.approx(COMPUTE_S)
    assert cost.gradients_s == pytest.approx(1.5 * WEIGHTS * LINK)
    # Less than a bucket has nothing to hide behind.
    assert cost.hidden_s == 0.0
    large = replace(BLOCK, parameter_bytes=25e6)
    cost = MODEL.step_cost(replace(WORK, layers=(large,) * 8), DDP, BATCH)
    assert cost.hidden_s == pytest.approx(-8 * BATCH * 2e-5), "all of the backward"


@pytest.mark.parametrize(("num_copies", "gathered", "summed"), [(1, 2 * 3 / 4, 3 / 4), (2, 0, 1)])
def test_shards_gather_weights_twice(num_copies: int, gathered: float, summed: float) -> None:
    """With a copy in each host, only gradients travel between hosts.

    Both ranks in a host send half of each rank's share, twice.
    """
    sharded = plan(DenseKind.FULLY_SHARDED, num_copies=num_copies)
    cost = MODEL.step_cost(WORK, sharded, BATCH)
    assert cost.gather_s == pytest.approx(gathered * WEIGHTS * LINK)
    assert cost.gradients_s == pytest.approx(summed * WEIGHTS * LINK)


def test_a_copy_of_split_layers_in_each_host_sends_gradients_alone() -> None:
    """With one copy per host, weights needn't be gathered between hosts."""
    model = DenseCostModel(only_the_link(), local_world_size=4)
    first, two, four = (
        plan(DenseKind.TENSOR_PARALLEL, world=8, tp=2, num_copies=num) for num in (1, 2, 4)
    )
    # Both directions of a quarter's all-reduce, by a host's four ranks.
    cost = model.step_cost(WORK, two, BATCH)
    assert cost.gather_s == 0.0
    assert cost.gradients_s == pytest.approx(WEIGHTS * LINK)
    assert model.step_cost(WORK, first, BATCH).gather_s > 0.0
    assert model.step_cost(WORK, four, BATCH).gather_s == 0.0
    kept = 2 * BATCH * 8 * BLOCK.kept_bytes / 2
    for way, share in ((first, 8), (two, 4)):
        memory = 4 * WEIGHTS / share + BLOCK.parameter_bytes + kept
        assert model.memory_bytes(WORK, way, BATCH) == memory
    assert model.memory_bytes(WORK, four, BATCH) == 4 * WEIGHTS / 2 + kept
    assert str(two) == "dp 4, tp 2, 2 copies"


def test_pipelines_that_share_layers_gather_them_once() -> None:
    """Each host gets half its layers from the other, and sends as many gradients back."""
    shared = replace(TWO_STAGES, fully_shard=True)
    cost, copied = (MODEL.step_cost(WORK, way, BATCH) for way in (shared, TWO_STAGES))
    assert cost.gather_s == pytest.approx(WEIGHTS / 2 * LINK)
    assert cost.gradients_s == pytest.approx(WEIGHTS / 2 * LINK)
    assert cost.total_s == pytest.approx(copied.total_s), "the two halves of an all-reduce"
    assert str(shared) == "dp 2, pp 2, sharded, 8 micro-batches, cuts 4"


def test_a_pipeline_waits_at_both_ends() -> None:
    """Two stages process the samples in eight parts, and take nine slots instead of eight."""
    cost = MODEL.step_cost(WORK, TWO_STAGES, BATCH)
    assert cost.compute_s == pytest.approx(COMPUTE_S)
    assert cost.waiting_s == pytest.approx(COMPUTE_S / 8)
    # Stages are inside a host; both send half the layers' gradients to the other host.
    assert cost.hand_off_s == 0.0
    assert cost.gradients_s == pytest.approx(WEIGHTS * LINK)
    assert cost.busy_share == pytest.approx(COMPUTE_S / cost.total_s)


def test_stages_on_two_hosts_hand_over_and_send_no_gradients() -> None:
    cost = MODEL.step_cost(WORK, FOUR_STAGES, BATCH)
    assert cost.gradients_s == 0.0
    samples = 4 * BATCH
    # Ten slots long, each micro-batch there and back; and the batches to both ends.
    slots = (8 + 4 - 2) * 2 * samples / 8 * BLOCK.output_bytes
    ends = 2 * samples * (WORK.input_bytes + WORK.target_bytes)
    assert cost.hand_off_s == pytest.approx((slots + ends) * LINK)
    assert cost.hidden_s == pytest.approx(-7 * 2 * samples / 8 * BLOCK.output_bytes * LINK)


def test_strided_pipelines_keep_gradients_inside_hosts() -> None:
    mesh = DenseMesh.for_world(4, pp=2, layout=RankLayout.STRIDED)
    assert mesh.pipelines() == ((0, 2), (1, 3))
    assert mesh.copies() == ((0, 1), (2, 3))
    assert [mesh.place_of(rank) for rank in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    cost = MODEL.step_cost(WORK, replace(TWO_STAGES, mesh=mesh), BATCH)
    assert cost.gradients_s == 0.0
    assert cost.hand_off_s > 0.0
    texts = {str(candidate.plan) for candidate in search().candidates}
    assert "dp 2, pp 2, strided, 8 micro-batches, cuts 4" in texts


def test_the_slowest_stage_sets_the_pace() -> None:
    uneven = replace(TWO_STAGES, cuts=(6,))
    cost = MODEL.step_cost(WORK, uneven, BATCH)
    # Six of eight layers in each of eight slots, and the other two layers once.
    slot = 2 * BATCH / 8 * 3e-5
    assert cost.compute_s + cost.waiting_s == pytest.approx(slot * (8 * 6 + 2))


def test_ranks_that_compute_together_share_layers_that_can_be_split() -> None:
    together = plan(DenseKind.TENSOR_PARALLEL, tp=2)
    assert MODEL.step_cost(WORK, together, BATCH).compute_s == pytest.approx(COMPUTE_S)
    whole = replace(WORK, layers=(replace(BLOCK, sums=0),) * 8)
    assert MODEL.step_cost(whole, together, BATCH).compute_s == pytest.approx(2 * COMPUTE_S)


def test_memory_counts_weights_gradients_moments_and_what_is_kept() -> None:
    kept = 8 * BATCH * BLOCK.kept_bytes
    assert MODEL.memory_bytes(WORK, DDP, BATCH) == 4 * WEIGHTS + kept
    sharded = plan(DenseKind.FULLY_SHARDED)
    assert MODEL.memory_bytes(WORK, sharded, BATCH) == WEIGHTS + BLOCK.parameter_bytes + kept
    # The first of two stages keeps two of eight micro-batches, for half the layers.
    wanted = 4 * WEIGHTS / 2 + 2 * (2 * BATCH / 8) * 4 * BLOCK.kept_bytes
    assert MODEL.memory_bytes(WORK, TWO_STAGES, BATCH) == wanted
    # Of four pipelines each keeps a quarter, and has whole weights and gradients in between.
    four = plan(DenseKind.PIPELINED, world=8, pp=2, num_micro_batches=8, cuts=(4,))
    copied = MODEL.memory_bytes(WORK, four, BATCH)
    shared = MODEL.memory_bytes(WORK, replace(four, fully_shard=True), BATCH)
    assert copied - shared == (4 - (4 / 4 + 2)) * WEIGHTS / 2


def test_the_fastest_comes_first_and_every_way_once() -> None:
    choices = search()
    times = [candidate.cost.total_s for candidate in choices.candidates]
    assert times == sorted(times)
    texts = [str(candidate.plan) for candidate in choices.candidates]
    assert len(set(texts)) == len(texts)
    assert {candidate.plan.kind for candidate in choices.candidates} == set(DenseKind)
    assert choices.num_too_large == 0


def test_a_slow_link_wants_a_pipeline_and_a_fast_one_does_not() -> None:
    heavy = replace(WORK, layers=(replace(BLOCK, parameter_bytes=2e7),) * 8)
    assert search(work=heavy).best.plan.kind is DenseKind.PIPELINED
    inside = search(work=heavy, world_size=2)
    assert inside.best.cost.total_s == pytest.approx(COMPUTE_S)
    assert all(
        candidate.cost.waiting_s > 0
        for candidate in inside.candidates
        if candidate.plan.kind is DenseKind.PIPELINED
    )


def test_an_optimizer_passes_over_what_a_rank_keeps() -> None:
    once = KernelCost(base_s=0.0, per_item_s=0.0, per_byte_s=1e-9)
    model = DenseCostModel(only_the_link(dense_update=once), local_world_size=2)
    for kept, way in (
        (1, DDP),
        (1 / 4, plan(DenseKind.FULLY_SHARDED)),
        (1 / 4, plan(DenseKind.TENSOR_PARALLEL, tp=2)),
        (1 / 2, plan(DenseKind.TENSOR_PARALLEL, tp=2, num_copies=2)),
        (1 / 2, TWO_STAGES),
        (1 / 4, replace(TWO_STAGES, fully_shard=True)),
    ):
        assert model.step_cost(WORK, way, BATCH).update_s == pytest.approx(kept * WEIGHTS * 1e-9)


def test_memory_rules_ways_out_and_says_so() -> None:
    needed = MODEL.memory_bytes(WORK, DDP, BATCH)
    choices = search(memory_bytes=needed - 1)
    assert all(candidate.memory_bytes < needed for candidate in choices.candidates)
    assert choices.num_too_large > 0
    assert f"{choices.num_too_large} ways take more memory than there is." in str(choices)
    with pytest.raises(PlanError, match=r"fits into 10 bytes per rank; the smallest, .*, takes"):
        search(memory_bytes=10)


def test_shares_are_proposed_where_copies_do_not_fit() -> None:
    """The weights decide where few activations are kept for the backward."""
    work = replace(WORK, layers=(replace(BLOCK, kept_bytes=1.0),) * 8)

    def fitting(kind: DenseKind, memory_bytes: float) -> list[DensePlan]:
        choices = search(work=work, world_size=16, kinds=[kind], memory_bytes=memory_bytes)
        assert choices.num_too_large > 0
        return [way.plan for way in choices.candidates]

    # Half the layers, with gradients and moments, take two; an eighth of these, and half the
    # layers with their gradients, take one and a quarter.
    pipelined = fitting(DenseKind.PIPELINED, 1.5 * WEIGHTS)
    assert {way.fully_shard for way in pipelined if way.mesh.pipeline_size == 2} == {True}
    assert {way.fully_shard for way in pipelined if way.mesh.pipeline_size > 2} == {True, False}
    # Halves take two with eight copies, and one with four, plus a gathered layer.
    split = fitting(DenseKind.TENSOR_PARALLEL, 0.75 * WEIGHTS)
    assert {way.num_copies for way in split} == {1, 2}


def test_layers_that_can_not_be_split_or_cut_are_left_whole() -> None:
    one_layer = DenseLayers(layers=(replace(BLOCK, sums=0),), input_bytes=1.0, target_bytes=1.0)
    kinds = {candidate.plan.kind for candidate in search(work=one_layer).candidates}
    assert kinds == {DenseKind.DDP, DenseKind.FULLY_SHARDED}
    alone = search(world_size=1, local_world_size=1).candidates
    assert [candidate.plan.kind for candidate in alone] == [DenseKind.DDP]


def test_layers_stay_inside_hosts() -> None:
    for candidate in search(world_size=16, local_world_size=4).candidates:
        assert candidate.plan.mesh.tp <= 4


@pytest.mark.dealt_suite
def test_thousands_of_ranks_are_searched_in_seconds() -> None:
    deep = replace(WORK, layers=(BLOCK,) * 48)
    # Of this process alone: other tests run beside it.
    start = time.process_time()
    choices = search(work=deep, world_size=4_096, local_world_size=8, batch_size=64)
    assert time.process_time() - start < 10.0
    assert len(choices.candidates) > 50
    assert "slower ways more." in str(choices)


def test_kinds_can_be_left_out() -> None:
    assert {c.plan.kind for c in search(kinds=[DenseKind.DDP]).candidates} == {DenseKind.DDP}


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: plan(DenseKind.PIPELINED, pp=2), PlanError, "2 stages are divided by 1 cuts"),
        (lambda: plan(DenseKind.DDP, pp=2, cuts=(1,)), PlanError, "pp=2 is for a pipelined"),
        (
            lambda: plan(DenseKind.FULLY_SHARDED, num_copies=3),
            PlanError,
            "num_copies=3 doesn't divide 4 ranks",
        ),
        (
            lambda: plan(DenseKind.TENSOR_PARALLEL, tp=2, num_copies=4),
            PlanError,
            "num_copies=4 doesn't divide 2 groups of tp=2 ranks",
        ),
        (
            lambda: plan(DenseKind.FULLY_SHARDED, fully_shard=True),
            PlanError,
            "fully_shard=True is for a pipelined dense part, not 'fully_sharded'",
        ),
        (lambda: plan(DenseKind.DDP, tp=3), MeshError, "tp=3 does not divide 4 ranks"),
        (
            lambda: DenseLayers(layers=(), input_bytes=1.0, target_bytes=1.0),
            ConfigError,
            "a dense part without layers",
        ),
    ],
)
def test_what_can_not_be_is_refused(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


DATA = '{num_dense=2, features=[{name="a", num_rows=5000}, {name="b", num_rows=9}]}'


MATMUL = KernelCost(base_s=1e-5, per_item_s=1e-11, per_byte_s=1e-10)


def measured(matmul: KernelCost | None = MATMUL) -> Calibration:
    """Return a calibration with matrix product costs, or an older one without them."""
    return with_part(Calibration.load("emulated_1gbit"), "kernels", matmul=matmul)


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


@pytest.mark.dealt_file
def test_ways_to_run_the_layers_are_compared(tmp_path: Path) -> None:
    code, text = run("plan", "--config", config(tmp_path, "measured.toml", TRANSFORMER))
    assert code == 0, text
    for words in ("Ways to run the dense part", "DDP", "fully sharded", "pp 2", "tp 2"):
        assert words in text


@pytest.mark.dealt_file
def test_worlds_have_a_best_way_each(tmp_path: Path) -> None:
    path = config(tmp_path, "measured.toml", TRANSFORMER)
    code, text = run("simulate", "--config", path, "--ranks", "4,16")
    assert code == 0, text
    assert "The best way to run it alone:" in text


@pytest.mark.dealt_file
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
    """Each item costs twelve width-by-width products, and two in attention."""
    kernels = measured().kernels
    (block,) = Transformer(num_blocks=1, dim=64, length=10).layers(kernels).layers
    products = 10 * (2 * 12 * 64**2 + 4 * 10 * 64)
    moved_bytes = 4 * 10 * 64 * (8 + 4)
    assert block.forward_s == pytest.approx(products * 1e-11 + moved_bytes * 1e-10)
    assert block.backward_s == pytest.approx(2 * block.forward_s)
    assert block.parameter_bytes == 4 * 12 * 64**2
    with pytest.raises(CalibrationError, match="make one with the calibrate command"):
        Transformer(num_blocks=1, dim=64, length=10).layers(measured(None).kernels)
