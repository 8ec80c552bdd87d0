"""The dense part that a benchmark's contestant plans, and how the report names it."""

import pytest
import torch.distributed as dist

from tests.support.bench_results import NO_LINKS, bench_result
from tests.support.ranks import RankPool
from tests.support.sequence_configs import SEQUENCES
from torchrec_2dsp.mesh import Mesh2D
from torchrec_2dsp.programs.bench.config import BenchConfig
from torchrec_2dsp.programs.bench.contestants import build_trainer
from torchrec_2dsp.programs.bench.page import markdown_report
from torchrec_2dsp.programs.bench.worker import Feed
from torchrec_2dsp.programs.config.config_file import make_config

CONFIG = make_config(
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


def built_and_trained(rank: int, world_size: int) -> dict[str, tuple[str, list[float]]]:
    """The plan of each contestant's dense part, and its losses."""
    told = {}
    for name, contestant in CONFIG.planned.items():
        trainer = build_trainer(CONFIG, contestant, Mesh2D(1, world_size), NO_LINKS)
        feed = Feed(CONFIG, rank=rank, world_size=world_size, cycle=0)
        feed.prepare(5)
        losses = []
        for _ in range(3):
            loss = trainer.pipeline.progress(feed)[0].detach()
            dist.all_reduce(loss)
            losses.append(float(loss))
        told[name] = trainer.dense_plan, losses
    return told


@pytest.mark.dealt_suite
def test_a_planned_dense_part_is_named_and_trains_the_same(ranks2: RankPool) -> None:
    first, second = ranks2.run(built_and_trained)
    assert first == second
    (no_plan, expected), (plan, losses) = first["ddp"], first["planned"]
    assert no_plan == ""
    assert plan
    assert losses == pytest.approx(expected, abs=2e-6)


def test_the_report_names_it() -> None:
    result = bench_result()
    stock = result.contestants[0].model_copy(update={"dense_plan": "dp 2, pp 2"})
    page = markdown_report([result.model_copy(update={"contestants": (stock,)})])
    assert f"- stock: {stock.description}: dp 2, pp 2\n" in page
