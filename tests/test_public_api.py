"""The public names: changing this list changes the package's API."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import torchrec_2dsp

PUBLIC_NAMES = [
    "AccessStats",
    "BalancedPartitioner",
    "Calibration",
    "DelayedDense",
    "DiLoCo",
    "EmbeddingBagCollectionSharder2D",
    "EmbeddingCollectionSharder2D",
    "Exchange",
    "ExchangeProposer",
    "FeatureProcessedEmbeddingBagCollectionSharder2D",
    "FullyShardedDense",
    "GradientSync",
    "GroupSizeProposer",
    "HotRowProposer",
    "HotSet",
    "HookedDataParallel",
    "HotSetRefresh",
    "LayerStack",
    "LocalDense",
    "ManagedCollisionEmbeddingBagCollectionSharder2D",
    "ManagedCollisionEmbeddingCollectionSharder2D",
    "MeasuredCuts",
    "Mesh2D",
    "ModelParallel2D",
    "MomentScaledRowWiseAdaGrad",
    "ParameterConstraints2D",
    "ParameterSharding2D",
    "Pipeline",
    "PipelinedDense",
    "Plan2D",
    "Planner2D",
    "RankLayout",
    "RowCounter",
    "RowOwners",
    "RowStorage",
    "SyncReport",
    "SyncedRows",
    "TensorParallelDense",
    "Thresholded",
    "ThresholdedDataParallel",
    "TrainPipelineRowPrefetch",
    "TrainState",
    "Transport",
    "TwoDError",
    "WeightSync",
    "accumulate",
    "after",
    "drop_old_checkpoints",
    "every",
    "failing_together",
    "get_default_sharders",
    "latest_checkpoint",
    "leave_whole",
    "load_checkpoint",
    "never",
    "parallelize",
    "sampled_constraints",
    "pin",
    "release_groups",
    "save_checkpoint",
]


def public_members() -> list[tuple[str, object]]:
    """Return the package's public names, and its public classes' methods and properties."""
    members: list[tuple[str, object]] = []
    for name in torchrec_2dsp.__all__:
        value = getattr(torchrec_2dsp, name)
        members.append((name, value))
        if not inspect.isclass(value):
            continue
        for member_name, member in vars(value).items():
            function = getattr(member, "__func__", member)
            is_api = inspect.isfunction(function) or isinstance(function, property)
            if is_api and not member_name.startswith("_"):
                members.append((f"{name}.{member_name}", function))
    return members


def test_the_public_names_are_these() -> None:
    assert sorted(torchrec_2dsp.__all__) == sorted(PUBLIC_NAMES)


def test_type_checkers_see_the_names_that_are_loaded_when_used() -> None:
    tree = ast.parse(Path(torchrec_2dsp.__file__).read_text())
    seen = {
        alias.asname: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == torchrec_2dsp._MODULE_OF


def modules_after(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after ``code``."""
    ending = "; import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code + ending], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import torchrec_2dsp as tdsp; tdsp.Mesh2D(2, 4), tdsp.errors.PlanError", "torch"),
        ("import torchrec_2dsp.programs.cli.app", "torch"),
        ("import torchrec_2dsp as tdsp; tdsp.GradientSync(), tdsp.HotSet", "torchrec"),
        ("import torchrec_2dsp.parallel.planning", "scipy"),
    ],
)
def test_names_load_only_what_they_need(code: str, absent: str) -> None:
    loaded = modules_after(code)
    assert "torchrec_2dsp" in loaded
    assert absent not in loaded


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'torchrec_2dsp' has no attribute 'Mesh3D'"):
        _ = torchrec_2dsp.Mesh3D  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", torchrec_2dsp.__all__)
def test_a_public_name_is_our_own(name: str) -> None:
    value = getattr(torchrec_2dsp, name)
    assert value.__module__.startswith(f"{torchrec_2dsp.__name__}.")
    assert getattr(value, "__name__", name) == name


@pytest.mark.parametrize(
    "member", [member for _, member in public_members()], ids=[name for name, _ in public_members()]
)
def test_a_public_name_is_documented(member: object) -> None:
    text = (member.__doc__ or "").strip()
    assert text, "write a docstring"
    # A dataclass without a docstring gets its signature as one.
    assert not text.startswith(f"{getattr(member, '__name__', '')}("), "write a docstring"
