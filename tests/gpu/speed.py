"""Time a step's parts on one device: ``python -m tests.gpu.speed --ids 20 --dtype fp16``.

FBGEMM's fused lookup and update beside a captured one, the search for distinct rows, pooling, and
codecs beside FBGEMM's int8 and a copy. Prints a table, and writes the numbers as JSON.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.gpu.results import NUMBERS_FILE
from torchrec_2dsp._compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    SparseType,
    Tbe,
    sum_bags,
)
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.replicas.capture import RowCapture
from torchrec_2dsp.rows.gradients import RowSum
from torchrec_2dsp.rows.update import quickest_updater

_SHARE_OF_MEMORY = 0.6
"""The share of the GPU's free memory that tables may take."""


@dataclass(kw_only=True)
class Speeds:
    """Times in milliseconds, and derived numbers, by name."""

    device: torch.device
    repeat: int
    numbers: dict[str, float] = field(default_factory=dict)

    def time(self, name: str, run: Callable[[], object]) -> float:
        """Measure, store and return a function's median time."""
        run()
        run()
        times = [self._once(run) for _ in range(self.repeat)]
        self.numbers[f"{name}, ms"] = median = statistics.median(times)
        return median

    def time_moved(self, name: str, num_bytes: float, run: Callable[[], object]) -> None:
        """Time a function, and store its throughput on ``num_bytes`` as a share of a copy's."""
        speed = num_bytes / self.time(name, run)
        self.numbers.setdefault("copy, GB/s", speed / 1e6)  # A copy is timed first.
        self.numbers[f"{name}, share of copy"] = speed / 1e6 / self.numbers["copy, GB/s"]

    def _once(self, run: Callable[[], object]) -> float:
        if self.device.type == "cpu":
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def make_tables(options: argparse.Namespace, device: torch.device) -> tuple[int, Tbe]:
    """Return the number of rows per table, and a kernel with all tables."""
    dtype = SparseType.FP16 if options.dtype == "fp16" else SparseType.FP32
    row_bytes = options.dim * (2 if options.dtype == "fp16" else 4) + 4
    num_rows = options.rows
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        num_rows = min(num_rows, int(free * _SHARE_OF_MEMORY / options.tables / row_bytes))
    is_cpu = device.type == "cpu"
    place = EmbeddingLocation.HOST if is_cpu else EmbeddingLocation.DEVICE
    compute = ComputeDevice.CPU if is_cpu else ComputeDevice.CUDA
    return num_rows, Tbe(
        [(num_rows, options.dim, place, compute)] * options.tables,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        weights_precision=dtype,
        stochastic_rounding=False,
        learning_rate=0.01,
        device=device,
    )


def time_lookups(speeds: Speeds, options: argparse.Namespace) -> None:
    """Time the fused lookup and update, and a captured one with its update."""
    device = speeds.device
    num_rows, tbe = make_tables(options, device)
    speeds.numbers["rows of a table"] = num_rows
    num_bags = options.tables * options.samples
    ids = torch.randint(0, num_rows, (num_bags * options.ids,), device=device)
    offsets = torch.arange(0, ids.numel() + 1, options.ids, device=device)
    gradient = torch.randn_like(tbe(ids, offsets))

    def fused() -> None:
        tbe(ids, offsets).backward(gradient)

    capture = RowCapture(tbe, [f"t{table}" for table in range(options.tables)])
    updater = quickest_updater(tbe)

    def captured() -> None:
        capture.lookup(lambda: tbe(ids, offsets), None).backward(gradient)
        for pending in capture.take():
            updater.apply(pending.gradients())

    capture.lookup(lambda: tbe(ids, offsets), None).backward(gradient)
    kept = capture.take()[0].gradients()
    speeds.time("update", lambda: updater.apply(kept))
    speeds.time("captured forward", lambda: capture.lookup(lambda: tbe(ids, offsets), None))
    forward = speeds.time("fused forward", lambda: tbe(ids, offsets))
    fused_ms = speeds.time("fused forward and backward", fused)
    captured_ms = speeds.time("captured forward, backward and update", captured)
    shares = {
        "captured / fused, all": captured_ms / fused_ms,
        "captured / fused, without the forward": (captured_ms - forward) / (fused_ms - forward),
    }
    speeds.numbers |= shares


def time_rows(speeds: Speeds, options: argparse.Namespace) -> None:
    """Time row exchange's local work on one batch: finding distinct rows, and pooling them."""
    num_ids = options.tables * options.samples * options.ids
    num_rows = options.tables * options.rows
    keys = torch.randint(0, num_rows, (num_ids,), dtype=torch.int32, device=speeds.device)
    sums = RowSum(keys, finds_places=True)
    speeds.numbers["ids of a batch"] = num_ids
    speeds.numbers["distinct rows"] = sums.keys.numel()
    speeds.time("sort and unique", lambda: RowSum(keys, finds_places=True))
    rows = torch.randn(sums.keys.numel(), options.dim, device=speeds.device)
    places = sums.places
    offsets = torch.arange(0, num_ids + 1, options.ids, device=speeds.device)
    num_bags = offsets.numel() - 1
    num_bytes = 4.0 * options.dim * (num_ids + num_bags)
    speeds.time_moved("pooling", num_bytes, lambda: sum_bags(rows, places, offsets))
    bags = torch.randn(num_bags, options.dim, device=speeds.device)
    sources = torch.arange(num_ids, device=speeds.device) // options.ids
    skewed = (torch.rand(num_ids, device=speeds.device) ** 9 * num_rows).int()
    for name, drawn in (("", keys), (", skewed", skewed)):
        sums = RowSum(drawn, sources)
        num_bytes = 4.0 * options.dim * (num_ids + sums.keys.numel())
        speeds.time_moved(f"summing gradients by row{name}", num_bytes, lambda s=sums: s.of(bags))


def time_codecs(speeds: Speeds, options: argparse.Namespace) -> None:
    """Time encoding and decoding rows beside a copy, and FBGEMM's int8."""
    rows = torch.randn(options.tables * options.samples, options.dim, device=speeds.device)
    target = torch.empty_like(rows)
    speeds.time_moved("copy", 2.0 * rows.nbytes, lambda: target.copy_(rows))
    fbgemm = torch.ops.fbgemm
    ways: list[tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = [
        (str(transport), transport.codec.encode, partial(transport.codec.decode, dim=options.dim))
        for transport in (Transport.FP16, Transport.INT8, Transport.INT4)
    ]
    int8 = fbgemm.FloatToFused8BitRowwiseQuantized, fbgemm.Fused8BitRowwiseQuantizedToFloat
    for name, encode, decode in [*ways, ("FBGEMM int8", *int8)]:
        encoded = encode(rows)
        num_bytes = float(rows.nbytes + encoded.nbytes)
        speeds.time_moved(f"{name} encode", num_bytes, lambda e=encode: e(rows))
        speeds.time_moved(f"{name} decode", num_bytes, lambda d=decode, m=encoded: d(m))


def main() -> None:
    """Time everything; the queue sets the file for the numbers."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.speed", description=__doc__)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=10_000_000, help="of a table, if they fit")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--samples", type=int, default=65_536)
    parser.add_argument("--ids", type=int, default=1, help="of a bag")
    parser.add_argument("--dtype", choices=("fp32", "fp16"), default="fp32")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--out", type=Path, default=os.environ.get(NUMBERS_FILE))
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speeds = Speeds(device=device, repeat=options.repeat)
    for part in (time_codecs, time_rows, time_lookups):
        part(speeds, options)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for name, number in speeds.numbers.items():
        print(f"{number:16,.3f}  {name}")
    if options.out is not None:
        options.out.write_text(json.dumps(speeds.numbers, indent=1))


if __name__ == "__main__":
    main()
