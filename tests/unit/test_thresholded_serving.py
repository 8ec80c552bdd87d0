"""`Thresholded` is saved, loaded and exported to serve, and does there what it did in training."""

import copy
from typing import Any

import pytest
import torch

import torchrec_2dsp as tdsp
from torchrec_2dsp.dense.thresholded import ThresholdKind

every_kind = pytest.mark.parametrize("kind", ["exact", "laplace"])


def activations(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_state_has_the_running_threshold_and_nothing_else() -> None:
    module = tdsp.Thresholded(0.1, "laplace")
    module(activations(10, 6))
    assert list(module.state_dict()) == ["running_threshold"]
    restored = tdsp.Thresholded(0.1, "laplace").eval()
    restored.load_state_dict(module.state_dict())
    rows = activations(10, 6, seed=1)
    assert torch.equal(restored(rows), module.eval()(rows))
    assert list(tdsp.Thresholded(0.1).state_dict()) == []
    assert not list(module.parameters())


def exported(module: torch.nn.Module, rows: torch.Tensor, way: str) -> Any:
    if way == "script":
        return torch.jit.script(module)
    batch = torch.export.Dim("batch")
    return torch.export.export(module, (rows,), dynamic_shapes=({0: batch},)).module()


@every_kind
@pytest.mark.parametrize("density", [0.3, 1.0])
@pytest.mark.parametrize("way", ["script", "export"])
# Upstream says so of every script; it is what serving in C++ still takes.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_an_exported_module_does_the_same(way: str, kind: ThresholdKind, density: float) -> None:
    module = tdsp.Thresholded(density, kind)
    module(activations(50, 20))
    module.eval()
    serving = exported(module, activations(4, 20, seed=1), way)
    for num_samples in (1, 9):
        rows = activations(num_samples, 20, seed=2)
        assert torch.equal(serving(rows), module(rows))
    assert serving.state_dict() == module.state_dict()


@every_kind
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_script_trains_on(kind: ThresholdKind) -> None:
    module = tdsp.Thresholded(0.3, kind)
    script = torch.jit.script(copy.deepcopy(module))
    for seed in range(3):
        rows = activations(9, 20, seed=seed)
        assert torch.equal(script(rows), module(rows))
    assert script.state_dict() == module.state_dict()
