"""Plausible benchmark results, made without running a benchmark."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchrec_2dsp.programs.bench.config import BenchConfig, TwoDContestant
from torchrec_2dsp.programs.bench.results import (
    BenchResult,
    BenchSetting,
    ContestantBlock,
    ContestantResult,
    MeasuredTraffic,
    Outcome,
    Phase,
    RowTravel,
)
from torchrec_2dsp.programs.config.config_file import make_config
from torchrec_2dsp.programs.link_speeds import LinkSpeeds

_NO_SPEEDS = {"all-to-all": None, "all-reduce": None}
NO_LINKS = LinkSpeeds(in_host=_NO_SPEEDS, across_hosts=_NO_SPEEDS)
"""Links that were not measured."""

CONTESTANTS: dict[str, dict[str, Any]] = {
    "stock": {"kind": "stock"},
    "stock_duplex": {"kind": "stock", "full_duplex": True},
    "exact_2d": {"kind": "two_d"},
    "floor": {"kind": "ceiling", "of": "exact_2d"},
}
STEPS_MS: dict[str, Sequence[float]] = {
    "stock": (180, 176, 190, 172, 178, 181, 175),
    "stock_duplex": (168, 161, 175, 160, 166, 170, 163),
    "exact_2d": (131, 128, 139, 126, 129, 133, 127),
    "floor": (108, 106, 112, 104, 107, 109, 105),
}
FAILED = {
    "exact_2d": (
        Outcome.CRASHED,
        'Traceback (most recent call last):\n  File "x.py", line 3\nSyncError: rows | <3> of *4*',
    ),
    "floor": (Outcome.HUNG, "a block took over 180 s"),
}
_SHARDING = {
    "stock": {"table_wise": 2, "row_wise": 1},
    "stock_duplex": {"table_wise": 3},
    "exact_2d": {"2d_table_wise": 3},
}


def bench_result(
    *,
    steps_ms: Mapping[str, Sequence[float]] = STEPS_MS,
    contestants: Mapping[str, Mapping[str, Any]] = CONTESTANTS,
    failed: Mapping[str, tuple[Outcome, str]] = {},
    overrides: Mapping[str, Any] = {},
    foreign_load: Mapping[str, Sequence[float]] = {},
    is_counted: bool = True,
    probe_ms: float = 1.5,
    **setting: Any,
) -> BenchResult:
    """Return a result whose contestants all behaved alike, with a foreign load of 0.05 cores.

    ``setting`` are fields of `BenchSetting`, and ``overrides`` other sections of the config.
    """
    tree = {
        "title": "demo",
        "data": {
            "features": [
                {"name": "user", "num_rows": 50_000, "skew": 1.05},
                {"name": "item", "num_rows": 20_000, "skew": 1.2},
                {"name": "history", "num_rows": 1_000, "min_ids": 0, "max_ids": 6},
            ]
        },
        "contestants": contestants,
        **overrides,
    }
    config = make_config(BenchConfig, tree)
    fields: dict[str, Any] = {
        "title": config.title,
        "when": "2026-03-01 12:00",
        "command": "torchrun --nproc-per-node 2 -m torchrec_2dsp bench --config demo.toml",
        "hosts": 2,
        "ranks_per_host": 2,
        "network": "1 Gbit/s",
        "machine": {"processor": "some processor", "cores": "2", "memory": "8 GB"},
        "versions": {"python": "3.11", "torch": "2.13.0"},
        "link_speeds": {"to other hosts, all-reduce": 117e6, "in a host, all-reduce": None},
        **setting,
    }
    measured = []
    for name in config.contestants:
        steps = steps_ms.get(name, ())
        loads = foreign_load.get(name, [0.05] * len(steps))
        outcome, reason = failed.get(name, (Outcome.MEASURED, ""))
        blocks = _blocks(steps, loads, is_counted, probe_ms)
        measured.append(_contestant(config, name, blocks=blocks, outcome=outcome, reason=reason))
    return BenchResult(
        setting=BenchSetting(**fields, config=config.model_dump(mode="json")),
        reference=config.reference,
        contestants=tuple(measured),
    )


PREDICTED_S = {"stock": 0.22, "stock_duplex": 0.19, "exact_2d": 0.12}


def with_predictions(result: BenchResult, *names: str) -> BenchResult:
    """Return the result with predicted steps for some contestants, or for all that train."""
    return with_figures(
        result,
        {
            name: {"predicted": {"dense_s": PREDICTED_S[name] - 0.02, "sync_s": 0.02}}
            for name in names or PREDICTED_S
        },
    )


def with_figures(result: BenchResult, figures: Mapping[str, Mapping[str, Any]]) -> BenchResult:
    """Return the result with some contestants' figures replaced, by name."""
    contestants = [
        contestant.model_copy(update=figures.get(contestant.name))
        for contestant in result.contestants
    ]
    return result.model_copy(update={"contestants": tuple(contestants)})


def _blocks(
    steps_ms: Sequence[float], loads: Sequence[float], is_counted: bool, probe_ms: float
) -> tuple[ContestantBlock, ...]:
    return tuple(
        ContestantBlock(
            round=index,
            num_steps=12,
            step_s=step_ms / 1e3,
            link_bytes=1.2e6 if is_counted else None,
            foreign_load=load,
            probe_s=probe_ms / 1e3,
        )
        for index, (step_ms, load) in enumerate(zip(steps_ms, loads, strict=True))
    )


def _contestant(config: BenchConfig, name: str, **fields: Any) -> ContestantResult:
    contestant = config.contestants[name]
    trains = contestant.kind != "ceiling"
    return ContestantResult(
        name=name,
        description=contestant.describe(),
        kind=contestant.kind,
        sharding=_SHARDING.get(name, {}),
        phases=_phases(isinstance(contestant, TwoDContestant), not trains),
        traffic=_TRAFFIC if trains else (),
        row_travel=_TRAVEL if isinstance(contestant, TwoDContestant) else None,
        peak_memory_bytes=64_000_000,
        losses=(0.69, 0.68),
        loss_gap=1.5e-7 if trains else None,
        loss_bound=1e-4 if trains else None,
        ne_gap=2.5e-5 if trains else None,
        ne_bound=1e-3 if trains else None,
        **fields,
    )


_TRAVEL = RowTravel(window_s=0.0123, waited_s=0.0045)
_TRAFFIC = (
    MeasuredTraffic(name="all_to_all_single", calls=4, sent_bytes=2.5e6),
    MeasuredTraffic(name="all_reduce", calls=1.5, sent_bytes=0.4e6),
)


def _phases(is_2d: bool, is_ceiling: bool) -> tuple[Phase, ...]:
    wait = 0.0 if is_ceiling else 1.0
    parts = [
        ("ids", 0.004 * wait, True),
        ("pooled rows", (0.012 if is_2d else 0.043) * wait, True),
        ("lookup", 0.011, False),
        ("forward", 0.024, False),
        ("dense gradients", 0.011 * wait, True),
        ("backward", 0.041, False),
        ("table update", 0.017, False),
    ]
    if is_2d:
        parts += [("sync", 0.009, True), ("sync", 0.005, False)]
    return tuple(Phase(name=name, seconds=s, waiting=waits) for name, s, waits in parts if s > 0)


def config_of(contestants: dict[str, Any], **sections: Any) -> BenchConfig:
    data = {"features": [{"name": "user", "num_rows": 100}]}
    return make_config(
        BenchConfig, {"data": data, "contestants": contestants, **sections}, source="bench"
    )
