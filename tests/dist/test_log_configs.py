"""Exact copies and TorchRec alone have equal losses with the shipped log configs.

The logs aren't part of this project, so a stand-in in the same format replaces Criteo's. Tests with
real logs run where they are available.
"""

import gzip
from pathlib import Path

import pytest

from tests.support.log_speed import write_criteo_like
from tests.support.logs import REAL_LOGS
from tests.support.ranks import RankPool
from torchrec_2dsp.programs.config.config_file import load_config
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.results import TrainWatcher

pytestmark = pytest.mark.dealt_file

CLICKS = (
    *("data.num_rows=2000", "loop.global_batch_size=128", "loop.steps=12", "loop.eval_every=6"),
    *("loop.eval_steps=3", "model.over_layers=[16]", "data.block_bytes=100_000"),
)
SEQUENCES = (
    *("loop.global_batch_size=64", "loop.steps=6", "loop.eval_every=3", "loop.eval_steps=2"),
    *("data.max_length=20", "model.max_length=20", "model.num_negatives=10"),
)
REAL = {
    "criteo": (REAL_LOGS / "criteo_avazu_head/criteo_train.csv", CLICKS),
    "avazu": (REAL_LOGS / "criteo_avazu_head/avazu_train.csv", CLICKS),
    "movielens": (REAL_LOGS / "movielens100k/ml-100k.inter", SEQUENCES),
}

Figures = dict[str, tuple[list[float], dict[str, float]]]


class Splits(TrainWatcher):
    """Records a program's description of its data."""

    text = ""

    def data_opened(self, text: str) -> None:
        self.text = text


def train_log(
    rank: int, world_size: int, name: str, overrides: tuple[str, ...]
) -> tuple[Figures, str]:
    """Return losses and final metrics for stock TorchRec and exact copies, and the splits."""
    splits = Splits()
    config = load_config(TrainConfig, name, overrides).only(["stock", "exact"])
    runs = train(config, [splits]).runs
    return {run.name: (list(run.losses), run.evaluated.metrics) for run in runs}, splits.text


def check_equal(figures: Figures, num_steps: int) -> None:
    """Compare the losses with stock TorchRec's, up to the order of additions."""
    losses, metrics = figures["stock"]
    assert len(losses) == num_steps
    assert len(set(losses)) == num_steps
    of_exact, metrics_of_exact = figures["exact"]
    # A few float32 rounding steps, which are 1.2e-7 at 1 and 2.4e-7 at 2.
    assert of_exact == pytest.approx(losses, rel=5e-7)
    # Equal or nearly equal scores may change places.
    assert metrics_of_exact == pytest.approx(metrics, abs=1e-4)


@pytest.mark.parametrize("name", REAL)
def test_exact_copies_train_a_real_log_as_torchrec_alone(ranks4: RankPool, name: str) -> None:
    log, overrides = REAL[name]
    if not log.exists():
        pytest.skip("the log isn't on this machine")
    figures, splits = ranks4.run(train_log, name, (f"data.files={log}", *overrides))[0]
    check_equal(figures, num_steps=6 if name == "movielens" else 12)
    words, num_evaluated = {
        "criteo": ("6,170 rows to train on, 1,030 rows held out: the last 14.3%", 384),
        "avazu": ("7,278 rows to train on, 809 rows held out: the last 10%", 384),
        "movielens": (
            "943 users with 100,000 uses of 1,682 items; held out: the last of each user",
            128,
        ),
    }[name]
    assert splits == f"{words}; an evaluation takes {num_evaluated} of them (loop.eval_steps)"


def test_the_config_takes_days_of_criteo(ranks4: RankPool, tmp_path: Path) -> None:
    for day in (0, 9, 10):
        plain = tmp_path / "plain.tsv"
        write_criteo_like(plain, 400 + day, seed=day)
        (tmp_path / f"day_{day}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    files = (f"data.files={tmp_path}/day_*.gz", "data.held_out.share=0.25")
    figures, splits = ranks4.run(train_log, "criteo", (*files, *CLICKS, "loop.steps=5"))[0]
    check_equal(figures, num_steps=5)
    evaluated = 'an evaluation takes {} of them (whole batches; data.rest = "pad" takes all)'
    held_out = "914 rows to train on, 305 rows held out: the last 25%"
    assert splits == f"{held_out}; {evaluated.format(256)}"
    last_day = f'{{by = "files", files = "{tmp_path}/day_10.gz"}}'
    files = (f"data.files={tmp_path}/day_?.gz", f"data.held_out={last_day}")
    _, splits = ranks4.run(train_log, "criteo", (*files, *CLICKS, "loop.steps=1"))[0]
    held_out = f"809 rows to train on, 410 rows held out: those of {tmp_path}/day_10.gz"
    assert splits == f"{held_out}; {evaluated.format(384)}"
