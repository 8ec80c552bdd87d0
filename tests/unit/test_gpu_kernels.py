"""Triton kernels against the rules and codecs that they replace, on a GPU or interpreted."""

import logging
from typing import Any

import pytest
import torch

from tests.support.devices import on_gpus, rank_device
from tests.support.tbe import ADAGRAD, ROW_WISE, SGD, Case, make_tbe, tensors_of
from torchrec_2dsp._compat import triton as triton_adapter
from torchrec_2dsp._compat.fbgemm import (
    ComputeDevice,
    EmbeddingLocation,
    EmbOptimType,
    OptimizerStep,
    SparseType,
    Tbe,
    tbe_shape,
)
from torchrec_2dsp._compat.triton import runs_triton
from torchrec_2dsp.codecs import rows as row_codecs
from torchrec_2dsp.codecs.rows import IntegerRows
from torchrec_2dsp.rows import gpu_kernels, update
from torchrec_2dsp.rows.gradients import BlockGradients, RowGradients, blocks_of, repeated
from torchrec_2dsp.rows.update import (
    RULES,
    DirectUpdater,
    OnePassUpdater,
    RowUpdater,
    Updater,
    quickest_updater,
)

ROUNDING = {SparseType.FP32: 1e-6, SparseType.FP16: 1e-3}
"""Squares are added in another order, and a GPU fuses products and sums; then fp16 may tip over."""
TABLES = {
    "one": ((300, 128),),
    "adjacent": ((11, 8), (70, 8), (3, 8)),
    "in several runs": ((11, 8), (7, 12), (130, 8), (2, 4), (9, 8), (40, 12)),
    "no power of two": ((50, 100),),
    "wide": ((20, 600),),
    "narrow": ((900, 4),),
}


def drawn_gradients(tbe: Tbe, key_dtype: torch.dtype) -> RowGradients:
    """Draw a gradient for about half the rows, including each table's first and last."""
    gradients = []
    for block in blocks_of(tbe_shape(tbe)):
        ends = {0, block.num_rows - 1, *block.bases, *(base - 1 for base in block.bases[1:])}
        keys = torch.cat([torch.randperm(block.num_rows)[::2], torch.tensor([*ends])]).unique()
        grads = torch.randn(keys.numel(), block.dim)
        gradients.append(BlockGradients(keys.to(key_dtype), grads))
    return RowGradients(tuple(gradients), OptimizerStep(0.1, 1))


def on_device(gradients: RowGradients, device: torch.device) -> RowGradients:
    blocks = [BlockGradients(of.keys.to(device), of.grads.to(device)) for of in gradients.blocks]
    return RowGradients(tuple(blocks), gradients.step)


@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROW_WISE])
@pytest.mark.parametrize("tables", TABLES)
def test_rows_are_updated_as_by_the_rule(
    tables: str, optimizer: EmbOptimType, precision: SparseType
) -> None:
    shapes = TABLES[tables]
    case = Case(shapes, tuple(range(len(shapes))), optimizer=optimizer, precision=precision)
    device = rank_device()
    expected, actual = make_tbe(case), make_tbe(case, device)
    updaters: list[Updater] = [DirectUpdater(expected, RULES[optimizer]), OnePassUpdater(actual)]
    kernels = [expected, actual]
    if on_gpus():
        kernels.append(make_tbe(case, device))
        updaters.append(RowUpdater(kernels[-1]))
    before = tensors_of(expected)
    for key_dtype in (torch.int64, torch.int32):
        gradients = drawn_gradients(expected, key_dtype)
        for kernel, updater in zip(kernels, updaters, strict=True):
            updater.apply(on_device(gradients, torch.device(kernel.current_device)))
    for start, *ends in zip(before, *map(tensors_of, kernels), strict=True):
        assert not torch.equal(ends[0], start)
        for end in ends[1:]:
            rounding = ROUNDING[precision]
            torch.testing.assert_close(end.cpu(), ends[0], rtol=rounding, atol=rounding)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROW_WISE])
def test_nothing_else_is_written(optimizer: EmbOptimType) -> None:
    case = Case(((40, 12), (7, 8), (30, 12)), (0, 1, 2), optimizer=optimizer)
    tbe = make_tbe(case, rank_device())
    updater, before = OnePassUpdater(tbe), tensors_of(tbe)
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, 12)
    keys = torch.tensor([3, 39, 69])
    blocks = BlockGradients(keys, torch.ones(3, 12)), BlockGradients(nothing[0], torch.empty(0, 8))
    step = OptimizerStep(0.1, 1)
    empty = RowGradients((BlockGradients(*nothing), blocks[1]), step)
    updater.apply(on_device(empty, rank_device()))
    assert all(map(torch.equal, tensors_of(tbe), before))
    updater.apply(on_device(RowGradients(blocks, step), rank_device()))
    num_states = 0 if optimizer is SGD else 1
    changed = {
        (number // (1 + num_states), row)
        for number, (end, start) in enumerate(zip(tensors_of(tbe), before, strict=True))
        for row in (end != start).view(len(end), -1).any(dim=1).nonzero().view(-1).tolist()
    }
    assert changed == {(0, 3), (0, 39), (2, 29)}


def test_rows_beyond_two_billion_numbers() -> None:
    dim, num_rows = 128, 2**24 + 5
    # Memory that nobody writes to takes no place.
    weights = torch.empty((num_rows, dim), dtype=torch.float16, device=rank_device())
    moments = torch.empty(num_rows, device=rank_device())
    keys = torch.tensor([1, num_rows - 1], dtype=torch.int32, device=rank_device())
    weights[keys.long()], moments[keys.long()] = 1.0, 0.0
    rows = gpu_kernels.rows_in_memory([0], [(weights, moments)])
    gpu_kernels.update_rows(
        rows, keys, torch.full((2, dim), 0.5).to(weights.device), lr=0.5, eps=0.5
    )
    assert moments[keys.long()].tolist() == [0.25, 0.25]
    assert weights[keys.long()].unique().tolist() == [0.75]


@pytest.mark.parametrize("counts", [[2, 0, 1], [0, 0, 3, 0], [0], []])
def test_values_are_repeated_as_by_torch(counts: list[int]) -> None:
    values, times = torch.arange(len(counts)) + 7, torch.tensor(counts, dtype=torch.int64)
    actual = repeated(values.to(rank_device()), times.to(rank_device()), sum(counts))
    assert torch.equal(actual.cpu(), values.repeat_interleave(times))
    # A GPU takes another way than the CPU.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cpu", False)
        assert torch.equal(repeated(values, times, sum(counts)), values.repeat_interleave(times))


def test_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if not on_gpus():
        monkeypatch.setattr(update, "runs_triton", lambda device: True)
    device = rank_device() if on_gpus() else torch.device("meta")

    def is_used(optimizer: EmbOptimType, **options: Any) -> bool:
        precision = options.pop("precision", SparseType.FP32)
        case = Case(((10, 8),), (0,), optimizer=optimizer, precision=precision)
        return isinstance(quickest_updater(make_tbe(case, device, **options)), OnePassUpdater)

    assert all(is_used(optimizer) for optimizer in (SGD, ADAGRAD, ROW_WISE))
    assert is_used(ROW_WISE, precision=SparseType.FP16)
    others: list[tuple[EmbOptimType, dict[str, Any]]] = [
        (EmbOptimType.ADAM, {}),
        (EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD, {}),
        (ROW_WISE, {"weight_decay": 0.1}),
        (ROW_WISE, {"max_norm": 1.0}),
        (ROW_WISE, {"precision": SparseType.FP16, "stochastic_rounding": True}),
    ]
    assert not any(is_used(optimizer, **options) for optimizer, options in others)
    in_host = Tbe(
        [(10, 8, EmbeddingLocation.MANAGED, ComputeDevice.CUDA)], optimizer=SGD, device=device
    )
    assert isinstance(quickest_updater(in_host), RowUpdater)
    monkeypatch.setattr(update, "runs_triton", lambda device: False)
    assert not is_used(ROW_WISE)
    assert isinstance(quickest_updater(make_tbe(Case())), DirectUpdater)


def test_it_says_where_triton_does_not_run(caplog: pytest.LogCaptureFixture) -> None:
    assert not runs_triton(torch.device("cpu"))
    runs_triton.cache_clear()
    with caplog.at_level(logging.WARNING, triton_adapter.__name__):
        assert runs_triton(torch.device("cuda")) == torch.cuda.is_available()
    warnings = [record for record in caplog.records if "Triton doesn't run" in record.message]
    assert len(warnings) == (not torch.cuda.is_available())


INVALID = "ignore:invalid value encountered:RuntimeWarning"
"""The interpreter is numpy, which warns of a product of infinity and 0."""


def drawn_rows(dim: int) -> torch.Tensor:
    """Draw rows of all magnitudes, with zeros, ties between integers, and non-finite numbers."""
    rows = torch.randn(95, dim) * 10.0 ** torch.linspace(-45, 38, 95)[:, None]
    rows[0], rows[1] = 0.0, -0.0
    rows[2:50:2] = torch.randint(-255, 256, (24, dim)) / 2
    rows[2:50:2, 0] = 127.0
    rows[60, 0], rows[61, -1], rows[62, 0] = float("nan"), float("inf"), -float("inf")
    return rows


@pytest.mark.filterwarnings(INVALID)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dim", [1, 2, 3, 4, 12, 33, 100, 128, 600])
def test_integers_are_those_of_torch(dim: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, all_rows = IntegerRows(bits), drawn_rows(dim)
    for rows in (all_rows, all_rows[7:9], all_rows.repeat(1, 2)[:, dim // 2 : dim // 2 + dim]):
        expected = codec.encode(rows)
        decoded = codec.decode(expected, dim)
        with monkeypatch.context() as patch:
            patch.setattr(row_codecs, "_runs_kernel", lambda rows, dim: True)
            own = codec.encode(rows.to(rank_device())).cpu()
            own_decoded = codec.decode(expected.to(rank_device()), dim).cpu()
        is_number = ~rows.isnan().any(dim=1)
        assert torch.equal(own[is_number], expected[is_number])
        assert torch.equal(own[:, :-2], expected[:, :-2])
        assert codec.decode(own[~is_number], dim).isnan().all()
        assert own.shape == expected.shape
        torch.testing.assert_close(own_decoded, decoded, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", [8, 4])
def test_scales_are_rounded_to_even(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bits_of_one = torch.tensor(1.0).view(torch.int32)
    rows = (bits_of_one + torch.arange(2**18, dtype=torch.int32)).view(torch.float32)[:, None]
    codec = IntegerRows(bits)
    scales = (rows * codec._unit).view(torch.int32) & 0x1FFFF
    assert {0x08000, 0x18000} <= {*scales.unique().tolist()}
    rows = rows[((scales & 0xFFFF) - 0x8000).abs() < 100].view(-1, 1)
    expected = codec.encode(rows)
    monkeypatch.setattr(row_codecs, "_runs_kernel", lambda rows, dim: True)
    assert torch.equal(codec.encode(rows.to(rank_device())).cpu(), expected)


def test_a_gpu_encodes_by_these_kernels() -> None:
    rows = torch.randn(9, 8)
    assert row_codecs._runs_kernel(rows.to(rank_device()), 8) == on_gpus()
    if on_gpus():
        device = rank_device()
        assert not row_codecs._runs_kernel(rows[:0].to(device), 8)
        assert not row_codecs._runs_kernel(rows.to(device), 10_000)
        nans = torch.full((2, 8), float("nan"), device=device)
        for codec in (IntegerRows(8), IntegerRows(4)):
            own = codec.encode(nans)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(row_codecs, "_runs_kernel", lambda rows, dim: False)
                assert torch.equal(codec.encode(nans), own)
