"""The public names: a change of this list is a change of the package's promise."""

import inspect

import pytest

import torchrec_2dsp

PUBLIC_NAMES = [
    "FROM_MESH",
    "AccessStats",
    "BalancedPartitioner",
    "Calibration",
    "CalibrationError",
    "CheckpointError",
    "ConfigError",
    "CostModel",
    "DelayedMomentRowWiseAdaGrad",
    "DenseWork",
    "EmbeddingBagCollectionSharder2D",
    "EmbeddingCollectionSharder2D",
    "Enumerator2D",
    "Exchange",
    "ExchangeProposer",
    "GradientSync",
    "GroupSizeProposer",
    "HotRowProposer",
    "HotSet",
    "HotSetRefresh",
    "InputError",
    "MemoryCost",
    "Mesh2D",
    "MeshError",
    "MeshGroups",
    "ModelParallel2D",
    "MomentScaledRowWiseAdaGrad",
    "MomentScaledRowWiseAdaGradOptimizer",
    "ParameterConstraints2D",
    "ParameterSharding2D",
    "Partitioner2D",
    "PendingSave",
    "Plan2D",
    "PlanError",
    "Planner2D",
    "RankError",
    "RankLayout",
    "RowCounter",
    "RowOwners",
    "ShardingType2D",
    "Stats2D",
    "StepCost",
    "SyncError",
    "SyncReport",
    "SyncedRows",
    "TableAccess",
    "TableWork",
    "TrainPipelineRowPrefetch",
    "TrainState",
    "Transport",
    "TwoDError",
    "UnsupportedError",
    "VersionError",
    "WeightSync",
    "Workload",
    "after",
    "drop_old_checkpoints",
    "every",
    "failing_together",
    "get_default_sharders",
    "group_topology",
    "latest_checkpoint",
    "load_checkpoint",
    "never",
    "pin",
    "plan_for_rank",
    "save_checkpoint",
]


def public_members() -> list[tuple[str, object]]:
    """Methods and properties that the package's public classes define, and the names themselves."""
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
