"""Requests that a served file refuses by name, as TorchScript raises it."""

import pytest
import torch

from torchrec_2dsp.programs.export.served import RequestCheck, ServedFeature

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
FEATURES = [
    ServedFeature(name=name, table="t", num_rows=rows, dim=4) for name, rows in (("a", 9), ("b", 5))
]
DENSE = torch.zeros(2, 3)
VALUES = torch.tensor([1, 8, 2, 4])
LENGTHS = torch.tensor([1, 1, 0, 2])


@pytest.fixture(scope="module")
def check() -> torch.jit.ScriptModule:
    return torch.jit.script(RequestCheck(FEATURES, 3))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_request_passes(check: torch.jit.ScriptModule, dtype: torch.dtype) -> None:
    check(DENSE, VALUES.to(dtype), LENGTHS.to(dtype))


@pytest.mark.parametrize(
    ("request_tensors", "message"),
    [
        ((DENSE.double(), VALUES, LENGTHS), "dense isn't float32"),
        ((torch.tensor(1.0), VALUES, LENGTHS), r"dense has the shape \[\]"),
        ((torch.zeros(2, 4), VALUES, LENGTHS), "and 3 numbers in each row"),
        ((DENSE, VALUES.float(), LENGTHS), "values isn't int64 or int32"),
        ((DENSE, VALUES.bool(), LENGTHS), "values isn't int64 or int32"),
        (
            (DENSE, VALUES.view(2, 2), LENGTHS),
            r"values has the shape \[2, 2\]; give all ids in one row",
        ),
        ((DENSE, VALUES, LENGTHS.float()), "lengths isn't int64 or int32"),
        ((DENSE, VALUES, LENGTHS.view(2, 2)), r"lengths has the shape \[2, 2\]; give 4 numbers"),
        ((DENSE, VALUES, torch.tensor([1, 1, 0, 3])), "lengths add up to 5"),
        ((DENSE, torch.tensor([1, 9, 2, 4]), LENGTHS), "an id is negative, or its feature has"),
    ],
)
def test_a_tensor_of_another_type_or_shape_is_named(
    check: torch.jit.ScriptModule, request_tensors: Tensors, message: str
) -> None:
    with pytest.raises(Exception, match=message) as refusal:
        check(*request_tensors)
    assert "ValueError" in str(refusal.value) or isinstance(refusal.value, ValueError)
