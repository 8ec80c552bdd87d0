"""How many bytes transports save, on a batch that is counted by hand."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loops import shard
from tests.support.models import ModelSpec, TableSpec
from tests.support.oracle import local_loss
from tests.support.parity import Cell
from tests.support.ranks import RankPool
from torchrec_2dsp.comms.counting import count_encoded

ONE_TABLE = ModelSpec((TableSpec("t0", 40, 8, ("f0",)),))
IDS = ([1, 4, 4], [7, 4, 1, 2])
"""The ids of each rank's batch."""
LENGTHS = ([2, 1, 0], [1, 1, 2])
"""How many of them each of three bags has."""
NUM_DISTINCT = (2, 4)
"""How many different rows each rank needs."""
FP32_BYTES = 8 * 4
"""The bytes of a row of the table."""
ROW_BYTES = {"bf16": 8 * 2, "int8": 8 + 2, "int4": 4 + 2}
"""The bytes of an encoded row: its numbers, and a scale of two bytes beside integers."""
ONE, TWO = tdsp.Mesh2D(1, 2), tdsp.Mesh2D(2, 1)


@dataclass(frozen=True)
class Counted:
    """What a rank counted in a step."""

    before: int
    """The bytes of rows in fp32."""
    after: int
    """The bytes of encoded rows."""
    sent: int
    """The bytes that replicas sent."""
    saved: int
    """The bytes that replicas would have sent besides."""


def trained(rank: int, world_size: int, cell: Cell) -> Counted:
    """The counts of one step; another one before it isn't counted."""
    parallel = shard(replace(cell, spec=ONE_TABLE))
    assert isinstance(parallel, tdsp.ModelParallel2D)
    batch = KeyedJaggedTensor.from_lengths_sync(
        ["f0"], torch.tensor(IDS[rank % 2]), torch.tensor(LENGTHS[rank % 2])
    )
    local_loss(parallel(batch)).backward()
    first = parallel.sync_now()
    with count_encoded() as encoded:
        local_loss(parallel(batch)).backward()
        report = parallel.sync_now()
    assert parallel.sync_total.saved_bytes == first.saved_bytes + report.saved_bytes
    return Counted(encoded.before, encoded.after, report.num_bytes, report.saved_bytes)


@pytest.mark.parametrize(
    ("cell", "num_rows"),
    [
        # The owner sends six bags, and each rank gradients of its own three.
        (Cell(ONE, "table_wise", transport="int8"), 6 + 3 + 3),
        # One of rank 0's bags is empty.
        (
            Cell(ONE, "table_wise", exchange="nonempty", transport="bf16"),
            5 + 5,
        ),
        # Both ranks have parts of all six bags.
        (Cell(ONE, "row_wise", transport="int8"), 6 + 6 + 3 + 3),
        (
            Cell(ONE, "row_wise", exchange="row", transport="int4"),
            2 * sum(NUM_DISTINCT),
        ),
        (Cell(ONE, "row_wise", exchange="row"), 0),
    ],
    ids=str,
)
def test_rows_count_once(ranks2: RankPool, cell: Cell, num_rows: int) -> None:
    by_rank = ranks2.run(trained, cell)

    assert sum(counted.before for counted in by_rank) == num_rows * FP32_BYTES
    encoded = num_rows * ROW_BYTES.get(cell.transport, 0)
    assert sum(counted.after for counted in by_rank) == encoded
    assert [counted.saved for counted in by_rank] == [0, 0]


SyncConfig = tdsp.GradientSync | tdsp.WeightSync


def merging(transport: tdsp.Transport) -> SyncConfig:
    """The sync that sends gradients."""
    return tdsp.GradientSync(transport=transport)


def averaging(transport: tdsp.Transport) -> SyncConfig:
    """The sync that sends changed rows, however many there are."""
    return tdsp.WeightSync(transport=transport, dense_above=1.0)


@pytest.mark.parametrize(
    ("kind", "transport", "encoded_bytes"),
    [
        (merging, "bf16", (2 * 16, 4 * 16)),
        (merging, "int8", (2 * 10, 4 * 10)),
        (averaging, "bf16", (2 * 16, 4 * 16)),
        # In one message with row ids, tensors begin at multiples of eight bytes.
        (averaging, "int8", (2 * 10 + 4, 4 * 10)),
    ],
)
def test_replicas_say_what_they_save(
    ranks2: RankPool,
    kind: Callable[[tdsp.Transport], SyncConfig],
    transport: str,
    encoded_bytes: tuple[int, int],
) -> None:
    """Rows are sent with a transport and without; the saved bytes are the difference."""
    rounded, exact = (
        ranks2.run(
            trained,
            Cell(TWO, "table_wise", optimizer="sgd", sync=sync),
        )
        for sync in (kind(tdsp.Transport(transport)), kind(tdsp.Transport.FP32))
    )

    saved = [
        num_rows * FP32_BYTES - num_bytes
        for num_rows, num_bytes in zip(NUM_DISTINCT, encoded_bytes, strict=True)
    ]
    assert [counted.saved for counted in rounded] == saved
    assert [counted.sent + counted.saved for counted in rounded] == [
        counted.sent for counted in exact
    ]
    assert [counted.saved for counted in exact] == [0, 0]
    assert all(counted.before == counted.after == 0 for counted in rounded)


@pytest.mark.parametrize("kind", [merging, averaging])
def test_savings_count_for_each_peer(
    ranks4: RankPool, kind: Callable[[tdsp.Transport], SyncConfig]
) -> None:
    rounded, exact = (
        ranks4.run(
            trained, Cell(tdsp.Mesh2D(4, 1), "table_wise", optimizer="sgd", sync=kind(transport))
        )
        for transport in (tdsp.Transport.INT8, tdsp.Transport.FP32)
    )

    for with_transport, without in zip(rounded, exact, strict=True):
        assert with_transport.saved > 0
        assert with_transport.sent + with_transport.saved == without.sent
