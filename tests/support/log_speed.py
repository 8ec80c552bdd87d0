"""Measure seconds and memory for reading a log like Criteo's, beside pyarrow alone.

The log has as many distinct values as an equally long head of the real one. Both are timed in
processor seconds on one thread, which other programs on the machine hardly change.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.data.dataset import Split
from torchrec_2dsp.programs.data.logs.sections import CriteoConfig

_NUM_DENSE, _NUM_SPARSE = 13, 26
_NAMES = (
    "label",
    *(f"I{number}" for number in range(1, 14)),
    *(f"C{number}" for number in range(1, 27)),
)
_CHUNK_ROWS = 100_000


def write_criteo_like(path: Path, num_rows: int, seed: int = 0) -> None:
    """Write a log with Criteo's columns: counts with a long tail, eight hexadecimal digits."""
    random = np.random.default_rng(seed)
    path.unlink(missing_ok=True)
    for first in range(0, num_rows, _CHUNK_ROWS):
        size = min(_CHUNK_ROWS, num_rows - first)
        columns = [pa.array(random.integers(2, size=size))]
        for _ in range(_NUM_DENSE):
            counts = np.minimum(random.zipf(1.4, size), 10**6)
            columns.append(pa.array(counts, mask=random.random(size) < 0.2))
        for _ in range(_NUM_SPARSE):
            ids = random.zipf(1.3, size).astype(np.uint32) * np.uint32(2654435761)
            texts = [f"{value:08x}" for value in ids.tolist()]
            columns.append(pa.array(texts, mask=random.random(size) < 0.05))
        table = pa.table(columns, names=list(_NAMES))
        options = pa_csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
        with path.open("ab") as file:
            pa_csv.write_csv(table, file, options)


def pyarrow_seconds(path: Path) -> float:
    """Return pyarrow's processor seconds for parsing the file block by block."""
    start = time.process_time()
    types = {name: pa.binary() if name[0] == "C" else pa.float32() for name in _NAMES}
    reader = pa_csv.open_csv(
        path,
        read_options=pa_csv.ReadOptions(
            use_threads=False, column_names=list(_NAMES), block_size=4 * 2**20
        ),
        parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=pa_csv.ConvertOptions(column_types=types),
    )
    for _ in reader:
        pass
    return time.process_time() - start


def reader_seconds(path: Path, *, batch_size: int) -> tuple[float, float]:
    """Return the processor seconds for converting a file, and for reading it in batches."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        tree = {"files": str(path), "held_out": {"share": 0.0}, "num_ahead": 0, "prepared": folder}
        data = make_config(CriteoConfig, tree).dataset()
        converted = time.process_time()
        for _ in data.batches(Split.TRAIN, global_batch_size=batch_size, rank=0, world_size=1):
            pass
        return converted - start, time.process_time() - converted


def peak_bytes() -> int:
    """Return this process's peak memory so far."""
    factor = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * factor
