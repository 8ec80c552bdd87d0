"""Guarantees for every row codec, in one table with a line per codec; ids in few bytes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from torchrec_2dsp.codecs.ids import num_id_bytes, pack_ids, unpack_ids
from torchrec_2dsp.codecs.rows import EXACT, FlatCodec, FloatRows, IntegerRows, RowCodec
from torchrec_2dsp.codecs.sparse import (
    Entries,
    ErrorFeedback,
    SparseCodec,
    Threshold,
    ThresholdRule,
    largest,
)

CODECS: dict[str, RowCodec] = {
    "fp32": FloatRows(torch.float32),
    "bf16": FloatRows(torch.bfloat16),
    "fp16": FloatRows(torch.float16),
    "int8": IntegerRows(bits=8),
    "int4": IntegerRows(bits=4),
}
FLOAT32_MAX = torch.finfo(torch.float32).max
every_codec = pytest.mark.parametrize("name", CODECS)


def random_rows(num_rows: int, dim: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** torch.randn((num_rows, 1), generator=generator)
    return torch.randn((num_rows, dim), generator=generator) * sizes * scale


def round_trip(codec: RowCodec, rows: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(rows), rows.shape[1])


@every_codec
@settings(max_examples=60)
@given(
    num_rows=st.integers(0, 40),
    dim=st.integers(1, 33),
    exponent=st.integers(-44, 4),
    seed=st.integers(0, 10_000),
)
def test_no_number_changes_by_more_than_the_bound(
    name: str, num_rows: int, dim: int, exponent: int, seed: int
) -> None:
    codec, rows = CODECS[name], random_rows(num_rows, dim, 10.0**exponent, seed)
    errors = (round_trip(codec, rows) - rows).abs()
    assert errors.shape == rows.shape
    assert bool((errors <= codec.error_bound(rows)[:, None]).all())


@every_codec
def test_a_bound_is_no_larger_than_need_be(name: str) -> None:
    codec, rows = CODECS[name], random_rows(200, 64)
    errors = (round_trip(codec, rows) - rows).abs().amax(dim=1)
    bound = codec.error_bound(rows)
    if codec == EXACT:
        assert not errors.any()
        assert not bound.any()
    else:
        assert float((errors / bound).median()) > 0.5


@every_codec
@pytest.mark.parametrize("shape", [(0, 8), (3, 1), (5, 7), (2, 64)])
def test_both_ends_know_sizes_and_types(name: str, shape: tuple[int, int]) -> None:
    codec, rows = CODECS[name], random_rows(*shape)
    encoded = codec.encode(rows)
    assert encoded.shape == (shape[0], codec.columns(shape[1]))
    assert encoded.dtype is codec.dtype
    assert encoded.is_contiguous()
    assert encoded.nbytes == shape[0] * codec.num_bytes(shape[1])
    decoded = codec.decode(encoded, shape[1])
    assert decoded.dtype is torch.float32
    assert decoded.shape == rows.shape


@pytest.mark.parametrize(
    ("name", "vanishes", "smallest", "largest", "overflows"),
    [
        ("fp32", None, 2e-45, FLOAT32_MAX, None),
        ("bf16", 4.5e-41, 4.7e-41, 3.39e38, FLOAT32_MAX),
        ("fp16", 2.9e-8, 3.1e-8, 65_504, 65_520),
        ("int8", 1.47e-36, 1.48e-36, FLOAT32_MAX, None),
        ("int4", 8.1e-38, 8.2e-38, 3.38e38, FLOAT32_MAX),
    ],
)
def test_a_row_s_largest_number_has_bounds(
    name: str,
    vanishes: float | None,
    smallest: float,
    largest: float,
    overflows: float | None,
) -> None:
    """docs/guides/transport.md lists these bounds."""

    def arrived(number: float) -> float:
        return round_trip(CODECS[name], torch.tensor([[number, -number, 0.0]]))[0, 0].item()

    assert vanishes is None or arrived(vanishes) == 0.0
    assert arrived(smallest) > 0.0
    assert arrived(largest) < math.inf
    assert overflows is None or arrived(overflows) == math.inf


@every_codec
def test_zeros_stay_zeros(name: str) -> None:
    rows = random_rows(4, 6)
    rows[1] = 0.0
    rows[2, 3] = 0.0
    decoded = round_trip(CODECS[name], rows)
    assert not decoded[1].any()
    assert decoded[2, 3] == 0.0


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_does_not_become_so(name: str, bad: float) -> None:
    rows = random_rows(3, 6)
    rows[1, 2] = bad
    decoded = round_trip(CODECS[name], rows)
    assert not decoded[1].isfinite().all()
    assert decoded[[0, 2]].isfinite().all()


@every_codec
def test_a_row_is_encoded_by_itself(name: str) -> None:
    codec, rows = CODECS[name], random_rows(6, 16)
    assert torch.equal(codec.encode(rows)[2:4], codec.encode(rows[2:4]))


@every_codec
def test_what_is_encoded_stays_as_it_is(name: str) -> None:
    rows = random_rows(6, 16)
    before = rows.clone()
    round_trip(CODECS[name], rows)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("bits", [8, 4])
def test_what_has_travelled_travels_again_unchanged(bits: int) -> None:
    """Rows that are forwarded in the same codec aren't rounded twice, up to their scale."""
    codec, rows = IntegerRows(bits=bits), random_rows(100, 24)
    once = round_trip(codec, rows)
    twice = round_trip(codec, once)
    assert bool(((twice - once).abs() <= codec.error_bound(once)[:, None]).all())


VALUES = {
    "fp32": FlatCodec(EXACT, block=2),
    "bf16": FlatCodec(FloatRows(torch.bfloat16), block=2),
    "fp16": FlatCodec(FloatRows(torch.float16), block=2),
    "int8": FlatCodec(IntegerRows(bits=8)),
    "int4": FlatCodec(IntegerRows(bits=4), block=33),
}
every_form = pytest.mark.parametrize("name", VALUES)


def some_numbers(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator)


def some_entries(num_elements: int, num_entries: int, seed: int) -> Entries:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randperm(num_elements, generator=generator)[:num_entries].sort().values
    return Entries(positions, torch.randn(num_entries, generator=generator))


@every_form
@settings(max_examples=40)
@given(size=st.integers(0, 700), seed=st.integers(0, 1_000))
def test_flat_numbers_stay_within_the_bound(name: str, size: int, seed: int) -> None:
    codec, numbers = VALUES[name], some_numbers(size, seed)
    encoded = codec.encode(numbers)
    assert encoded.dtype is torch.uint8
    assert encoded.nbytes == codec.num_bytes(size)
    errors = (codec.decode(encoded, size) - numbers).abs()
    assert errors.shape == numbers.shape
    assert bool((errors <= codec.error_bound(numbers)).all())


@every_form
@settings(max_examples=40)
@given(
    num_elements=st.sampled_from([1, 2, 65_535, 65_536, 65_537, 200_000]),
    capacity=st.integers(1, 300),
    share=st.floats(0, 1),
    seed=st.integers(0, 1_000),
)
def test_entries_arrive_where_they_were(
    name: str, num_elements: int, capacity: int, share: float, seed: int
) -> None:
    codec = SparseCodec(num_elements, capacity, VALUES[name])
    entries = some_entries(num_elements, min(int(share * capacity), num_elements), seed)
    message = codec.encode(entries)
    assert message.nbytes == codec.num_bytes
    positions, values = codec.decode(message)
    assert positions.numel() == values.numel() == capacity
    come = torch.zeros(num_elements).index_add(0, positions, values)
    expected = torch.zeros(num_elements).index_add(
        0, entries.positions, codec.rounded(entries.values)
    )
    assert torch.equal(come, expected)
    if name == "fp32":
        assert torch.equal(come[entries.positions], entries.values)


def test_the_first_and_last_element_of_each_block_arrive() -> None:
    codec = SparseCodec(3 * 2**16, 8, VALUES["fp32"])
    positions = torch.tensor([0, 2**16 - 1, 2**16, 2**17 - 1, 2**17, 3 * 2**16 - 1])
    entries = Entries(positions, torch.arange(1.0, 7.0))
    come = torch.zeros(3 * 2**16).index_add(0, *codec.decode(codec.encode(entries)))
    assert torch.equal(come.nonzero().view(-1), positions)
    assert torch.equal(come[positions], entries.values)


def test_more_entries_than_fit_are_refused() -> None:
    codec = SparseCodec(100, 3, VALUES["bf16"])
    with pytest.raises(ValueError, match="4 entries don't fit into capacity=3"):
        codec.encode(some_entries(100, 4, seed=0))


def test_an_entry_takes_four_bytes_in_bf16_and_three_in_int8() -> None:
    num_bytes = {
        name: SparseCodec(4_000_000, 20_000, VALUES[name]).num_bytes / 20_000 for name in VALUES
    }
    assert num_bytes["fp32"] == pytest.approx(6, abs=0.03)
    assert num_bytes["bf16"] == pytest.approx(4, abs=0.03)
    assert num_bytes["int8"] == pytest.approx(3, abs=0.04)


@settings(max_examples=60)
@given(
    size=st.integers(1, 3_000),
    capacity=st.integers(1, 50),
    seed=st.integers(0, 1_000),
    num_zeros=st.integers(0, 3_000),
)
def test_the_largest_elements_are_chosen(
    size: int, capacity: int, seed: int, num_zeros: int
) -> None:
    values = some_numbers(size, seed)
    values[: min(num_zeros, size)] = 0
    chosen = Threshold(ThresholdRule(is_exact=True), min(capacity, size)).choose(values)
    num_chosen = min(capacity, int((values != 0).sum()))
    assert chosen.positions.numel() == num_chosen
    assert torch.equal(chosen.values, values[chosen.positions])
    assert torch.equal(chosen.positions, chosen.positions.sort().values)
    expected = values.abs().topk(num_chosen).values
    assert torch.equal(chosen.values.abs().sort(descending=True).values, expected)


def test_equal_elements_are_no_more_than_asked_for() -> None:
    chosen = Threshold(ThresholdRule(), capacity=10).choose(torch.ones(1_000))
    assert chosen.positions.numel() == 10


@pytest.mark.parametrize("change", ["noise", "steady", "shrinking", "rows"])
@pytest.mark.parametrize("density", [0.002, 0.02])
def test_as_much_is_sent_as_asked_for_with_sampled_thresholds(change: str, density: float) -> None:
    size = 300_000
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(size, generator=generator)
    by_row = torch.randn((size // 100, 1), generator=generator).exp().expand(-1, 100).reshape(-1)
    feedback, threshold = ErrorFeedback(), Threshold(ThresholdRule(), int(density * size))
    for step in range(30):
        noise = torch.randn(size, generator=generator)
        gradient = {
            "noise": noise,
            "steady": base + 0.1 * noise,
            "shrinking": (base + noise) * 0.9**step,
            "rows": noise * by_row,
        }[change]
        chosen = threshold.choose(feedback.add("layer", gradient))
        feedback.take_off("layer", *chosen)
        assert 0.8 <= chosen.positions.numel() / (density * size) <= 1


def test_a_threshold_that_is_kept_never_lets_more_pass_than_fit() -> None:
    threshold = Threshold(ThresholdRule(refresh=1_000), capacity=10)
    assert threshold.choose(some_numbers(2_000)).positions.numel() == 10
    assert threshold.choose(100 * some_numbers(2_000)).positions.numel() == 10
    assert threshold.choose(some_numbers(2_000) / 100).positions.numel() == 0


def test_a_restored_threshold_goes_on() -> None:
    first = Threshold(ThresholdRule(refresh=5), capacity=10)
    first.choose(some_numbers(2_000))
    second = Threshold(ThresholdRule(refresh=5), capacity=10)
    second.load_state_dict(first.state_dict())
    louder = 3 * some_numbers(2_000, seed=1)
    assert torch.equal(first.choose(louder).positions, second.choose(louder).positions)
    assert first.state_dict() == second.state_dict()


def test_largest_keeps_all_that_fit() -> None:
    entries = some_entries(100, 7, seed=3)
    assert largest(entries, 7) is entries
    assert largest(entries, 2).positions.numel() == 2


@settings(max_examples=40)
@given(seed=st.integers(0, 1_000), form=st.sampled_from(sorted(VALUES)))
def test_what_was_sent_and_the_residual_are_the_sum(seed: int, form: str) -> None:
    size, capacity = 500, 20
    codec = SparseCodec(size, capacity, VALUES[form])
    feedback = ErrorFeedback()
    threshold = Threshold(ThresholdRule(), capacity)
    total, sent = torch.zeros(size), torch.zeros(size)
    for step in range(10):
        gradient = some_numbers(size, seed + step)
        total += gradient
        chosen = threshold.choose(feedback.add("layer", gradient))
        feedback.take_off("layer", chosen.positions, codec.rounded(chosen.values))
        sent.index_add_(0, *codec.decode(codec.encode(chosen)))
    residual = feedback.state_dict()["layer"]
    # Ten float32 additions with numbers below 10.
    torch.testing.assert_close(sent + residual, total, rtol=0, atol=2e-5)
    assert feedback.square_norm() == pytest.approx(float(residual.square().sum()))


def test_rows_have_residuals_as_well() -> None:
    feedback = ErrorFeedback()
    feedback.add("table", torch.ones(4, 2))
    feedback.take_off("table", torch.tensor([2]), torch.tensor([[1.0, 0.5]]))
    feedback.give_back("table", torch.tensor([0]), torch.tensor([[2.0, 0.0]]))
    drained = feedback.drain("table", torch.device("cpu"))
    assert drained is not None
    assert drained.tolist() == [[3, 1], [1, 1], [0, 0.5], [1, 1]]
    assert feedback.drain("table", torch.device("cpu")) is None


def test_residuals_of_ranks_add_up() -> None:
    ranks = [ErrorFeedback(), ErrorFeedback()]
    for feedback, size in zip(ranks, (1.0, 2.0), strict=True):
        feedback.add("layer", torch.full((3,), size))
    joined = ErrorFeedback()
    joined.load_sum([feedback.state_dict() for feedback in ranks])
    assert joined.state_dict()["layer"].tolist() == [3, 3, 3]


def test_a_loaded_residual_goes_to_the_device_of_its_tensor() -> None:
    feedback = ErrorFeedback()
    feedback.load_sum([{"added": torch.ones(2), "drained": torch.ones(2)}])
    assert feedback.add("added", torch.ones(2, device="meta")).is_meta
    drained = feedback.drain("drained", torch.device("meta"))
    assert drained is not None
    assert drained.is_meta


NUM_ROWS = st.one_of(st.integers(1, 70_000), st.integers(1, 2**40))


@given(NUM_ROWS, st.sampled_from([torch.int32, torch.int64]), st.data())
def test_ids_come_back(num_rows: int, dtype: torch.dtype, data: st.DataObject) -> None:
    highest = min(num_rows - 1, torch.iinfo(dtype).max)
    ids = data.draw(st.lists(st.integers(0, highest)))
    num_bytes = num_id_bytes(num_rows)
    if num_bytes <= dtype.itemsize:
        packed = pack_ids(torch.tensor([0, *ids, highest], dtype=dtype)[1:], num_bytes)
        assert packed.shape == (len(ids) + 1, num_bytes)
        assert unpack_ids(packed).tolist() == [*ids, highest]


@given(NUM_ROWS, st.integers(-(2**62), -1) | st.integers(0, 2**62))
def test_an_id_without_a_row_stays_one(num_rows: int, beyond: int) -> None:
    bad = beyond if beyond < 0 else num_rows + beyond
    num_bytes = num_id_bytes(num_rows)
    (arrived,) = unpack_ids(pack_ids(torch.tensor([bad]), num_bytes)).tolist()
    assert arrived >= num_rows


@pytest.mark.parametrize("num_bytes", range(1, 6))
def test_the_bytes_grow_where_the_last_number_is_needed(num_bytes: int) -> None:
    most = 256**num_bytes - 1
    assert num_id_bytes(most) == num_bytes
    assert num_id_bytes(most + 1) == num_bytes + 1
    np.testing.assert_array_equal(
        num_id_bytes(np.array([1.0, most, most + 1])), [1, num_bytes, num_bytes + 1]
    )
