"""All other ranks name a rank that SIGSTOP has stopped, soon after the deadline."""

import re
from pathlib import Path

import pytest
import tomli_w

from tests.support.programs import forked
from tests.support.slices import patient
from tests.support.train_runs import TREE

TIMEOUT_S = 2.0
LET_OTHERS_END_S = 12.0
"""A rank waits this long for another one's store, and then that rank 0 speaks first."""
CELLS = {
    "step": ("1", "in the forward", {}),
    "report": ("0", "in the report", {}),
    "evaluation": ("1", "in an evaluation", {}),
    "save": ("0", r"in save_checkpoint\(\)", {}),
    "save, beside training": ("1", "", {"asynchronous": True}),
}
"""The rank that stops, the place where the others notice it, and checkpoint keys; a cell's name
begins with the moment. Beside training, they do so wherever they meet that rank next."""


QUICK = ("save",)
"""The cells of every run of the tests."""


@pytest.mark.parametrize(
    "cell",
    [cell if cell in QUICK else pytest.param(cell, marks=pytest.mark.slow) for cell in CELLS],
)
def test_a_stopped_rank_is_named_by_all_others_after_the_deadline(
    cell: str, tmp_path: Path
) -> None:
    stopped, where, checkpoint = CELLS[cell]
    config = tmp_path / "stops.toml"
    loop = {
        "steps": 8,
        "global_batch_size": 48,
        "eval_every": 2,
        "eval_steps": 1,
        "report_every": 1,
        "timeout_s": TIMEOUT_S,
    }
    keys = {"folder": str(tmp_path / "saved"), "every": 2, "keep_best": 0, **checkpoint}
    config.write_text(tomli_w.dumps(TREE | {"loop": loop, "checkpoint": keys}))
    moment = cell.partition(",")[0]
    done = forked(
        "tests.support.train_stops",
        moment,
        stopped,
        *("train", "--config", str(config)),
        ranks=3,
        grace_s=LET_OTHERS_END_S,
        num_stopped=1,
    )
    assert done.returncode == 2
    others = sorted({"0", "1", "2"} - {stopped})
    (stop,) = re.findall(rf"rank {stopped} stops at ([\d.]+)", done.stdout)
    ends = dict(re.findall(r"rank (\d) ends at ([\d.]+)", done.stdout))
    assert sorted(ends) == others
    for rank in others:
        # Two seconds for answers, twice that for a store, and three to let rank 0 speak.
        assert TIMEOUT_S * 0.9 < float(ends[rank]) - float(stop) < patient(TIMEOUT_S + 9.0)
        name = "error" if rank == "0" else f"error on rank {rank}"
        assert re.search(
            rf"^{name}: rank {stopped} did not answer: killed, stopped, or cut off from the "
            rf"others; rank \d noticed it at step \d, {where}.*Resume from a checkpoint$",
            done.stderr,
            re.MULTILINE,
        ), done.stderr
