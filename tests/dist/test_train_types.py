"""Training with 16-bit tables, and with a bf16 dense part, matches the plain model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.datasets.utils import Batch

from tests.support.exporting import exported, run_config
from tests.support.ranks import RankPool
from tests.support.rounding import rounded_rows
from tests.support.train_runs import (
    SEQUENCES,
    TREE,
    PlainRun,
    click_model,
    config_with,
    train_in_folder,
)
from torchrec_2dsp.programs.export.source import ExportSource, trained_model
from torchrec_2dsp.programs.train.config import TrainConfig
from torchrec_2dsp.programs.train.program import train
from torchrec_2dsp.programs.train.results import RunResult

pytestmark = pytest.mark.dealt_file

SGD = torch.optim.SGD
ROWS = {"sharding_types": ["row_wise"], "exchange": "row", "hot_rows": 4}
RUNS: dict[str, Any] = {
    "one_group": {},
    "exact": {"num_groups": 2},
    "prefetch": ROWS | {"prefetch_rows": True, "owners": "hash"},
}
AUTOCAST = {"autocast": "bf16"}
ROUNDING = 1e-6
"""Sums of 32 losses and gradients are added in another order."""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
EXPORTED = {"fp16": torch.float16, "bf16": torch.float32}
Losses = tuple[list[float], list[float]]
Tables = list[torch.Tensor]


class RoundedRun(PlainRun):
    """The plain model, whose tables are rounded to a 16-bit type after each step."""

    def __init__(self, config: TrainConfig, seed: int | None) -> None:
        # TorchRec's unsharded collections would draw tables in bf16 as fp16.
        model = click_model(config).model_copy(update={"table_dtype": "fp32"})
        super().__init__(config.model_copy(update={"model": model}), SGD)
        self._weights: dict[str, torch.nn.Parameter] = {
            name.split(".")[-2]: weight
            for name, weight in self.model.named_parameters()
            if "embedding_bags" in name
        }
        self._dtype, self._step, self._seed = DTYPES[click_model(config).table_dtype], 0, seed
        with torch.no_grad():
            for weight in self._weights.values():
                weight.copy_(weight.to(self._dtype))
        self.tables.register_step_post_hook(lambda *_: self._round())

    def rounded_tables(self) -> Tables:
        """Return the tables in their type."""
        return [weight.detach().to(self._dtype) for weight in self._weights.values()]

    @torch.no_grad()
    def _round(self) -> None:
        self._step += 1
        for table, weight in self._weights.items():
            if self._seed is None:
                weight.copy_(weight.to(self._dtype))
                continue
            key = {"seed": self._seed, "step": self._step, "rows": list(range(len(weight)))}
            weight.copy_(rounded_rows(weight, self._dtype, table=table, **key))


class AutocastRun(PlainRun):
    """The plain model with autocast."""

    def loss(self, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(batch)


def losses_of(run: RunResult) -> Losses:
    return list(run.losses), list(run.evaluated.losses)


def assert_close(losses: Losses, expected: Losses, tolerance: float) -> None:
    assert losses[0] == pytest.approx(expected[0], abs=tolerance)
    assert losses[1] == pytest.approx(expected[1], abs=tolerance)


def gap(losses: Losses, others: Losses) -> float:
    pairs = zip([*losses[0], *losses[1]], [*others[0], *others[1]], strict=True)
    return max(abs(ours - theirs) for ours, theirs in pairs)


def with_tables(table_dtype: str, seed: int | None, folder: Path) -> TrainConfig:
    rounding = {} if seed is None else {"stochastic_rounding": True, "rounding_seed": seed}
    optimizer = {"lr": 0.05, **rounding}
    checkpoint = {"folder": str(folder / f"{table_dtype}_{seed}"), "keep_best": 0}
    model = {"table_dtype": table_dtype}
    return config_with(TREE, model=model, optimizer=optimizer, checkpoint=checkpoint, runs=RUNS)


def saved_tables(config: TrainConfig, run: str) -> list[torch.Tensor]:
    """Return a run's tables as exported from its checkpoint."""
    path = Path(config.checkpoint.folder) / run / "last" / str(config.loop.steps)
    model = trained_model(ExportSource(config, run, path), config.data.dataset())
    return [weight for name, weight in model.named_parameters() if "embedding_bags" in name]


def trained_beside_rounded(
    rank: int, world_size: int, config: TrainConfig, seed: int | None
) -> tuple[dict[str, tuple[Losses, Tables]], tuple[Losses, Tables]]:
    """Return the losses and tables of the program's runs, and the plain model's."""
    plain = RoundedRun(config, seed)
    expected = (plain.train(), plain.held_out()[0]), plain.rounded_tables()
    runs = {run.name: losses_of(run) for run in train(config).runs}
    trained = {name: (losses, saved_tables(config, name)) for name, losses in runs.items()}
    return trained, expected


@pytest.mark.parametrize("table_dtype", ["fp16", "bf16"])
def test_tables_in_16_bits_train_as_the_plain_model(
    ranks2: RankPool, table_dtype: str, tmp_path: Path
) -> None:
    ends: list[torch.Tensor] = []
    for seed in (None, 0, 7):
        config = with_tables(table_dtype, seed, tmp_path)
        trained, (expected, tables) = ranks2.run(trained_beside_rounded, config, seed)[0]
        assert set(trained) == set(RUNS)
        ends.append(torch.cat(tables).float())
        for losses, run_tables in trained.values():
            assert_close(losses, expected, ROUNDING)
            assert {table.dtype for table in run_tables} == {EXPORTED[table_dtype]}
            # A gradient sum's last digit may choose another neighbour.
            equal = torch.cat(run_tables).float() == ends[-1]
            assert equal.float().mean() > 0.998
    # Roundings differ, so that the comparison can fail.
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert (ends[first] == ends[second]).float().mean() < 0.9


def in_8_bits(rank: int, world_size: int) -> list[tuple[float, ...]]:
    """Return the losses with 8-bit rows, rounded to nearest and stochastically."""
    runs, losses = {"rows": ROWS | {"stored_as": "int8"}}, []
    for at_random in (False, True):
        optimizer = {"lr": 0.05, "stochastic_rounding": at_random}
        losses.append(train(config_with(TREE, optimizer=optimizer, runs=runs)).runs[0].losses)
    return losses


def test_rows_in_8_bits_round_at_random_where_the_config_says_so(ranks2: RankPool) -> None:
    nearest, at_random = ranks2.run(in_8_bits)[0]
    assert nearest != at_random
    assert nearest == pytest.approx(at_random, abs=1e-2)


def autocast_beside_plain(rank: int, world_size: int) -> tuple[dict[str, Losses], Losses]:
    """Return the losses of the program's runs, and the plain model's."""
    kinds = {
        "sharded": {"kind": "fully_sharded"},
        "whole": {"kind": "thresholded", "density": 1.0, "values": "fp32"},
    }
    runs = {name: run | {"dense": AUTOCAST} for name, run in RUNS.items()}
    runs |= {name: {"dense": dense | AUTOCAST} for name, dense in kinds.items()}
    runs["fp32"] = {}
    config = config_with(TREE, runs=runs)
    plain = AutocastRun(config, SGD, num_parts=2)
    expected = plain.train(), plain.held_out()[0]
    return {run.name: losses_of(run) for run in train(config).runs}, expected


def test_the_dense_part_trains_in_bf16_as_the_plain_model_with_autocast(ranks2: RankPool) -> None:
    runs, expected = ranks2.run(autocast_beside_plain)[0]
    in_fp32 = runs.pop("fp32")
    assert len(runs) == 5
    for losses in runs.values():
        # A difference in a float32's last bit may change the nearest bf16 by 2^-9, relatively.
        assert_close(losses, expected, 2e-5)
    assert gap(in_fp32, expected) > 2e-4


def sequences_in_bf16(rank: int, world_size: int) -> dict[str, tuple[float, ...]]:
    kinds = {
        "ddp": AUTOCAST,
        "sharded": AUTOCAST | {"kind": "fully_sharded"},
        "split": AUTOCAST | {"kind": "tensor_parallel", "tp": 2},
        "fp32": {"kind": "ddp"},
    }
    loop = {"steps": 6, "global_batch_size": 16, "eval_steps": 1}
    runs = {name: {"dense": dense} for name, dense in kinds.items()}
    tree = SEQUENCES | {"optimizer": {"dense_lr": 0.01}, "loop": loop, "runs": runs}
    return {run.name: run.losses for run in train(config_with(tree)).runs}


def test_shared_layers_train_in_bf16_alike(ranks2: RankPool) -> None:
    losses = ranks2.run(sequences_in_bf16)[0]
    assert losses["sharded"] == pytest.approx(losses["ddp"], abs=2e-5)
    # Each rank rounds its part of a layer's sum.
    assert losses["split"] == pytest.approx(losses["ddp"], abs=2e-3)
    for name in ("ddp", "sharded", "split"):
        assert losses[name] != pytest.approx(losses["fp32"], abs=2e-5), name
        assert losses[name] == pytest.approx(losses["fp32"], abs=4e-3), name


LEARNING = {
    "model": {"table_dtype": "fp16"},
    "optimizer": {"lr": 0.1, "stochastic_rounding": True},
    "loop": {"steps": 60, "global_batch_size": 128},
    "runs": {"small": ROWS | {"dense": AUTOCAST, "prefetch_rows": True}},
}
STOPPED_AT = 30


def whole_and_resumed(rank: int, world_size: int, folder: Path) -> list[RunResult]:
    whole = config_with(TREE, **LEARNING)
    checkpoint = {"folder": str(folder), "every": STOPPED_AT}
    stopped = LEARNING | {"loop": LEARNING["loop"] | {"steps": STOPPED_AT}}
    train(config_with(TREE, **stopped, checkpoint=checkpoint))
    resumed = train(config_with(TREE, **LEARNING, checkpoint=checkpoint), resume="auto")
    return [*train(whole).runs, *resumed.runs]


def test_a_small_run_learns_and_resumes_with_the_same_bits(
    ranks2: RankPool, tmp_path: Path
) -> None:
    whole, resumed = ranks2.run(whole_and_resumed, tmp_path)[0]
    assert resumed.resumed_from
    assert resumed.losses == whole.losses
    assert resumed.evaluated.losses == whole.evaluated.losses
    assert sum(whole.losses[-10:]) < 0.97 * sum(whole.losses[:10])


def test_a_run_in_16_bits_is_evaluated_and_exported_in_fp32(
    ranks2: RankPool, tmp_path: Path
) -> None:
    data, model = TREE["data"], TREE["model"] | {"table_dtype": "fp16"}
    config = run_config(tmp_path, data, model, {"dense": AUTOCAST})
    (run,) = ranks2.run(train_in_folder, config)[0].runs
    record = exported(tmp_path).record
    # The rounding of float32, in which losses are added up in another order.
    assert record.trained == pytest.approx(run.evaluated.metrics, rel=1e-5)
    assert record.table_bytes == 133 * 8 * 2
