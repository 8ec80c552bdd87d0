"""A handwritten trace of profiled steps, with known phases."""

from typing import Any

from torchrec_2dsp.programs.traces import StepPhase, step_mark

TRAINING, BACKWARD, OTHER = 1, 2, 3
"""The threads: one that trains, one that runs the backward on GPUs, and any other."""


def event(
    name: str, start: float, end: float, *, thread: int = TRAINING, is_operator: bool = False
) -> dict[str, Any]:
    """Return an event in Chrome's trace format, from ``start`` to ``end`` in microseconds."""
    return {
        "ph": "X",
        "cat": "cpu_op" if is_operator else "user_annotation",
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": start,
        "dur": end - start,
    }


def operator(name: str, start: float, end: float, *, thread: int = TRAINING) -> dict[str, Any]:
    return event(name, start, end, thread=thread, is_operator=True)


def backward_operator(name: str, start: float, end: float, thread: int) -> dict[str, Any]:
    return operator(f"autograd::engine::evaluate_function: {name}", start, end, thread=thread)


def step_events(
    step: int = 7, start: float = 0.0, *, backward_thread: int = TRAINING, late: float = 0.0
) -> list[dict[str, Any]]:
    """Return a step's events: 100 us, plus ``late`` us to get its next batch.

    Exchanges are under way at 28 to 42, 70 to 75 and 79 to 90 us, counted without ``late``.
    """
    zero, start = start, start + late
    spans = [
        event(step_mark(step), zero - start, 100),
        event("## next_batch ##", zero - start, 10),
        # In flight, but a rank that takes a batch doesn't wait for it.
        event("## start_sparse_data_dist 8 ##", 10, 20),
        operator("aten::cat", 11, 12),
        event("## forward 7 ##", 20, 60),
        event("[lookup]_[model.ebc]_[row_wise]", 20, 30),
        operator("fbgemm::split_embedding_codegen_forward_cpu", 22, 29),
        event("[output_dist_wait]_[model.ebc]_[row_wise]", 30, 45),
        event("## PooledEmbeddingsAwaitable wait() ##", 31, 44),
        operator("aten::copy_", 40, 41),
        operator("aten::addmm", 50, 55),
        event("## backward 7 ##", 60, 90),
        backward_operator("AddmmBackward0", 60, 70, backward_thread),
        backward_operator("All2All_Pooled_ReqBackward", 70, 78, backward_thread),
        event("## optimizer 7 ##", 90, 98),
        event("## replica sync ##", 92, 94),
        event("gloo:all_to_all", 28, 42, thread=OTHER),
        event("gloo:send", 70, 74),
        event("gloo:recv", 71, 75),
        event("gloo:all_reduce", 79, 90, thread=OTHER),
    ]
    return [{**span, "ts": start + span["ts"]} for span in spans]


COMPUTING_US = {
    StepPhase.NEXT_BATCH: 10,
    StepPhase.IDS: 10,
    StepPhase.LOOKUP: 10,
    StepPhase.ROWS: 4,  # in 30 to 45, an operator for 1 us and the time after the exchange
    StepPhase.DENSE_FORWARD: 15,
    StepPhase.DENSE_BACKWARD: 11,  # until 70, and from 78 to 79
    StepPhase.ROW_GRADIENTS: 3,
    StepPhase.REPLICA_SYNC: 2,
    StepPhase.OPTIMIZER: 6,
    StepPhase.OTHER: 2,
}
"""A rank's computing time in each phase of `step_events`."""
WAITING_US = {StepPhase.ROWS: 11, StepPhase.ROW_GRADIENTS: 5, StepPhase.DENSE_GRADIENTS: 11}
"""Its waiting time."""
