"""Samples dealt to ranks by cost, and training on them, against the global batch."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

import torchrec_2dsp as tdsp
from tests.support.batches import Sessions, check_samples, count_dealing_threads, sessions
from tests.support.devices import rank_device
from tests.support.loops import largest_gap, plain_loop, shard_loss_model, snapshot
from tests.support.models import ModelSpec, make_batch
from tests.support.oracle import Oracle
from tests.support.parity import LR, TOLERANCE, Cell, compare, make_optimizer, shard
from tests.support.ranks import RankPool, error_of
from torchrec_2dsp.samples.balanced_batches import Ahead

SIZES = {
    "even": [[8, 8, 8, 8]] * 3,
    "last is short": [[8, 8, 8, 8], [5, 8, 2, 8]],
    "an empty batch": [[4, 0, 4, 4], [4, 4, 4, 4]],
    "a rank ends early": [[4, 4, 4, 4], [4, 4, 0, 4], [9, 1, 0, 0]],
    "fewer samples than ranks": [[4, 4, 4, 4], [1, 0, 1, 0]],
}
"""Each rank's number of samples in each step; trailing zeros are no batches."""
OPTIONS: dict[str, dict[str, Any]] = {
    "by length": {},
    "by square": {"cost": tdsp.SampleCost(linear=0, quadratic=2), "lengths": ["history"]},
    "by function": {"lengths": lambda batch: batch.numbers % 5 + 1},
    "shared ids": {"shared_ids": 0.2},
    "speeds": {"rank_speeds": [1.0, 2.0, 1.0, 0.5]},
}


@dataclass
class Given:
    """Everything that a rank got."""

    steps: list[list[int]] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    report: Any = None
    num_threads: int = 0


def own_batches(rank: int, sizes: list[list[int]]) -> list[Sessions]:
    """Make a rank's batches: first samples are long, and longer on higher ranks."""
    batches, number = [], 0
    for step, of_ranks in enumerate(sizes):
        for owner, size in enumerate(of_ranks):
            has_more = any(later[owner] for later in sizes[step:])
            if owner == rank and has_more:
                lengths = [1 + owner + (20 if place < 2 else 0) for place in range(size)]
                batches.append(sessions(number, lengths, step))
            number += size
    return batches


def deal(rank: int, world_size: int, sizes: str, options: str) -> Given:
    given = Given()

    def add_weight(batch: Sessions, weight: float) -> Sessions:
        return replace(batch, weight=weight)

    batches = own_batches(rank, SIZES[sizes])
    with tdsp.BalancedBatches(batches, add_weight=add_weight, **OPTIONS[options]) as balanced:
        for batch in balanced:
            given.steps.append(check_samples(batch))
            given.weights.append(balanced.loss_weight)
            assert batch.weight == balanced.loss_weight
        assert next(balanced, None) is None
    given.report = balanced.report
    given.num_threads = count_dealing_threads()
    return given


def deal_all(rank: int, world_size: int) -> dict[tuple[str, str], Given]:
    cases = {(sizes, "by length") for sizes in SIZES}
    cases |= {("a rank ends early", options) for options in OPTIONS}
    return {case: deal(rank, world_size, *case) for case in sorted(cases)}


@pytest.mark.dealt_file
def test_every_sample_is_given_once_in_order_to_ranks_with_equal_work(ranks4: RankPool) -> None:
    by_rank = ranks4.run(deal_all)
    for case in by_rank[0]:
        sizes, options = SIZES[case[0]], case[1]
        given = [rank[case] for rank in by_rank]
        first = 0
        full = [of_ranks for of_ranks in sizes if sum(of_ranks) >= 4]
        assert all(len(rank.steps) == len(full) for rank in given), case
        for step, of_ranks in enumerate(full):
            total = sum(of_ranks)
            dealt = [rank.steps[step] for rank in given]
            assert sorted(n for of_rank in dealt for n in of_rank) == list(
                range(first, first + total)
            ), case
            assert all(of_rank == sorted(of_rank) for of_rank in dealt), case
            counts = [len(of_rank) for of_rank in dealt]
            if options == "speeds":
                assert counts[1] > counts[0] > counts[3], case
            else:
                assert max(counts) - min(counts) <= 1, case
            for rank, count in zip(given, counts, strict=True):
                assert rank.weights[step] == pytest.approx(count * 4 / total)
            first += total
        report = given[0].report
        assert report.num_batches == len(full)
        assert report.num_samples == sum(map(sum, full))
        assert report.num_dropped == sum(map(sum, sizes)) - report.num_samples
        assert 1 <= report.imbalance_after < report.imbalance_before, case
        assert report.num_moved > 0
        assert sum(rank.report.num_bytes for rank in given) > 40 * report.num_moved
        assert [rank.num_threads for rank in given] == [0] * 4


def follow_speeds(rank: int, world_size: int) -> list[int]:
    """Count the rank's samples while its speed is measured, and rank 1 slows down."""
    batches = [sessions(0, [1] * 12) for _ in range(24)]
    counts = []
    balanced = tdsp.BalancedBatches(batches, rank_speeds="measured", smoothing=0.5)
    for step, batch in enumerate(balanced):
        counts.append(len(batch.numbers))
        is_slow = rank == 1 and step >= 6
        cost = float(batch.history.lengths().sum()) + float(batch.extra["jagged"].lengths().sum())
        balanced.note_seconds(cost * (0.03 if is_slow else 0.01))
    return counts


@pytest.mark.dealt_file
def test_measured_slow_ranks_get_fewer_samples(ranks2: RankPool) -> None:
    fast, slow = ranks2.run(follow_speeds)
    assert [a + b for a, b in zip(fast, slow, strict=True)] == [24] * 24
    assert fast[:6] == slow[:6] == [12] * 6
    # Three times as slow: a quarter of all samples.
    assert slow[-1] == 6


def gather_sessions(rank: int, world_size: int) -> Any:
    """Report on sessions whose samples are spread over the ranks."""
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 10**6, (16, 20), generator=generator)
    order = torch.randperm(128, generator=generator)
    users = (order % 16)[rank * 64 : rank * 64 + 64]
    ids = KeyedJaggedTensor(["h"], history[users].reshape(-1), lengths=torch.full((64,), 20))
    batch = Batch(torch.ones(64, 1), ids, torch.ones(64))
    balanced = tdsp.BalancedBatches([batch], shared_ids=0.05)
    (dealt,) = balanced
    distinct = torch.tensor([len(dealt.sparse_features.values().unique())])
    dist.all_reduce(distinct)
    assert distinct == balanced.report.num_ids_after
    return balanced.report


@pytest.mark.dealt_file
def test_sessions_come_together_on_ranks(ranks2: RankPool) -> None:
    report = ranks2.run(gather_sessions)[0]
    assert report.num_ids_before > 1.8 * 16 * 20
    assert report.num_ids_after < 1.2 * 16 * 20
    assert report.imbalance_after < 1.05


def interleave(rank: int, world_size: int) -> list[list[int]]:
    """Run two streams at once, and close one early."""
    train = tdsp.BalancedBatches([sessions(100 * rank, [1, 2, 3]) for _ in range(4)])
    held_out = tdsp.BalancedBatches([sessions(1000 + 100 * rank, [3, 2]) for _ in range(4)])
    numbers = []
    for first, second in zip(train, held_out, strict=True):
        numbers.append(check_samples(first) + check_samples(second))
        if len(numbers) == 2:
            break
    train.close()
    held_out.close()
    assert next(train, None) is None
    assert count_dealing_threads() == 0
    return numbers


@pytest.mark.dealt_file
def test_two_streams_keep_apart_and_close(ranks2: RankPool) -> None:
    for first, second in zip(*ranks2.run(interleave), strict=True):
        assert sorted(first + second) == [0, 1, 2, 100, 101, 102, 1000, 1001, 1100, 1101]


def deal_in_pairs(rank: int, world_size: int) -> list[int]:
    """Return a rank's samples when pairs deal apart, and pairs' first ranks have long ones."""
    pair, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    lengths = [1, 1, 1, 1] if rank % 2 else [9, 9, 9, 9]
    batches = [sessions(10 * rank, lengths)]
    (batch,) = tdsp.BalancedBatches(batches, group=cast(dist.ProcessGroup, pair))
    return check_samples(batch)


@pytest.mark.dealt_file
def test_groups_of_ranks_deal_by_themselves(ranks4: RankPool) -> None:
    by_rank = ranks4.run(deal_in_pairs)
    for first in (0, 2):
        long, short = range(10 * first, 10 * first + 4), range(10 * first + 10, 10 * first + 14)
        for numbers in by_rank[first : first + 2]:
            assert len(set(numbers) & set(long)) == len(set(numbers) & set(short)) == 2


class MeanOracle(Oracle):
    """Trains on the mean loss over all samples of a step."""

    def mean_step(self, batches: list[KeyedJaggedTensor]) -> float:
        """Update once; return the mean loss before."""
        self.model.zero_grad()
        scores = torch.cat([self.model(batch) for batch in batches if batch.stride()])
        loss = (scores - 1.0).pow(2).mean()
        loss.backward()
        self.apply_(batches)
        return loss.item()


TRAINED = [[6, 6, 6, 6], [6, 6, 6, 6], [7, 3, 6, 2], [6, 6, 0, 6], [3, 0, 0, 4]]
CELLS = [
    Cell(tdsp.Mesh2D(1, 4), "table_wise"),
    Cell(tdsp.Mesh2D(1, 4), "row_wise", optimizer="sgd", stock_wrapper=True),
    Cell(tdsp.Mesh2D(1, 4), "row_wise", exchange="row"),
    Cell(tdsp.Mesh2D(2, 2), "row_wise"),
    Cell(tdsp.Mesh2D(2, 2), "table_wise", exchange="nonempty"),
]
WAYS: dict[str, dict[str, Any]] = {
    "equal": {},
    "speeds": {"rank_speeds": [1.0, 2.0, 1.0, 0.5], "shared_ids": 0.3},
}


def stream_of(rank: int, spec: ModelSpec) -> list[KeyedJaggedTensor]:
    last = max(step for step, sizes in enumerate(TRAINED) if sizes[rank])
    return [
        make_batch(spec, seed=10 * step + rank, batch_size=sizes[rank])
        for step, sizes in enumerate(TRAINED[: last + 1])
    ]


def train_cells(rank: int, world_size: int) -> list[tuple[str, float, float, int, list[int]]]:
    """Return each cell's largest gaps of a loss and a weight from the oracle."""
    gaps = []
    for cell in CELLS:
        oracle = MeanOracle(cell.spec, optimizer=cell.optimizer, lr=LR, eps=cell.eps)
        streams = [stream_of(owner, cell.spec) for owner in range(world_size)]
        expected = []
        for step in range(len(TRAINED)):
            expected.append(oracle.mean_step([s[step] for s in streams if step < len(s)]))
        for name, way in WAYS.items():
            parallel = shard(cell)
            optimizer = make_optimizer(parallel)
            loss_gap, counts = 0.0, []
            balanced = tdsp.BalancedBatches(streams[rank], **way)
            for step, batch in enumerate(balanced):
                optimizer.zero_grad()
                loss = (parallel(batch) - 1.0).pow(2).mean() * balanced.loss_weight
                loss.backward()
                if isinstance(parallel, tdsp.ModelParallel2D):
                    parallel.sync()
                optimizer.step()
                mean = loss.detach() / world_size
                dist.all_reduce(mean)
                loss_gap = max(loss_gap, abs(mean.item() - expected[step]))
                counts.append(batch.stride())
            assert len(counts) == len(TRAINED)
            gap = compare(parallel, oracle)
            gaps.append((f"{cell} {name}", loss_gap, gap.worst, balanced.report.num_moved, counts))
    return gaps


@pytest.mark.dealt_file
def test_training_is_that_of_the_global_batch(ranks4: RankPool) -> None:
    by_rank = ranks4.run(train_cells)
    for cases in zip(*by_rank, strict=True):
        for name, loss_gap, weight_gap, num_moved, _ in cases:
            # Sums of the same float32 numbers in another order, through five steps.
            assert loss_gap < 2 * TOLERANCE, name
            assert weight_gap < 2 * TOLERANCE, name
            assert num_moved > 10
        if cases[0][0].endswith("speeds"):
            assert cases[1][4][0] > cases[3][4][0] > 0


def pipe(rank: int, world_size: int) -> float:
    """Return the gap between TorchRec's pipeline and a plain loop over balanced batches."""
    cell = Cell(tdsp.Mesh2D(1, world_size))
    ends = []
    for is_piped in (False, True):
        parallel = shard_loss_model(cell)
        optimizer = make_optimizer(parallel)
        batches = [make_batch(cell.spec, seed=10 * step + rank, batch_size=6) for step in range(4)]
        balanced = tdsp.BalancedBatches(batches)
        if is_piped:
            pipeline: Any = TrainPipelineSparseDist(parallel, optimizer, rank_device())
            for _ in range(4):
                pipeline.progress(balanced)
            with pytest.raises(StopIteration):
                pipeline.progress(balanced)
        else:
            plain_loop(parallel, optimizer, balanced)
        ends.append(snapshot(parallel))
    return largest_gap(*ends)


@pytest.mark.dealt_file
def test_pipelines_take_balanced_batches(ranks2: RankPool) -> None:
    assert ranks2.run(pipe) == [0.0, 0.0]


def failing_loader(rank: int) -> Iterator[Sessions]:
    yield sessions(0, [1, 2])
    yield sessions(0, [1, 2])
    if rank == 1:
        raise OSError("no such file")
    yield sessions(0, [1, 2])
    yield sessions(0, [1, 2])


def sharing_bags(num_bags: int, **strides: Any) -> KeyedJaggedTensor:
    """Return two features whose first bag is that of both samples."""
    return KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(num_bags),
        lengths=torch.ones(num_bags, dtype=torch.int64),
        inverse_indices=(["a", "b"], torch.zeros(2, 2, dtype=torch.int64)),
        **strides,
    )


def fail(rank: int, world_size: int) -> dict[str, str]:
    def run(batches: Any, **options: Any) -> Any:
        return lambda: list(tdsp.BalancedBatches(batches, **options))

    def ones(batch: Any) -> torch.Tensor:
        return torch.ones(2)

    good = sessions(0, [1, 2])
    balanced = tdsp.BalancedBatches(failing_loader(rank))
    assert [len(next(balanced).numbers) for _ in range(2)] == [2, 2]
    errors = {"loader": error_of(lambda: next(balanced)), "again": error_of(lambda: next(balanced))}
    other = Batch(torch.ones(2, 3), good.history, torch.ones(2))
    two_sizes = Batch(torch.ones(3, 3), good.history, torch.ones(2))
    beside = Batch(torch.ones(2, 3), good.history, torch.ones(2))
    vars(beside)["clicks"] = {"weights": torch.ones(2)}
    cases = {
        "beside": run([beside]),
        "list": run([{"x": torch.ones(2), "users": ["ann", "bob"]}]),
        "lists": run([(torch.ones(2), {"tags": [[1], [2, 3, 4]]})]),
        "forms": run([good if rank else other]),
        "order": run([{key: torch.ones(2) for key in ("ab", "ba")[rank]}], lengths=ones),
        "keys": run(
            [KeyedTensor([*"ab", *"ba"][2 * rank :][:2], [1, 1], torch.ones(2, 2))], lengths=ones
        ),
        "columns": run(
            [KeyedTensor(["a", "b"], [1 + rank, 2 - rank], torch.ones(2, 3))], lengths=ones
        ),
        "never": run([good] if rank else []),
        "sizes": run([two_sizes]),
        "object": run([good if rank else {"a": torch.ones(2), "b": object()}]),
        "nothing": run([{"a": 1}]),
        "device": run([torch.ones(2, device="meta")]),
        "gradient": run([torch.ones(2, requires_grad=True)]),
        "variable": run([sharing_bags(3, stride_per_key_per_rank=[[1], [2]])]),
        "shared bags": run([sharing_bags(4)]),
        "feature": run([good], lengths=["future"]),
        "no lengths": run([torch.ones(2)]),
        "function": run([good], lengths=lambda _: torch.ones(3)),
        "shared": run([good], shared_ids=1.0),
        "smoothing": run([good], smoothing=0.0),
        "speeds": run([good], rank_speeds=[1.0]),
        "no speed": run([good], rank_speeds=[1.0, 0.0]),
        "settings": run([good], shared_ids=0.1 * rank),
        "seconds": lambda: tdsp.BalancedBatches([good]).note_seconds(-1.0),
    }
    errors |= {name: error_of(call) for name, call in cases.items()}
    # Whatever has failed leaves the group of ranks as it was.
    assert sum(len(batch.numbers) for batch in tdsp.BalancedBatches([good, good])) == 4
    assert count_dealing_threads() == 0
    return errors


def test_errors_are_the_same_on_all_ranks_or_name_the_rank(ranks2: RankPool) -> None:
    first, second = ranks2.run(fail)
    assert first["loader"] == first["again"]
    assert first["loader"].startswith("RankError: ")
    assert first["loader"].endswith(
        "rank 1 failed as it took its next batch: OSError: no such file"
    )
    assert second["loader"] == second["again"] == "OSError: no such file"
    assert first["object"].startswith("UnsupportedError: ")
    assert "a batch holds a value of type object" in first["object"]
    assert "failed as it took its next batch: UnsupportedError" in second["object"]
    expected = {
        "beside": ("Unsupported", "type Batch has 'clicks' beside its fields"),
        "list": ("Unsupported", "a batch holds a value for each of its 2 samples in ['users'],"),
        "lists": ("Unsupported", "a batch holds a value for each of its 2 samples in [1]['tags'],"),
        "order": ("Config", "of BalancedBatches differs between ranks: rank 0 has ['a']: torch.f"),
        "keys": (
            "Config",
            "rank 0 has batch: KeyedTensor with ['a', 'b'] of [1, 1] columns: torch.f",
        ),
        "columns": ("Config", "with ['a', 'b'] of [1, 2] columns: torch.float32"),
        "forms": ("Config", "the form of the batches of BalancedBatches differs between ranks"),
        "never": ("Config", "had no batch at all"),
        "sizes": ("Input", "the tensors of a batch have 3, 2, 2 samples"),
        "nothing": ("Unsupported", "a batch of type dict has no tensors, so it has no samples"),
        "device": ("Unsupported", "a batch is on meta already; balance it on the CPU"),
        "gradient": ("Unsupported", "a batch holds a tensor that needs a gradient"),
        "variable": ("Unsupported", "or with inverse_indices, can't be balanced: samples share"),
        "shared bags": ("Unsupported", "or with inverse_indices, can't be balanced: samples share"),
        "feature": ("Input", "the batch has no feature 'future'; use some of history, clicks"),
        "no lengths": ("Input", "a batch without jagged tensors has no lengths"),
        "function": ("Input", "lengths() gave a tensor of shape (3,) for 2 samples"),
        "shared": ("Config", "BalancedBatches(shared_ids=1.0) is no share"),
        "smoothing": ("Config", "BalancedBatches(smoothing=0.0) is no factor"),
        "speeds": ("Config", "BalancedBatches(rank_speeds=[1.0]) doesn't fit 2 ranks"),
        "no speed": ("Config", "rank_speeds: 0.0 is no speed"),
        "settings": ("Config", "the settings of BalancedBatches differs between ranks"),
        "seconds": ("Config", "note_seconds(-1.0) is no time"),
    }
    assert set(expected) == set(first) - {"loader", "again", "object"}
    for name, (kind, text) in expected.items():
        for error in (first[name], second[name]):
            assert error.startswith(f"{kind}Error: "), (name, error)
            assert text in error, (name, error)


def test_a_call_ahead_waits_for_the_one_before_and_hands_over_errors() -> None:
    order: list[str] = []
    gate = threading.Event()

    def first_call() -> None:
        gate.wait(10)
        order.append("first")
        raise ValueError("first")

    first = Ahead(first_call, None)
    second = Ahead(lambda: order.append("second"), first)
    assert order == []
    gate.set()
    second.result()
    assert order == ["first", "second"]
    with pytest.raises(ValueError, match="first"):
        first.result()


def alone(rank: int, world_size: int) -> None:
    group = dist.new_group([rank], use_local_synchronization=True)
    batches = [sessions(0, [1, 2]), sessions(2, [3])]
    balanced = tdsp.BalancedBatches(
        batches,
        group=cast(Any, group),
        add_weight=lambda batch, weight: replace(batch, weight=weight),
    )
    given = list(balanced)
    assert [check_samples(batch) for batch in given] == [[0, 1], [2]]
    assert [batch.weight for batch in given] == [balanced.loss_weight] * 2 == [1.0] * 2
    closed = tdsp.BalancedBatches(batches, group=cast(Any, group))
    assert check_samples(next(closed)) == [0, 1]
    closed.close()
    assert next(closed, None) is None
    odd = tdsp.BalancedBatches([{"x": [object()]}], group=cast(Any, group))
    assert "a batch holds a value of type object" in error_of(lambda: next(odd))


def test_a_rank_that_is_alone_gets_its_own_batches(ranks2: RankPool) -> None:
    ranks2.run(alone)
