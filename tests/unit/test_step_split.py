"""A profiled step's phases, in a trace with a known split, and in random traces."""

import ast
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import torchrec_2dsp
from tests.support.traces import (
    BACKWARD,
    COMPUTING_US,
    OTHER,
    TRAINING,
    WAITING_US,
    backward_operator,
    event,
    operator,
    step_events,
)
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.run_report.steps import slowest
from torchrec_2dsp.programs.traces import (
    PAYING,
    PhaseAtMoment,
    RankSplit,
    RankTrace,
    StepPhase,
    StepTimes,
    step_mark,
)

OUTSIDE = PhaseAtMoment(StepPhase.OTHER)


def split_of(events: list[dict[str, Any]], rank: int = 0) -> RankSplit:
    return RankSplit.of_trace(rank, RankTrace.of_events(events))


@pytest.mark.parametrize("backward_thread", [TRAINING, BACKWARD])
def test_each_moment_belongs_to_the_innermost_span(backward_thread: int) -> None:
    split = split_of(step_events(backward_thread=backward_thread))
    assert (split.num_steps, split.step_us) == (1, 100)
    assert split.computing_us == COMPUTING_US
    assert split.waiting_us == WAITING_US
    assert split.all_computing_us + split.all_waiting_us == 100


def test_the_split_is_the_mean_of_steps_and_leaves_out_what_lies_between() -> None:
    events = [*step_events(7), *step_events(8, start=150, late=20)]
    events.append(operator("aten::evaluation", 105, 140))
    split = split_of(events)
    assert (split.num_steps, split.step_us) == (2, 110)
    waited_us = sum(WAITING_US.values())
    assert split.steps == {7: StepTimes(100 - waited_us, 100), 8: StepTimes(120 - waited_us, 120)}
    assert split.computing_us == COMPUTING_US | {StepPhase.NEXT_BATCH: 20}
    assert split.waiting_us == WAITING_US


def test_sleeps_of_slower_time_are_left_out_and_waits_are_shortened() -> None:
    dilation = 4.0
    slow = step_events()
    # Sleep for 60 us in a span that computes, and in one that waits.
    for at_us in (52, 41):
        for entry in slow:
            end_us = entry["ts"] + entry["dur"]
            entry["ts"] += 60 * (entry["ts"] > at_us)
            entry["dur"] = end_us + 60 * (end_us > at_us) - entry["ts"]
        slow.append(event(PAYING, at_us, at_us + 60))
    split = RankSplit.of_trace(0, RankTrace.of_events(slow, dilation))
    assert split.computing_us == COMPUTING_US
    assert split.waiting_us == {phase: us / dilation for phase, us in WAITING_US.items()}
    assert split.step_us == split.all_computing_us + split.all_waiting_us


def test_events_may_come_in_any_order() -> None:
    assert split_of(step_events()[::-1]) == split_of(step_events())


def test_threads_beside_training_and_backward_are_not_counted() -> None:
    alone = split_of(step_events())
    events = [*step_events(), event("## forward 7 ##", 0, 100, thread=OTHER)]
    events.append(operator("aten::mm", 30, 42, thread=OTHER))
    assert split_of(events) == alone


def test_moments_of_two_backward_threads_are_counted_once() -> None:
    second = 4
    events = [
        *step_events(backward_thread=BACKWARD),
        # The first thread's span counts until 78; the second's rest is 78 to 85.
        backward_operator("All2All_Pooled_ReqBackward", 65, 85, second),
    ]
    split = split_of(events)
    assert split.step_us == 100
    # From 78 to 79 nothing is under way.
    assert split.computing_us[StepPhase.DENSE_BACKWARD] == 10
    assert split.computing_us[StepPhase.ROW_GRADIENTS] == 4
    assert split.waiting_us == WAITING_US | {
        StepPhase.ROW_GRADIENTS: 5 + 6,
        StepPhase.DENSE_GRADIENTS: 5,
    }


def test_only_a_thread_that_may_wait_waits() -> None:
    """The next batch's exchanges are in flight while this batch is computed."""
    events = [*step_events(), event("gloo:all_to_all", 0, 100, thread=OTHER)]
    split = split_of(events)
    for phase in (
        StepPhase.NEXT_BATCH,
        StepPhase.LOOKUP,
        StepPhase.DENSE_FORWARD,
        StepPhase.OPTIMIZER,
        StepPhase.OTHER,
    ):
        assert split.computing_us[phase] == COMPUTING_US[phase]
        assert phase not in split.waiting_us
    # Whatever isn't an operator.
    assert split.waiting_us[StepPhase.IDS] == 9
    assert split.computing_us[StepPhase.IDS] == 1
    # The backward's operator computes.
    assert split.computing_us[StepPhase.DENSE_BACKWARD] == 10


def test_what_reaches_beyond_its_span_is_cut_off() -> None:
    events = [*step_events(), event("## wait_sparse_data_dist 8 ##", 96, 130)]
    split = split_of(events)
    assert split.computing_us[StepPhase.OPTIMIZER] == 4
    assert split.computing_us[StepPhase.IDS] == 12
    assert split.all_computing_us + split.all_waiting_us == 100


def test_a_step_without_data_is_not_a_step() -> None:
    events = [*step_events(), event(step_mark(8), 100, 103), event("## next_batch ##", 100, 102)]
    assert split_of(events) == split_of(step_events())
    with pytest.raises(ConfigError, match="rank 3 has no step with a backward"):
        split_of(events[-2:], rank=3)


@given(st.randoms(use_true_random=False), st.integers(0, 40), st.booleans())
def test_phases_always_add_up(draw: random.Random, num_spans: int, has_threads: bool) -> None:
    """Spans and collectives are placed at random, and may partly overlap."""
    names = [each["name"] for each in step_events()[1:]] + ["## capture rows ##", "c10d::x"]
    events = step_events(backward_thread=BACKWARD if has_threads else TRAINING)
    for _ in range(num_spans):
        start, length = draw.randrange(-20, 110), draw.randrange(1, 60)
        thread = draw.choice([TRAINING, BACKWARD, OTHER])
        is_operator = draw.random() < 0.5
        name = draw.choice(names)
        events.append(event(name, start, start + length, thread=thread, is_operator=is_operator))
    trace = RankTrace.of_events(events)
    try:
        split = RankSplit.of_trace(0, trace)
    except ConfigError:
        # Overlapping spans may hide the step's whole backward.
        return
    # Whole microseconds, which floats add exactly.
    assert split.all_computing_us + split.all_waiting_us == split.step_us == 100
    assert min([*split.computing_us.values(), *split.waiting_us.values()]) > 0
    in_flight = sum(end - start for start, end in trace.collectives)
    assert split.all_waiting_us <= in_flight


def test_the_slowest_rank_computes_longest() -> None:
    late = split_of(step_events(late=30), rank=1)
    # Its step is longer, because it waits.
    waiting = replace(late, rank=2, step_us=200, computing_us={StepPhase.IDS: 20})
    assert slowest([split_of(step_events()), late, waiting]) is late


def test_a_trace_is_read_as_the_profiler_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": step_events()}))
    assert RankTrace.read(path) == RankTrace.of_events(step_events())


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("## copy_batch_to_gpu 3 ##", StepPhase.NEXT_BATCH),
        ("[splits_dist]_[ebc]_[row_wise]", StepPhase.IDS),
        ("## FusedKJTListSplitsAwaitable wait() ##", StepPhase.IDS),
        ("## all2all_data:kjt lengths ##", StepPhase.IDS),
        ("## start_embedding_lookup 3 ##", StepPhase.LOOKUP),
        ("fbgemm::split_embedding_codegen_lookup_sgd_function_pt2", StepPhase.LOOKUP),
        ("## ReduceScatterBase_fwd (tensor) ##", StepPhase.ROWS),
        ("## EmbeddingBagCollectionAwaitable wait() ##", StepPhase.ROWS),
        ("All2All_Seq_Req", StepPhase.ROWS),
        ("## ReduceScatterBase_bwd (all_gather) ##", StepPhase.ROW_GRADIENTS),
        ("## AllGatherBase_bw (reduce_scatter_tensor) ##", StepPhase.ROW_GRADIENTS),
        ("## All2All_Seq_bwd_permute ##", StepPhase.ROW_GRADIENTS),
        ("torch::autograd::CppNode<SplitLookupFunction_sgd_Op>", StepPhase.TABLE_UPDATE),
        ("fbgemm::split_embedding_backward_codegen_sgd_cpu", StepPhase.TABLE_UPDATE),
        ("## dmp_collection_sync ##", StepPhase.REPLICA_SYNC),
        ("## backward ##", StepPhase.DENSE_BACKWARD),
        ("DistributedDataParallel.forward", StepPhase.DENSE_FORWARD),
        ("## zero_grad ##", StepPhase.OPTIMIZER),
        ("Optimizer.step#SGD.step", StepPhase.OPTIMIZER),
        ("aten::embedding_bag", StepPhase.OTHER),
        ("aten::_embedding_bag_forward_only", StepPhase.OTHER),
    ],
)
def test_names_of_torch_and_torchrec_have_phases(name: str, phase: StepPhase) -> None:
    assert OUTSIDE.inside(name).phase is phase


def test_rows_are_updated_by_lookups() -> None:
    update = OUTSIDE.inside("## apply rows ##")
    lookup = "fbgemm::split_embedding_codegen_lookup_sgd"
    assert update.inside(lookup, is_operator=True).phase is StepPhase.TABLE_UPDATE


@pytest.mark.parametrize(
    ("name", "may_wait"),
    [
        ("All2All_Pooled_Wait", True),
        ("All2All_Pooled_WaitBackward", True),
        ("_Pooled", False),
        ("_PooledBackward", False),
    ],
)
def test_operators_wait_only_if_they_exchange(name: str, may_wait: bool) -> None:
    backward = replace(OUTSIDE, phase=StepPhase.DENSE_BACKWARD)
    node = f"autograd::engine::evaluate_function: {name}"
    assert backward.inside(node, is_operator=True).may_wait is may_wait
    assert OUTSIDE.inside(name, is_operator=True).may_wait is may_wait


def test_collectives_that_a_backward_starts_are_of_dense_gradients() -> None:
    backward = OUTSIDE.inside("## backward 3 ##")
    sent = backward.inside("c10d::allreduce_", is_operator=True)
    assert sent == PhaseAtMoment(StepPhase.DENSE_GRADIENTS, may_wait=True)


def package_sources() -> list[tuple[Path, str]]:
    package = Path(torchrec_2dsp.__file__).parent
    rooms = (
        "_compat",
        "dense",
        "parallel",
        "replicas",
        "rows",
        "shard",
        "programs/train",
    )
    return [(path, path.read_text()) for room in rooms for path in (package / room).rglob("*.py")]


def test_each_range_that_this_package_names_has_a_phase() -> None:
    labels = {
        re.sub(r"\{.*?\}", "3", label)
        for _, source in package_sources()
        if "record_function" in source
        for label in re.findall(r'f?"(## .* ##)"', source)
    }
    assert len(labels) > 10
    nameless = [label for label in labels if OUTSIDE.inside(label).phase is StepPhase.OTHER]
    assert not nameless


def test_each_autograd_function_of_tables_has_a_phase_both_ways() -> None:
    functions = {
        node.name
        for path, source in package_sources()
        if not {"dense", "programs"} & {*path.parts}
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith("autograd.Function") for base in node.bases)
    }
    assert {"_CapturedLookup", "_Pooled"} <= functions
    for name in functions:
        forward, backward = (
            OUTSIDE.inside(each, is_operator=True).phase
            for each in (name, f"autograd::engine::evaluate_function: {name}Backward")
        )
        assert forward in (StepPhase.LOOKUP, StepPhase.ROWS), name
        assert backward in (StepPhase.TABLE_UPDATE, StepPhase.ROW_GRADIENTS), name
