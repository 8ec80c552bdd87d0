"""The queue's jobs, in the order in which they run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ALL_LANES = 99


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command whose exit code says whether it passed."""

    name: str
    arguments: Sequence[str]
    """The arguments of Python."""
    budget_s: float
    in_small: Sequence[str] = field(default=())
    """Other arguments where there is no GPU."""
    lanes: int = 1
    """The lanes that it needs for itself: all, if it measures."""
    shares_gpu: bool = True
    """True if its ranks compute at once, under an MPS server, rather than in turns."""


FAULTS = {
    "2x2 exact": (
        ("raises in the loader", "raises in the forward", "raises in the loss"),
        ("raises in the backward", "raises in the optimizer", "NaN in the loss"),
        ("out of batches, then ends", "out of batches, then saves", "out of batches, then is told"),
        ("another plan", "another learning rate"),
        ("kill -9 in the loader", "kill -9 in the forward", "kill -9 in the backward"),
        ("kill -9 in the optimizer", "SIGSTOP in the loader", "SIGSTOP in the forward"),
        ("SIGSTOP in the backward",),
    ),
    "1x4 prefetch": (
        ("raises in the forward", "out of batches, then is told"),
        ("kill -9 in the forward", "kill -9 in the backward", "kill -9 in the save"),
        ("SIGSTOP in the forward",),
    ),
    "1x4 pipeline": (
        ("raises in the loader", "raises in the backward"),
        ("kill -9 in the forward",),
    ),
    "2x2 delayed": (("raises in the backward",), ("kill -9 in the sync", "kill -9 in the refresh")),
}
"""Thirty faults of `tests.support.fault_cases`, by program; each tuple is a job."""

SHARDINGS = ("table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise")
SHARDINGS += ("grid_shard", "data_parallel")
PARITY = ("planned_parity", "batch_form", "weight_sync", "optimizer", "row_prefetch")
PARITY += ("model_parallel2d", "variable_batch_sizes", "data_parallel")
PARITY += ("host_memory", "one_group", "accumulate", "loops", "parallelize", "rounding", "bad_ids")
RESUMES = ("checkpoint", "train_state", "thresholded_data_parallel", "delayed_dense", "local_dense")

NUM_CASES, CASES_OF_JOB = 500, 25


def _tests(name: str, *arguments: str, budget_s: float = 300) -> Job:
    command = ("-m", "pytest", "-p", "tests.gpu.recorder", "-q", "--timeout", "280", *arguments)
    return Job(
        name=name,
        arguments=command,
        budget_s=budget_s,
        in_small=(*command, "--slow-slice", "0/205"),
    )


def _faults() -> Iterator[Job]:
    for program, groups in FAULTS.items():
        for number, faults in enumerate(groups, 1):
            cases = [f"--case={program}: {fault}" for fault in faults]
            keeps_ranks = not any(fault.startswith(("kill", "SIGSTOP")) for fault in faults)
            logs = f"build/gpu/results/faults/{program}, {number}"
            command = ("-m", "tests.support.faults", "--logs", logs)
            yield Job(
                name=f"faults of {program}, {number}: {'; '.join(faults)}",
                arguments=(*command, *cases),
                budget_s=240,
                in_small=(*command, *cases[:1]),
                shares_gpu=keeps_ranks,  # Killing a rank also kills its MPS server's other ranks.
            )


def _parity() -> Iterator[Job]:
    file = "tests/dist/test_parity.py"
    yield _tests("parity, bags of each type", file, "-k", "test_bags_equal")
    others = "not all_cells and not eight_ranks and not test_bags_equal"
    yield _tests("parity, one test of each kind", file, "-k", others)
    for sharding in SHARDINGS:
        yield _tests(
            f"parity, all cells of {sharding} bags",
            f"{file}::test_bags_in_all_cells",
            "-k",
            f"[{sharding}-",
        )
    yield _tests("parity, eight ranks", file, "-k", "eight_ranks")
    file = "tests/dist/test_exchanges.py"
    yield _tests("parity, exchanges and the unsharded model", file, "-k", "unsharded_model")
    yield _tests("parity, exchanges", file, "-k", "not unsharded_model")
    yield _tests("parity, pinned cases", "tests/fuzz/test_pinned.py", budget_s=600)
    for name in PARITY:
        yield _tests(f"parity, {name.replace('_', ' ')}", f"tests/dist/test_{name}.py")


def _random_cases() -> Iterator[Job]:
    command = ("-m", "tests.fuzz", "--jobs", "1")
    once = (*command, "--seed", "840", "--cases", "1")
    yield Job(name="random case 840", arguments=once, budget_s=100)
    for first in range(0, NUM_CASES, CASES_OF_JOB):
        drawn = (*command, "--seed", f"{10_000 + first}", "--cases")
        yield Job(
            name=f"random cases {first + 1} to {first + CASES_OF_JOB}",
            arguments=(*drawn, str(CASES_OF_JOB)),
            budget_s=200,
            in_small=(*drawn, "1"),
        )


def _resumes(title: str, names: Sequence[str], marked: str, **budget: float) -> Iterator[Job]:
    for name in names:
        file = f"tests/dist/test_{name}.py"
        yield _tests(f"resumes, {title}{name.replace('_', ' ')}", file, "-m", marked, **budget)


def _speed() -> Iterator[Job]:
    small = ("--tables", "3", "--rows", "1000", "--dim", "32", "--samples", "64", "--repeat", "3")
    for dtype in ("fp32", "fp16"):
        for num_ids in (1, 20):
            command = ("-m", "tests.gpu.speed", "--dtype", dtype, "--ids", str(num_ids))
            samples = "65536" if num_ids == 1 else "8192"
            yield Job(
                name=f"speed of parts, {dtype}, {num_ids} ids",
                arguments=(*command, "--samples", samples),
                budget_s=90,
                in_small=(*command, *small),
                lanes=ALL_LANES,
                shares_gpu=False,
            )


def _steps() -> Iterator[Job]:
    small = ("--tables", "2", "--rows", "1000", "--dim", "16", "--samples", "32")
    for num_ranks, word in ((1, "one rank"), (2, "two ranks")):
        command = ("-m", "tests.gpu.launch", "--ranks", str(num_ranks), "-m", "tests.gpu.steps")
        yield Job(
            name=f"steps of {word}",
            arguments=command,
            budget_s=150,
            in_small=(*command, *small, "--only", "row_wise"),
            lanes=ALL_LANES,
        )


CONTESTANTS = {
    "ratios": "planner_fp16 table_wise_int8 rows rows_prefetch rows_int4_duplex rows_hot"
    " exact_in_host",
    "ratios of chosen plans": "table_wise_int8 parallelized parallelized_any",
}
"""Contestants in ``bench_criteo`` that run beside TorchRec's planner on NCCL, by job."""


def _ratios() -> Iterator[Job]:
    command = ("-m", "tests.gpu.launch", "-m", "torchrec_2dsp", "bench", "--config")
    brief = ("--set", "schedule.rounds=5", "--set", "schedule.block_s=0.7")
    for name, contestants in CONTESTANTS.items():
        only = [part for contestant in contestants.split() for part in ("--only", contestant)]
        yield Job(
            name=f"{name}, NCCL over sockets",
            arguments=(*command, "bench_criteo", "--set", "schedule.device=cuda", *brief, *only),
            budget_s=300,
            in_small=(*command, "bench", *brief, "--only", "exact"),
            lanes=ALL_LANES,
        )


JOBS: tuple[Job, ...] = (
    *_faults(),
    _tests("kernels, Triton's", "tests/unit/test_gpu_kernels.py"),
    *_parity(),
    *_random_cases(),
    *_resumes("", RESUMES, "not slow"),
    *_speed(),
    *_steps(),
    *_ratios(),
    *_resumes("every way of ", RESUMES[:2], "slow", budget_s=600),
)
"""All jobs: faults, kernels, parity, random cases, resumes, speed, steps, ratios, slow resumes."""
