"""`parallelize`: whatever it chooses trains as the unsharded model, and it says what it chose."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch

import torchrec_2dsp as tdsp
from tests.support.devices import rank_device
from tests.support.loops import LossModel
from tests.support.models import SEQUENCES, ModelSpec, TableSpec, build, make_batch
from tests.support.parity import FOUR, ONE, TWO, Cell, check_cells, parallelized
from tests.support.ranks import RankPool
from torchrec_2dsp.plan.parameter_sharding import Pipeline
from torchrec_2dsp.plan.serialize import save

LARGE = ModelSpec(tuple(TableSpec(f"t{n}", 30_000, 64, (f"f{n}",)) for n in range(3)))
"""Large enough that the search wants row exchange."""
ADAGRAD = tdsp.MomentScaledRowWiseAdaGrad(lr=0.05)


@pytest.mark.parametrize("mesh", [ONE, TWO, FOUR], ids=str)
def test_whatever_is_chosen_trains_as_the_unsharded_model(
    ranks4: RankPool, mesh: tdsp.Mesh2D
) -> None:
    specs = ModelSpec(), ModelSpec(weighted=True), SEQUENCES, LARGE
    exchanges = "pooled", "row"
    cells = [
        Cell(mesh, spec=spec, exchange=exchange, parallelized=True)
        for spec in specs
        for exchange in exchanges
    ]
    check_cells([*cells, Cell(mesh, optimizer="sgd", parallelized=True)], ranks4)


def train_by_pipeline_and_by_hand(rank: int, world_size: int) -> tuple[list[str], list[float], str]:
    """Return what was chosen, sums of scores, and the explanation."""
    sums: list[list[float]] = []
    chosen: list[str] = []
    reasons = ""
    for by_hand in (True, False):
        torch.manual_seed(0)
        model = parallelized(Cell(ONE), LossModel(LARGE), optimizer=ADAGRAD)
        plan = cast(tdsp.Plan2D, model.plan)
        chosen = [plan.pipeline.value, str(plan.full_duplex)]
        chosen += [table.exchange.value for _, part in plan.modules() for _, table in part.tables()]
        optimizer = torch.optim.SGD(model.dense_parameters(), lr=0.05)
        batches = [make_batch(LARGE, seed=10 * step + rank) for step in range(6)]
        sums.append([])
        if by_hand:
            for batch in batches:
                optimizer.zero_grad()
                loss, scores = model(batch)
                loss.backward()
                model.sync()
                optimizer.step()
                sums[-1].append(scores.sum().item())
        else:
            pipeline, source = model.pipeline(optimizer), iter(batches)
            sums[-1] = [pipeline.progress(source).sum().item() for _ in batches]
        try:
            reasons = "\n".join(model.explain().summary())
        except tdsp.errors.ConfigError as error:
            reasons = str(error)
    assert sums[0] == sums[1], sums
    return chosen, sums[0], reasons


def test_it_chooses_rows_and_a_pipeline_and_says_so(ranks4: RankPool) -> None:
    answers = ranks4.run(train_by_pipeline_and_by_hand)
    for (pipeline, _, *exchanges), sums, _ in answers:
        assert pipeline in {Pipeline.SPARSE_DIST.value, Pipeline.ROW_PREFETCH.value}
        assert set(exchanges) <= {"row", "row_per_host"}
        assert len(set(sums)) == 6
    first, *others = (reasons for _, _, reasons in answers)
    lines = first.splitlines()
    assert lines[0].startswith("torchrec_2dsp: 3 row wise, row")
    assert "a step should take" in lines[1]
    assert "Zipf" in lines[-1]
    assert all("this isn't rank 0" in reasons for reasons in others)


def keep_weights_and_take_plans(rank: int, world_size: int, folder: str) -> list[Any]:
    """Return whether weights were kept, and the errors of what contradicts itself."""
    model = build(ModelSpec(), seed=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = parallelized(Cell(ONE), model, optimizer=ADAGRAD)
    path = str(Path(folder) / "plan.json")
    if rank == 0:
        save(cast(tdsp.Plan2D, first.plan), path)
    torch.distributed.barrier()
    again = tdsp.parallelize(
        build(ModelSpec(), seed=3),
        device=rank_device(),
        batch_size=8,
        optimizer=ADAGRAD,
        plan=path,
    )
    kept: list[Any] = [again.plan == first.plan]
    other = build(ModelSpec(), seed=4)
    batch = make_batch(ModelSpec(), seed=rank)
    build_first = build(ModelSpec(), seed=3)
    build_first.load_state_dict(before)
    kept += [torch.equal(first(batch), build_first(batch)), torch.equal(again(batch), first(batch))]
    sharders = tdsp.get_default_sharders()
    for wrong in ({}, {"optimizer": ADAGRAD, "sharders": sharders}):
        try:
            tdsp.parallelize(other, device=rank_device(), batch_size=8, **cast(Any, wrong))
        except tdsp.errors.ConfigError as error:
            kept.append(str(error))
    return kept


def test_weights_stay_plans_can_be_given_and_contradictions_are_refused(
    ranks4: RankPool, tmp_path: Path
) -> None:
    for same_plan, same_scores, again, nothing, both in ranks4.run(
        keep_weights_and_take_plans, str(tmp_path)
    ):
        assert same_plan
        assert same_scores
        assert again
        assert "nothing says how tables are trained" in nothing
        assert "optimizer and sharders are both given" in both
