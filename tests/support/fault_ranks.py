"""A rank in a case of `tests.support.fault_cases`, which trains until the fault."""

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.devices import device_env, join_world, on_gpus, rank_device, ranks_per_host
from tests.support.fault_cases import (
    AFTER,
    ALONE,
    DIFFERS,
    ENDS,
    EVALUATES,
    EVALUATES_EARLY,
    FAULTY_RANK,
    FAULTY_STEP,
    KILLED,
    NAN,
    NUM_STEPS,
    PROGRAMS,
    RAISES,
    READS,
    READS_EARLY,
    SKIPS,
    STOPPED,
    Case,
)
from tests.support.loops import LossModel, make_stream, shard, sharded_tables
from tests.support.models import BagModel
from tests.support.oracle import local_loss
from tests.support.parity import make_optimizer, make_sharder, shards_of
from torchrec_2dsp._compat.fbgemm import EmbOptimType

TIMEOUT_S = 30.0 if on_gpus() else 8.0
"""The timeout of all process groups; NCCL takes seconds to connect each."""


class Faults:
    """Injects the fault at its moment."""

    def __init__(self, case: Case, rank: int, folder: Path) -> None:
        self._fault = case.fault
        self.folder = folder
        self.is_faulty = rank == FAULTY_RANK
        self.step = 0

    def at(self, moment: str) -> None:
        """Inject the fault if it belongs at this moment in `step`."""
        fault = self._fault
        if not (self.is_faulty and self.step == FAULTY_STEP and moment == fault.moment):
            return
        self.note()
        if fault.kind == RAISES:
            raise ValueError(f"a fault in the {moment}")
        if fault.kind == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == STOPPED:
            os.kill(os.getpid(), signal.SIGSTOP)

    def skips(self, then: str) -> bool:
        """Tell whether the rank skips its tables' backward in `step` and then does ``then``."""
        is_now = self.is_faulty and self.step == FAULTY_STEP
        if skips := is_now and (self._fault.kind, self._fault.moment) == (SKIPS, then):
            self.note()
        return skips

    def note(self) -> None:
        """Record when the fault happens."""
        (self.folder / "fault").write_text(str(time.monotonic()))


def run_rank(case: Case, rank: int, store: dist.Store, folder: Path) -> None:
    """Train; write the outcome to the folder, and raise the error, as any program would."""
    torch.set_num_threads(1)
    # Shows where a rank hangs that should have ended.
    faulthandler.dump_traceback_later(2 * TIMEOUT_S)
    program = PROGRAMS[case.program]
    of_host = ranks_per_host(program.ranks_per_host)
    os.environ |= {"LOCAL_WORLD_SIZE": str(of_host), "LOCAL_RANK": str(rank % of_host)}
    os.environ |= device_env(rank)
    size, timeout = program.cell.mesh.world_size, timedelta(seconds=TIMEOUT_S)
    join_world(rank, store=store, rank=rank, world_size=size, timeout=timeout)

    def note_end(error: BaseException | None) -> None:
        ranks = list(error.ranks) if isinstance(error, tdsp.errors.RankError) else []
        is_ours = isinstance(error, tdsp.TwoDError)
        result = {"error": error and type(error).__name__, "text": str(error or "")}
        result |= {"ranks": ranks, "is_ours": is_ours, "ended_at": time.monotonic()}
        (folder / f"result{rank}").write_text(json.dumps(result))

    # A rank whose GPU doesn't come back is ended by its watch.
    sys.excepthook = lambda kind, error, trace: note_end(error)
    try:
        _train(case, rank, Faults(case, rank, folder))
        dist.destroy_process_group()
        note_end(None)
    except BaseException as error:
        note_end(error)
        raise


def _train(case: Case, rank: int, faults: Faults) -> None:
    program, fault = PROGRAMS[case.program], case.fault
    if faults.is_faulty and fault.kind == DIFFERS:
        faults.note()
    model, optimizer = _sharded(case, faults)
    _hook(model, optimizer, faults)
    stream = [step[rank] for step in make_stream(program.cell, NUM_STEPS)]
    if fault.kind == ENDS and faults.is_faulty:
        stream = stream[:FAULTY_STEP]
    batches = _loaded(stream, faults)
    context: Any = tdsp.failing_together(model) if fault.in_context else nullcontext()
    with context as loop:
        if loop is not None and fault.moment == "is told" and program.loop != "prefetch":
            batches = loop.batches(batches)
        if program.loop in ("plain", "accumulate"):
            _plain(case, model, optimizer, batches, faults)
        else:
            _pipelined(case, model, optimizer, batches, faults)
        if faults.is_faulty and fault.kind == ENDS:
            if fault.moment == "waits at a barrier":
                dist.barrier()
            elif fault.moment == "saves":
                _save(model, None, faults)
    if fault.moment == AFTER:
        faults.step = FAULTY_STEP
        faults.at(AFTER)
        _save(model, optimizer, faults)


def _sharded(case: Case, faults: Faults) -> tuple[Any, Any]:
    program = PROGRAMS[case.program]
    cell = program.cell
    sharder: Any = make_sharder(cell)
    if case.fault.kind == DIFFERS and faults.is_faulty:
        if case.fault.moment == "plan":
            cell = replace(cell, sharding="column_wise", exchange="pooled", owners="block")
        else:
            sharder = tdsp.EmbeddingBagCollectionSharder2D(
                EmbOptimType.EXACT_ROWWISE_ADAGRAD, fused_params={"learning_rate": 7.0}
            )
    torch.manual_seed(0)
    kind = BagModel if program.loop in ("plain", "accumulate") else LossModel
    model = shard(cell, sharder, kind(cell.spec))
    return model, make_optimizer(model)


def _hook(model: Any, optimizer: Any, faults: Faults) -> None:
    """Add hooks to the forward, backward and optimizer, so that faults can happen there."""

    def computed(module: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            faults.at("forward")
            if output.requires_grad:
                output.register_hook(lambda grad: faults.at("backward"))

    def cut_off(module: Any, inputs: Any) -> Any:
        return tuple(x.detach() for x in inputs) if faults.skips("steps") else None

    (over,) = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    over.register_forward_hook(computed)
    over.register_forward_pre_hook(cut_off)
    step = optimizer.step

    def faulty_step(*args: Any, **kwargs: Any) -> Any:
        faults.at("optimizer")
        return step(*args, **kwargs)

    optimizer.step = faulty_step


def _loaded(stream: list[KeyedJaggedTensor], faults: Faults) -> Iterator[KeyedJaggedTensor]:
    """Yield a loader's batches; a pipeline may ask for one before its step begins."""
    for number, batch in enumerate(stream, 1):
        step, faults.step = faults.step, number
        faults.at("loader")
        faults.step = step
        yield batch
    if faults.is_faulty and len(stream) == FAULTY_STEP:
        faults.note()


def _plain(case: Case, model: Any, optimizer: Any, batches: Any, faults: Faults) -> None:
    accumulates = PROGRAMS[case.program].loop == "accumulate"
    for number, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        parts = tdsp.accumulate(model, [batch] * 3) if accumulates else [batch]
        for part, given in enumerate(parts):
            # In the middle of a step with several batches.
            faults.step = number if part == 1 or not accumulates else 0
            _alone(case, model, faults, (EVALUATES, READS), given)
            if faults.skips("leaves a batch out"):
                continue
            loss = local_loss(model(given))
            faults.at("loss")
            _alone(case, model, faults, (EVALUATES_EARLY, READS_EARLY), given)
            if faults.skips("takes the next batch"):
                continue
            _spoil(case, model, faults, "weights")
            (loss * float("nan") if _spoil(case, model, faults, "loss") else loss).backward()
        faults.step = number
        faults.at("sync")
        model.sync()
        optimizer.step()
        _between(case, model, optimizer, faults)


def _alone(
    case: Case, model: Any, faults: Faults, moments: Sequence[str], batch: Any = None
) -> None:
    """Do alone what all ranks should do together, if the fault is at one of these moments."""
    is_now = faults.is_faulty and faults.step == FAULTY_STEP
    if not (is_now and case.fault.kind == ALONE and case.fault.moment in moments):
        return
    faults.note()
    if case.fault.moment in (READS, READS_EARLY):
        model.state_dict()
        return
    model.eval()
    with torch.no_grad():
        model(batch)
    model.train()


def _spoil(case: Case, model: Any, faults: Faults, where: str) -> bool:
    is_now = case.fault.kind == NAN and faults.is_faulty and faults.step == FAULTY_STEP
    if not (is_now and case.fault.moment == where):
        return False
    faults.note()
    if where == "weights":
        for table in shards_of(model):
            table.tensors["weight"].fill_(float("nan"))
    return True


def _pipelined(case: Case, model: Any, optimizer: Any, batches: Any, faults: Faults) -> None:
    is_prefetch = PROGRAMS[case.program].loop == "prefetch"
    kind = tdsp.TrainPipelineRowPrefetch if is_prefetch else TrainPipelineSparseDist
    pipeline: Any = kind(model, optimizer, rank_device())
    batches = iter(batches)
    while True:
        faults.step += 1
        _alone(case, model, faults, (READS,))
        try:
            pipeline.progress(batches)
        except StopIteration:
            break
        _between(case, model, optimizer, faults)


def _between(case: Case, model: Any, optimizer: Any, faults: Faults) -> None:
    """Save or refresh after the faulty step, if the fault happens there."""
    if faults.step != FAULTY_STEP:
        return
    if case.fault.moment == "save":
        _save(model, optimizer, faults)
    if case.fault.moment == "refresh":
        for part in sharded_tables(model) if faults.is_faulty else ():
            part.hot_sets.check = lambda sets: faults.at("refresh")  # type: ignore[method-assign]
        model.refresh_hot_sets({"t0": (2, 3, 4)})


def _save(model: Any, optimizer: Any, faults: Faults) -> None:
    write = dcp.FileSystemWriter.write_data

    def faulty_write(*args: Any, **kwargs: Any) -> Any:
        faults.at("save")
        return write(*args, **kwargs)

    dcp.FileSystemWriter.write_data = faulty_write  # type: ignore[method-assign]
    tdsp.save_checkpoint(faults.folder / "checkpoint", model, optimizer)
