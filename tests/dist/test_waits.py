"""A step waits for a GPU a few times, with a fixed operator count for any number of tables."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.devices import rank_device
from tests.support.loops import make_stream, plain_loop, shard_loss_model
from tests.support.models import ModelSpec, TableSpec
from tests.support.parity import Cell, make_optimizer
from tests.support.ranks import RankPool
from torchrec_2dsp.shard.batch import BadIds, IdCheck

PACKAGE = Path(tdsp.__file__).parent
OTHERS = ("/fbgemm_gpu/", "/torchrec/")
"""Folders with operators that aren't ours."""
ELSEWHERE = (str(PACKAGE / "_compat/fbgemm.py"), *OTHERS)
"""Files whose waits aren't ours: of numbers that FBGEMM keeps on the CPU, and TorchRec's own."""
WAITING = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "_unique2")
WAITING += ("unique_consecutive", "unique_dim")
BY_MASK = ("index", "index_put", "index_put_", "_index_put_impl_")


@contextmanager
def count_waits() -> Iterator[Counter[str]]:
    """Count by file and line where the package reads numbers or sizes from a device.

    Copies from Python lists count, too. Numbers that are on the CPU anyway also count.
    """
    mode, to_list, to_cpu = _Operations(), torch.Tensor.tolist, torch.Tensor.cpu

    def seen(tensor: torch.Tensor) -> torch.Tensor:
        mode.note(waits=tensor.numel() > 0)
        return tensor

    with (
        patch.object(torch.Tensor, "tolist", lambda tensor: to_list(seen(tensor))),
        patch.object(torch.Tensor, "cpu", lambda tensor: to_cpu(seen(tensor))),
        mode,
    ):
        yield mode.places


@contextmanager
def count_operators() -> Iterator[Counter[str]]:
    """Count the package's operator calls by file and line; views compute nothing.

    Calls in FBGEMM, TorchRec and autograd aren't counted.
    """
    mode = _Operators()
    with mode:
        yield mode.places


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace != "profiler":
            self.places.update(_place(but=OTHERS))
        return func(*args, **(kwargs or {}))


def _place(*, but: tuple[str, ...]) -> list[str]:
    """Return the package's running line in a list, or an empty list if other code runs."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not any(part in frame.f_code.co_filename for part in but):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            return [f"{path.relative_to(PACKAGE)}:{frame.f_lineno}"]
        frame = frame.f_back
    return []


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func.overloadpacket).removeprefix("aten.")
        self.note(
            waits=name in WAITING
            or (name == "lift_fresh" and args[0].numel() > 0)
            or (name == "repeat_interleave" and kwargs.get("output_size") is None)
            or (name in BY_MASK and any(getattr(i, "dtype", 0) is torch.bool for i in args[1]))
        )
        return func(*args, **kwargs)

    def note(self, *, waits: bool) -> None:
        """Count the package's line that waits."""
        self.places.update(_place(but=ELSEWHERE) if waits else [])


ROW_WISE = Cell(tdsp.Mesh2D(1, 2))
ROWS = replace(ROW_WISE, exchange="row")
HOT = replace(ROWS, hot_rows=(("t0", (0, 1, 5)),))
KINDS = {
    "row_wise": (ROW_WISE, 2, 18),
    "copies": (replace(ROW_WISE, mesh=tdsp.Mesh2D(2, 1)), 7, 70),
    "rows": (ROWS, 6, 67),
    "rows, hot": (HOT, 12, 145),
    "sequences, hot": (replace(HOT, spec=ModelSpec(sequence=True)), 12, 175),
    "rows, prefetch": (ROWS, 10, 141),
}
"""Configurations, how many times a step of each may wait, and how many operators it calls."""
VARYING = ("sequences, hot", "rows, prefetch")
"""Sequences are joined feature by feature; a half of the prefetched rows may be empty."""


def with_tables(cell: Cell, num_tables: int) -> Cell:
    """Repeat the cell's table, with its hot rows."""
    tables = tuple(TableSpec(f"t{n}", 40, 8, (f"f{n}",)) for n in range(num_tables))
    hot_rows = tuple((table.name, rows) for table in tables for _, rows in cell.hot_rows)
    return replace(cell, spec=replace(cell.spec, tables=tables), hot_rows=hot_rows)


Counts = tuple[Counter[str], Counter[str]]
"""A step's waits and operators, by place."""


def counts_of_a_step(rank: int, world_size: int) -> list[list[Counts]]:
    """Return each kind's waits and operators, with two tables and with five."""
    by_kind = []
    for kind, (cell, _, _) in KINDS.items():
        by_kind.append([])
        for repeated in (with_tables(cell, 2), with_tables(cell, 5)):
            parallel = shard_loss_model(repeated)
            optimizer = make_optimizer(parallel)
            batches = [of_step[rank] for of_step in make_stream(repeated, 6)]
            if "prefetch" in kind:
                pipeline = tdsp.TrainPipelineRowPrefetch(parallel, optimizer, rank_device())
                stream = iter(batches)
                steps = [partial(pipeline.progress, stream) for _ in batches]
            else:
                steps = [partial(plain_loop, parallel, optimizer, [batch]) for batch in batches]
            for step in steps[:3]:
                step()
            with count_waits() as waits, count_operators() as operators:
                steps[3]()
            by_kind[-1].append((waits, operators))
    return by_kind


def test_steps_do_the_same_for_any_number_of_tables(ranks2: RankPool) -> None:
    for by_kind in ranks2.run(counts_of_a_step):
        for (kind, (_, *bounds)), (few, many) in zip(KINDS.items(), by_kind, strict=True):
            assert few == many or kind in VARYING, kind
            assert any("shard/stages.py" in place for place in many[0]) == ("hot" in kind)
            for counts, bound in zip([*few, *many], [*bounds, *bounds], strict=True):
                assert 0 < counts.total() <= bound, f"{kind}: {counts.total()}, {counts}"


def test_what_is_a_wait() -> None:
    table = SimpleNamespace(name="t", num_embeddings=5, feature_names=["a"])
    batch = KeyedJaggedTensor(["a"], torch.tensor([9, 1]), lengths=torch.tensor([2]))
    check = partial(IdCheck([table], BadIds.DROP), batch)
    check()  # The first time it also copies the number of rows.
    with count_waits() as places:
        check()
        batch.values().tolist()
    # Is any id bad, how many are, and which are left; the test's own wait isn't the package's.
    assert places.total() == 3, places
