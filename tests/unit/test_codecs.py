"""What every codec of rows promises, in one table that each joins by a line."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from torchrec_2dsp.codecs.rows import FloatRows, IntegerRows, RowCodec

CODECS: dict[str, RowCodec] = {
    "fp32": FloatRows(torch.float32),
    "bf16": FloatRows(torch.bfloat16),
    "fp16": FloatRows(torch.float16),
    "int8": IntegerRows(bits=8),
    "int4": IntegerRows(bits=4),
    "int8 at random": IntegerRows(bits=8, generator=torch.Generator().manual_seed(0)),
    "int4 at random": IntegerRows(bits=4, generator=torch.Generator().manual_seed(0)),
}
BYTES_OF_64 = {"fp32": 256, "bf16": 128, "fp16": 128, "int8": 66, "int4": 34}
FLOAT32_MAX = torch.finfo(torch.float32).max
every_codec = pytest.mark.parametrize("name", CODECS)


def some_rows(num_rows: int, dim: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** torch.randn((num_rows, 1), generator=generator)
    return torch.randn((num_rows, dim), generator=generator) * sizes * scale


def round_trip(codec: RowCodec, rows: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(rows), rows.shape[1])


@every_codec
@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(0, 40),
    dim=st.integers(1, 33),
    exponent=st.integers(-44, 4),
    seed=st.integers(0, 10_000),
)
def test_no_number_changes_by_more_than_the_bound(
    name: str, num_rows: int, dim: int, exponent: int, seed: int
) -> None:
    codec, rows = CODECS[name], some_rows(num_rows, dim, 10.0**exponent, seed)
    errors = (round_trip(codec, rows) - rows).abs()
    assert errors.shape == rows.shape
    assert bool((errors <= codec.error_bound(rows)[:, None]).all())


@every_codec
def test_a_bound_is_no_larger_than_need_be(name: str) -> None:
    codec, rows = CODECS[name], some_rows(200, 64)
    errors = (round_trip(codec, rows) - rows).abs().amax(dim=1)
    bound = codec.error_bound(rows)
    if codec.is_exact:
        assert not errors.any()
        assert not bound.any()
    else:
        assert float((errors / bound).median()) > 0.5


@every_codec
@pytest.mark.parametrize("shape", [(0, 8), (3, 1), (5, 7), (2, 64)])
def test_both_ends_know_sizes_and_types(name: str, shape: tuple[int, int]) -> None:
    codec, rows = CODECS[name], some_rows(*shape)
    encoded = codec.encode(rows)
    assert encoded.shape == (shape[0], codec.columns(shape[1]))
    assert encoded.dtype is codec.dtype
    assert encoded.is_contiguous()
    assert encoded.nbytes == shape[0] * codec.num_bytes(shape[1])
    decoded = codec.decode(encoded, shape[1])
    assert decoded.dtype is torch.float32
    assert decoded.shape == rows.shape


@pytest.mark.parametrize(("name", "num_bytes"), BYTES_OF_64.items())
def test_bytes_of_a_row(name: str, num_bytes: int) -> None:
    assert CODECS[name].num_bytes(64) == num_bytes


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
    """The table in docs/guides/transport.md."""

    def arrived(number: float) -> float:
        return round_trip(CODECS[name], torch.tensor([[number, -number, 0.0]]))[0, 0].item()

    assert vanishes is None or arrived(vanishes) == 0.0
    assert arrived(smallest) > 0.0
    assert arrived(largest) < math.inf
    assert overflows is None or arrived(overflows) == math.inf


@every_codec
def test_zeros_stay_zeros(name: str) -> None:
    rows = some_rows(4, 6)
    rows[1] = 0.0
    rows[2, 3] = 0.0
    decoded = round_trip(CODECS[name], rows)
    assert not decoded[1].any()
    assert decoded[2, 3] == 0.0


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_does_not_become_so(name: str, bad: float) -> None:
    rows = some_rows(3, 6)
    rows[1, 2] = bad
    decoded = round_trip(CODECS[name], rows)
    assert not decoded[1].isfinite().all()
    assert decoded[[0, 2]].isfinite().all()


@pytest.mark.parametrize("name", [name for name in CODECS if "random" not in name])
def test_a_row_is_encoded_by_itself(name: str) -> None:
    codec, rows = CODECS[name], some_rows(6, 16)
    assert torch.equal(codec.encode(rows)[2:4], codec.encode(rows[2:4]))


@every_codec
def test_what_is_encoded_stays_as_it_is(name: str) -> None:
    rows = some_rows(6, 16)
    before = rows.clone()
    round_trip(CODECS[name], rows)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_at_random_is_right_on_average(bits: int) -> None:
    rows = some_rows(1, 32).repeat(20_000, 1)
    codec = IntegerRows(bits=bits, generator=torch.Generator().manual_seed(1))
    mean_error = (round_trip(codec, rows) - rows).mean(dim=0).abs()
    # The mean of 20,000 errors of at most a scale: six standard deviations of half a scale.
    assert bool((mean_error < 6 * 0.5 * codec.error_bound(rows)[0] / 20_000**0.5).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_what_has_travelled_travels_again_unchanged(bits: int) -> None:
    """Rows that are handed on in the same codec aren't rounded twice, up to their scale."""
    codec, rows = IntegerRows(bits=bits), some_rows(100, 24)
    once = round_trip(codec, rows)
    twice = round_trip(codec, once)
    assert bool(((twice - once).abs() <= codec.error_bound(once)[:, None]).all())
