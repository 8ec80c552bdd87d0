"""A run that can stop after any step and resume in another process, in many variants."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.devices import are_equal, rank_device, rounded
from tests.support.loops import shard, snapshot
from tests.support.models import HOT_ROWS, BagModel, ModelSpec, make_batch
from tests.support.parity import FOUR, ONE, TWO, Cell


@dataclass(frozen=True)
class Variant:
    """A way to train."""

    cell: Cell
    refresh_every: int = 0
    """After how many steps the most used rows become hot."""
    pipeline: str = ""
    """"sparse" for TorchRec's pipeline, "rows" for `TrainPipelineRowPrefetch`."""
    draws: bool = True
    """True if the model draws random numbers."""
    dense: Callable[[], Any] | None = None
    """Makes the data-parallel wrapper, if it isn't TorchRec's."""


def _weight(policy: Any, **options: Any) -> tdsp.WeightSync:
    return tdsp.WeightSync(policy=policy, **options)


def _thresholded(**options: Any) -> tdsp.ThresholdedDataParallel:
    return tdsp.ThresholdedDataParallel(0.1, dense_below=30, **options)


_ROWS = Cell(ONE, exchange="row", owners="hash")
_SMALL_MB = 1e-4
"""Buckets of so few gradients that the dense part has several."""
VARIANTS = {
    "gradient": Variant(Cell(TWO)),
    "four groups": Variant(
        Cell(FOUR, optimizer="adagrad", sync=tdsp.GradientSync(transport=tdsp.Transport.BF16))
    ),
    "delay": Variant(Cell(TWO, sync=tdsp.GradientSync(delay=1))),
    "every 1": Variant(Cell(TWO, sync=_weight(tdsp.every(1)))),
    "every 3": Variant(Cell(TWO, sync=_weight(tdsp.every(3)))),
    "after": Variant(Cell(TWO, sync=_weight(tdsp.after(6, tdsp.every(3))))),
    "moments": Variant(
        Cell(TWO, sync=_weight(tdsp.every(2), moments_policy=tdsp.every(5)), hot_rows=HOT_ROWS)
    ),
    "hot refresh": Variant(Cell(TWO, hot_rows=HOT_ROWS), refresh_every=4),
    "hot refresh delay": Variant(
        Cell(TWO, hot_rows=HOT_ROWS, sync=tdsp.GradientSync(delay=1)), refresh_every=4
    ),
    "hash": Variant(_ROWS),
    "hash hot refresh": Variant(replace(_ROWS, hot_rows=HOT_ROWS), refresh_every=4),
    "sparse pipeline": Variant(Cell(TWO, hot_rows=HOT_ROWS), refresh_every=4, pipeline="sparse"),
    "row pipeline": Variant(_ROWS, pipeline="rows"),
    "row pipeline hot refresh": Variant(
        replace(_ROWS, hot_rows=HOT_ROWS), refresh_every=4, pipeline="rows"
    ),
    "data parallel": Variant(Cell(TWO, "data_parallel")),
    "rounded hot refresh": Variant(
        Cell(TWO, spec=ModelSpec(data_type=DataType.FP16), hot_rows=HOT_ROWS, rounding_seed=3),
        refresh_every=4,
    ),
    "thresholded": Variant(
        Cell(TWO), dense=lambda: _thresholded(warm_up=2, bucket_cap_mb=_SMALL_MB)
    ),
    "thresholded rarely": Variant(Cell(ONE), dense=lambda: _thresholded(refresh=3, values="int8")),
    "thresholded owners": Variant(Cell(ONE), dense=lambda: _thresholded(route="owners")),
    "preconditioned": Variant(
        Cell(TWO), dense=lambda: _thresholded(warm_up=2, preconditioner="adam", route="gather")
    ),
    "delayed": Variant(
        Cell(ONE), dense=lambda: tdsp.DelayedDense(warm_up=2, bucket_cap_mb=_SMALL_MB)
    ),
    "fully sharded": Variant(Cell(ONE), dense=tdsp.FullyShardedDense),
    "powersgd": Variant(
        Cell(ONE),
        dense=lambda: tdsp.HookedDataParallel(
            "powersgd", rank=1, warm_up=3, bucket_cap_mb=_SMALL_MB
        ),
    ),
    "powersgd at once": Variant(
        Cell(ONE), dense=lambda: tdsp.HookedDataParallel("powersgd", rank=1, warm_up=2)
    ),
}


def variant_for(name: str, world_size: int) -> Variant:
    """Return the named variant, scaled down to ``world_size`` ranks if needed."""
    variant = VARIANTS[name]
    mesh = variant.cell.mesh
    if mesh.world_size == world_size:
        return variant
    num_groups = min(mesh.num_groups, world_size)
    small = tdsp.Mesh2D(num_groups, world_size // num_groups)
    return replace(variant, cell=replace(variant.cell, mesh=small))


class TowerModel(BagModel):
    """Several dense layers, so that DDP's bucket order matters, with batch norm and dropout."""

    def __init__(self, spec: ModelSpec, draws: bool) -> None:
        super().__init__(spec)
        width = sum(table.dim for _, table in spec.features)
        self.over = nn.Identity()
        # Ranks differ in these statistics, which evaluation uses.
        self.norm = nn.BatchNorm1d(width)
        self.tower = nn.Sequential(
            nn.Linear(width, 16), nn.ReLU(), nn.Dropout(0.2 if draws else 0.0), nn.Linear(16, 1)
        )

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        joined = self.norm(self.joined(features))
        loss = (self.tower(joined).squeeze(1) - 1.0).pow(2).mean()
        return loss, loss.detach()


def batch_of(spec: ModelSpec, step: int, rank: int) -> KeyedJaggedTensor:
    """Return a rank's batch; the most used rows change every four steps."""
    batch = make_batch(spec, seed=1000 * step + rank, batch_size=16)
    rows = torch.tensor([table.num_rows for _, table in spec.features])
    by_id = rows.repeat_interleave(torch.tensor(batch.length_per_key()))
    ids = (batch.values() + step // 4) % by_id
    return KeyedJaggedTensor(keys=batch.keys(), values=ids, lengths=batch.lengths())


@dataclass
class Losses:
    """A train state member that differs between ranks: the sum of all losses."""

    sum: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sum = state_dict["sum"]


class Run:
    """This rank's training run."""

    def __init__(self, variant: Variant) -> None:
        torch.manual_seed(0)
        cell = variant.cell
        model = TowerModel(cell.spec, variant.draws)
        self.variant = variant
        self.counter = tdsp.RowCounter.for_model(model, half_life=6)
        wrapper = variant.dense() if variant.dense else None
        sharded = shard(cell, model=model, data_parallel_wrapper=wrapper)
        self.model = cast(tdsp.ModelParallel2D, sharded)
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        adam = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=0.01))
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, adam])
        self.fused: Any = self.model.fused_optimizer
        # KeyedOptimizerWrapper is no torch Optimizer, which schedulers require.
        inner: Any = adam._optimizer
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.95**step)
        members: dict[str, Any] = {
            "counter": self.counter,
            "scheduler": self.scheduler,
            "losses": Losses(),
            "position": {"batch": 0},
        }
        if variant.refresh_every:
            self.refresh = tdsp.HotSetRefresh(self.model, self.counter, every=variant.refresh_every)
            members["refresh"] = self.refresh
        self.losses, self.position = members["losses"], members["position"]
        self.state = tdsp.TrainState(self.model, self.optimizer, **members)
        # Ranks draw different numbers.
        torch.manual_seed(100 + dist.get_rank())
        self._pipeline: Any = None

    def batches(self) -> Iterator[KeyedJaggedTensor]:
        """Yield batches from the run's current step on."""
        step = self.position["batch"]
        while True:
            yield batch_of(self.variant.cell.spec, step, dist.get_rank())
            step += 1

    def step(self) -> float:
        """Train one batch; return its loss."""
        if self._pipeline is None and self.variant.pipeline:
            kind = {"sparse": TrainPipelineSparseDist, "rows": tdsp.TrainPipelineRowPrefetch}
            result: Any = kind[self.variant.pipeline]
            self._pipeline = result(self.model, self.optimizer, rank_device())
            self._stream = self.batches()
        batch = batch_of(self.variant.cell.spec, self.position["batch"], dist.get_rank())
        if self._pipeline is not None:
            loss = float(self._pipeline.progress(self._stream))
        else:
            self.optimizer.zero_grad()
            output, detached = self.model(batch)
            output.backward()
            self.model.sync()
            self.optimizer.step()
            loss = float(detached)
        self.scheduler.step()
        for group in self.fused.param_groups:
            group["lr"] *= 0.98
        self.counter.update(batch)
        if self.variant.refresh_every:
            self.refresh.step()
        self.losses.sum += loss
        self.position["batch"] += 1
        self.state.step += 1
        return loss

    def forget_batches(self) -> None:
        """Drop the pipeline, if there is one, with the batches that it holds."""
        if self._pipeline is not None:
            self._pipeline.detach()
            self._pipeline = None

    def save(self, folder: Path) -> None:
        path = folder / str(self.state.step)
        tdsp.save_checkpoint(path, self.model, self.optimizer, train_state=self.state)

    def load(self, path: Path) -> None:
        self.forget_batches()
        tdsp.load_checkpoint(path, self.model, self.optimizer, train_state=self.state)


@dataclass(frozen=True)
class Resumed:
    """A rank's resumed runs, compared with an uninterrupted one."""

    losses: list[float]
    """The losses of the uninterrupted run."""
    different: list[tuple[int, int, float, float]]
    """Loads and steps with another loss: where it was loaded, the step, both losses."""
    different_tensors: list[tuple[int, str]]
    """Tensors and moments that ended otherwise."""
    num_compared: int
    hot_sets: list[dict[str, tuple[int, ...]]]
    """At each save."""


def go_on_everywhere(
    rank: int, world_size: int, name: str, folder: Path, saves: list[int], steps: int
) -> Resumed:
    """Train and save at some steps; resume each in a new run that makes the later saves, too."""
    variant = variant_for(name, world_size)
    run = Run(variant)
    losses, hot_sets = [], []
    for step in range(1, steps + 1):
        losses.append(run.step())
        if step in saves:
            run.save(folder / "through")
            hot_sets.append({table: rows.row_ids for table, rows in run.model.hot_sets.items()})
    end = final_state(run)
    different: list[tuple[int, int, float, float]] = []
    different_tensors: list[tuple[int, str]] = []
    num_compared = 0
    for save in saves:
        other = Run(variant)
        # A model with another past.
        torch.manual_seed(7)
        for _ in range(save % 3):
            other.step()
        other.load(folder / "through" / str(save))
        for step in range(save + 1, steps + 1):
            loss = other.step()
            num_compared += 1
            if loss != rounded(losses[step - 1]):
                different.append((save, step, loss, losses[step - 1]))
            if step in saves:
                other.save(folder / f"from {save}")
        actual = final_state(other)
        assert actual.keys() == end.keys()
        different_tensors += [
            (save, key) for key, value in end.items() if not are_equal(actual[key], value)
        ]
    return Resumed(losses, different, different_tensors, num_compared, hot_sets)


def final_state(run: Run) -> dict[str, torch.Tensor]:
    """Return a run's final state as tensors."""
    counters = {
        f"counter {name}": torch.from_numpy(run.counter.stats()[name].counts.copy())
        for name in run.counter.tables
    }
    return {
        **{name: value.clone() for name, value in snapshot(run.model).items()},
        **counters,
        "random": torch.rand(3),
        "sum of losses": torch.tensor(run.losses.sum, dtype=torch.float64),
        "learning rates": torch.tensor([group["lr"] for group in run.optimizer.param_groups]),
        "sync step": torch.tensor(run.model.sync_step),
    }
