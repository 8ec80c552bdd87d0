"""Time whole steps, and count GPU syncs by place: ``python -m tests.gpu.launch -m ...``.

TorchRec's shardings beside this package's exchanges, on one model and with the same batches. A
step waits for the GPU where the CPU reads a number that the GPU computes.
"""

import argparse
import json
import os
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.gpu.results import NUMBERS_FILE, ROOT
from tests.support.devices import join_world, on_gpus, rank_device, ranks_per_host
from tests.support.models import BagModel, ModelSpec, TableSpec
from tests.support.parity import Cell, group_plan, make_optimizer, make_sharder
from torchrec_2dsp._compat.fbgemm import EmbOptimType

FUSED = EmbeddingComputeKernel.FUSED.value
Batches = Iterator[KeyedJaggedTensor]


class Scores(BagModel):
    """Returns a loss and scores, as TorchRec's pipelines expect; long runs stay finite."""

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        # If features were split and joined, each would cost a full copy in the backward.
        scores = self.over(self.ebc(features).values()).squeeze(1)
        return scores.square().mean(), scores.detach()


def draw(spec: ModelSpec, options: argparse.Namespace) -> Batches:
    """Yield endless batches on the device, without any precomputed metadata."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    keys = [feature for feature, _ in spec.features]
    size = len(keys) * options.samples
    kept = []
    for _ in range(4):
        where = torch.rand(size * options.ids, generator=generator) ** options.skew
        ids = (where * options.rows).long().clamp_(max=options.rows - 1)
        kept.append(ids.to(rank_device()))
    lengths = torch.full((size,), options.ids, device=rank_device())
    for number in count():
        yield KeyedJaggedTensor(keys, kept[number % len(kept)].clone(), lengths=lengths.clone())


def cells(spec: ModelSpec) -> dict[str, tuple[Cell, bool, type[Any] | None]]:
    """Return the runs by name: a cell, whether TorchRec alone runs it, and a pipeline."""
    mesh = tdsp.Mesh2D(1, dist.get_world_size())
    rows = Cell(mesh, spec=spec, exchange="row")
    hot = tuple((table.name, tuple(range(1000))) for table in spec.tables)
    stock, prefetch = TrainPipelineSparseDist, tdsp.TrainPipelineRowPrefetch
    return {
        "TorchRec, table_wise": (Cell(mesh, "table_wise", spec=spec), True, None),
        "TorchRec, row_wise": (Cell(mesh, spec=spec), True, None),
        "table_wise": (Cell(mesh, "table_wise", spec=spec), False, None),
        "row_wise": (Cell(mesh, spec=spec), False, None),
        "rows": (rows, False, None),
        "rows, int4": (replace(rows, transport="int4"), False, None),
        "rows, hot": (replace(rows, hot_rows=hot), False, None),
        "TorchRec, row_wise, pipeline": (Cell(mesh, spec=spec), True, stock),
        "rows, pipeline": (rows, False, stock),
        "rows, prefetch": (rows, False, prefetch),
    }


def make(cell: Cell, is_stock: bool) -> Any:
    """Shard a model from the meta device, so that tables are only built as shards."""
    model = Scores(cell.spec, "meta")
    model.over.to(rank_device())
    ours = make_sharder(cell)
    device = rank_device()
    if not is_stock:
        plan = group_plan(cell, model, ours)
        return tdsp.ModelParallel2D(module=model, device=device, plan=plan, sharders=[ours])
    sharder: Any = EmbeddingBagCollectionSharder(
        {**ours.fused_params, "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    )
    size, of_host = dist.get_world_size(), ranks_per_host(dist.get_world_size())
    shards = {
        table.name: row_wise(compute_kernel=FUSED)
        if cell.sharding == "row_wise"
        else table_wise(rank=number % size, compute_kernel=FUSED)
        for number, table in enumerate(cell.spec.tables)
    }
    plan = construct_module_sharding_plan(
        model.ebc,
        per_param_sharding=shards,
        sharder=sharder,
        local_size=of_host,
        world_size=size,
        device_type=device.type,
    )
    plan = ShardingPlan({"ebc": plan})
    return DistributedModelParallel(model, device=device, plan=plan, sharders=[sharder])


def stepper(model: Any, pipeline: type[Any] | None, batches: Batches) -> Callable[[], None]:
    """Return a function that trains one step."""
    optimizer = make_optimizer(model, lr=1e-4)
    if pipeline is not None:
        driver = pipeline(model, optimizer, rank_device())
        return lambda: driver.progress(batches)

    def step() -> None:
        optimizer.zero_grad()
        loss, _ = model(next(batches))
        loss.backward()
        if isinstance(model, tdsp.ModelParallel2D):
            model.sync()
        optimizer.step()

    return step


def waits_of(step: Callable[[], None], steps: int = 3) -> Counter[str]:
    """Count the steps' waits for the GPU, by place in the code."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if on_gpus():
            torch.cuda.set_sync_debug_mode("warn")
        for _ in range(steps):
            step()
        if on_gpus():
            torch.cuda.set_sync_debug_mode("default")
    places: Counter[str] = Counter()
    for warning in seen:
        if "synchronizing" in str(warning.message):
            file = warning.filename.split("site-packages/")[-1].replace(f"{ROOT}/", "")
            places[f"{file}:{warning.lineno}"] += 1
    return places


def time_of(step: Callable[[], None], blocks: int, steps: int) -> list[float]:
    """Return the milliseconds per step in each block."""
    times = []
    for _ in range(blocks):
        dist.barrier()
        _finish()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        _finish()
        times.append((time.perf_counter() - start) / steps * 1e3)
    return times


def kernels_of(step: Callable[[], None], steps: int = 3) -> dict[str, float]:
    """Return each kernel's milliseconds per step, the longest first."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + on_gpus()]
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        _finish()
    spent: Counter[str] = Counter()
    for event in profiler.key_averages():
        if not on_gpus():
            spent[event.key] += event.self_cpu_time_total
        elif event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            spent[event.key] += event.self_device_time_total
    return {name: us / steps / 1e3 for name, us in spent.most_common() if us}


def _finish() -> None:
    if on_gpus():
        torch.cuda.synchronize()


def main() -> None:
    """Run everything on each rank; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.steps", description=__doc__)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=400_000, help="of a table")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8_192, help="of a rank")
    parser.add_argument("--ids", type=int, default=1, help="of a bag")
    parser.add_argument("--skew", type=float, default=4.0, help="1 is none")
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--out", type=Path, default=os.environ.get(NUMBERS_FILE))
    options = parser.parse_args()
    join_world(int(os.environ["RANK"]))
    table = range(options.tables)
    spec = ModelSpec(
        tuple(TableSpec(f"t{n}", options.rows, options.dim, (f"f{n}",)) for n in table)
    )
    numbers: dict[str, Any] = {}
    for name, (cell, is_stock, pipeline) in cells(spec).items():
        if options.only not in name:
            continue
        batches = draw(spec, options)
        model = make(cell, is_stock)
        step = stepper(model, pipeline, batches)
        for _ in range(4):
            step()
        times = time_of(step, 5, 5)
        waits = waits_of(step)
        kernels = kernels_of(step)
        numbers[f"{name}, ms"] = statistics.median(times)
        numbers[f"{name}, ms of kernels"] = sum(kernels.values())
        numbers[f"{name}, waits"] = sum(waits.values()) / 3
        if dist.get_rank() == 0:
            print(f"\n{name}: {min(times):.2f} {statistics.median(times):.2f} {max(times):.2f} ms")
            print(f"  kernels {sum(kernels.values()):.2f} ms, waits {sum(waits.values()) / 3:.1f}")
            for key, ms in list(kernels.items())[:14]:
                print(f"  {ms:9.3f} {key[:110]}")
            for place, number in waits.most_common():
                print(f"  {number / 3:9.1f} wait {place}", flush=True)
        del model, step
        if on_gpus():
            torch.cuda.empty_cache()
    if options.out is not None and dist.get_rank() == 0:
        options.out.write_text(json.dumps(numbers, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
