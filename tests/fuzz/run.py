"""Run a case on one rank, and record the rank's results."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrec.distributed.train_pipeline import EvalPipelineSparseDist, TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer

import torchrec_2dsp as tdsp
from tests.fuzz.actions import Action, actions_of, batches_of
from tests.fuzz.batches import local_batch
from tests.fuzz.build import (
    NotedLocalDense,
    gathered,
    halve_learning_rates,
    make_dense,
    make_optimizer,
    make_parallel,
    named_dense,
    whole,
)
from tests.fuzz.case import Case
from tests.fuzz.model import Batch, to_batch
from tests.fuzz.search import chosen_case
from tests.fuzz.seen import Piece, Seen, StateSeen
from tests.fuzz.state import LR
from tests.support.devices import copied, rank_device
from tests.support.parity import local_shards, shards_of
from torchrec_2dsp.dense.gradient_sums import GradientReport
from torchrec_2dsp.shard.parted import sharded_tables


class SentWatch:
    """Records dense gradients applied and sent, where ranks choose what they send."""

    def __init__(self, case: Case, wrapper: Any, parallel: Any) -> None:
        self._case, self._wrapper, self._parallel = case, wrapper, parallel
        self._is_on = case.dense.leaves_out
        self._applied: torch.Tensor | None = None
        self._before = GradientReport()

    def before_step(self) -> None:
        """Copy the gradients that the optimizer is about to use."""
        if not (self._is_on and self._case.dense.kind == "thresholded"):
            return
        params = named_dense(self._case, self._parallel).values()
        # A shortcut that no rank used has no gradient.
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
        self._applied = torch.cat([whole(grad) for grad in grads])

    def after_step(self, index: int, seen: Seen) -> None:
        """Record the gradients that a training step applied, and its report on traffic."""
        if not self._is_on:
            return
        if isinstance(self._wrapper, NotedLocalDense):
            met, self._wrapper.met = self._wrapper.met, None
            self._applied = None if met is None else copied(met)
        if self._applied is not None:
            seen.applied[index] = self._applied
        seen.sent[index] = self._wrapper.total - self._before
        self._before = self._wrapper.total

    def read(self, index: int, seen: Seen) -> None:
        """Record residuals that weren't sent yet, unless ranks have diverged."""
        if not self._is_on:
            return
        try:
            residuals = self._wrapper.state_dict()["residuals"]
        except tdsp.errors.SyncError:
            return
        params = named_dense(self._case, self._parallel).items()
        parts = [
            residuals.get(name, param.new_zeros(param.numel())).flatten() for name, param in params
        ]
        left_out = copied(torch.cat(parts))
        seen.left_out[index] = left_out / self._case.world_size


_PIPELINES = {
    "sparse_dist": TrainPipelineSparseDist,
    "row_prefetch": tdsp.TrainPipelineRowPrefetch,
}


def run_case(rank: int, world_size: int, case: Case, folder: Path) -> Seen:
    """Train a case on this rank; all ranks share a folder for checkpoints."""
    assert world_size == case.world_size
    return _Run(rank, case, folder).run()


class _Run:
    def __init__(self, rank: int, case: Case, folder: Path) -> None:
        self._rank, self._case, self._folder = rank, case, folder
        self._dense: Any = make_dense(case.dense)
        self._parallel: Any = make_parallel(case, self._dense)
        self._seen = Seen()
        if case.search is not None:
            self._case = case = self._seen.chosen = chosen_case(case, self._parallel.plan)
            if rank == 0:
                print(self._parallel.explain())
        self._watch = SentWatch(case, self._dense, self._parallel)
        self._optimizer = make_optimizer(case, self._parallel, self._dense, self._watch.before_step)
        self._saved: Path | None = None
        self._num_refreshes = 0
        self._frozen, self._lr = case.unfreezable, LR
        self._actions = actions_of(case)
        self._pipeline: Any = None
        if case.loop != "plain":
            if case.search is not None:
                self._pipeline = self._parallel.pipeline(self._optimizer)
            else:
                kind = _PIPELINES[case.loop]
                self._pipeline = kind(self._parallel, self._optimizer, rank_device())
            self._stream = iter(
                [self._batch(action) for action in self._actions if action.in_stream]
            )

    def run(self) -> Seen:
        for index, action in enumerate(self._actions):
            self._do(index, action)
        if isinstance(self._parallel, tdsp.ModelParallel2D):
            self._seen.num_synced_rows = self._parallel.sync_total.num_rows
        return self._seen

    def _do(self, index: int, action: Action) -> None:
        simple: dict[str, Callable[[], object]] = {
            "load_state_dict": self._load_own_state,
            "sync_now": self._sync_now,
            "refresh_hot": self._refresh_hot,
            "save": lambda: self._save(index),
            "save_load": lambda: (self._save(index), self._load()),
            "load": self._load,
            "lr": self._halve_learning_rates,
            "unfreeze": lambda: self._unfreeze(1),
            "unfreeze_all": lambda: self._unfreeze(None),
            "flush": self._flush,
        }
        if action.kind in simple:
            simple[action.kind]()
        elif action.kind in ("state_dict", "fused_state", "final"):
            self._seen.states[index] = self._read(action.kind)
            self._watch.read(index, self._seen)
        elif action.kind == "refuse":
            self._seen.refusals[index] = self._refused(action)
        elif action.kind == "reordered":
            self._look_up_reordered(index, action)
        else:
            outputs = copied(self._look_up(action))
            is_training = action.kind in ("train", "detach")
            if is_training and self._case.dense.kind == "pipelined":
                self._seen.losses[index] = outputs
            else:
                self._seen.scores[index] = outputs
            if is_training:
                self._watch.after_step(index, self._seen)

    def _look_up(self, action: Action) -> torch.Tensor:
        """Return the model's outputs for a batch: scores, or losses from pipelined layers."""
        if self._pipeline is not None and action.in_stream:
            with self._evaluating() if action.kind == "evaluate" else contextlib.nullcontext():
                return self._pipeline.progress(self._stream)
        attached = self._pipeline if isinstance(self._pipeline, TrainPipelineSparseDist) else None
        if attached is not None:
            attached.detach()
        batch = self._batch(action)
        if action.kind in ("evaluate", "detach_eval"):
            with self._evaluating(), torch.no_grad():
                outputs = self._evaluated(batch)
        elif action.kind in ("peek", "abandon"):
            with torch.set_grad_enabled(action.kind == "abandon"):
                _, outputs = self._parallel(batch)
        else:
            outputs = self._train(action)
        if attached is not None and action.kind == "detach_eval":
            # After "detach" the pipeline attaches the model by itself.
            attached.attach(self._parallel)
        return outputs

    def _evaluated(self, batch: Batch) -> torch.Tensor:
        if not self._case.evaluates_in_pipeline:
            return self._parallel(batch)[1]
        pipeline = EvalPipelineSparseDist(self._parallel, self._optimizer, rank_device())
        scores = pipeline.progress(iter([batch]))
        pipeline.detach()
        return scores

    def _train(self, action: Action) -> torch.Tensor:
        """Train a plain loop's step; return the model's output for its last batch."""
        has_sync = isinstance(self._parallel, tdsp.ModelParallel2D)
        if self._case.zero_grad in ("before", "zeros"):
            self._optimizer.zero_grad(set_to_none=self._case.zero_grad == "before")
        batches = [self._batch(action, number) for number in batches_of(self._case, action)]
        outputs = torch.zeros(0)
        given = batches if len(batches) == 1 else tdsp.accumulate(self._parallel, batches)
        for place, batch in enumerate(given):
            loss, outputs = self._parallel(batch)
            if self._case.zero_grad == "between" and place == 0:
                self._optimizer.zero_grad()
            if self._is_poisoned(action):
                loss = loss * torch.nan
            (loss / len(batches)).backward()
        if self._case.evaluates_in_step:
            with self._evaluating(), torch.no_grad():
                self._parallel(batches[-1])
        if has_sync and self._case.sync_call == "before":
            self._parallel.sync()
        self._optimizer.step()
        if has_sync and self._case.sync_call == "after":
            self._parallel.sync()
        if self._case.zero_grad == "after":
            self._optimizer.zero_grad()
        return outputs

    def _is_poisoned(self, action: Action) -> bool:
        """Tell whether this rank's loss becomes NaN: the last rank's in the last step."""
        is_last = action.batch == self._case.steps - 1
        return self._case.has_nan and is_last and self._rank == self._case.world_size - 1

    def _batch(self, action: Action, number: int | None = None) -> Batch:
        is_refused = action.kind == "refuse"
        number = action.batch if number is None else number
        local = local_batch(self._case, number, self._rank, is_refused=is_refused)
        return to_batch(self._case, local)

    def _refused(self, action: Action) -> str:
        """Return the error text for a batch with bad ids; empty if none was raised."""
        self._optimizer.zero_grad()
        try:
            self._parallel(self._batch(action))
        except tdsp.errors.InputError as error:
            return str(error)
        return ""

    def _look_up_reordered(self, index: int, action: Action) -> None:
        # A batch that is refused may not have come as far as this, and the oracle's does.
        self._parallel.state_dict()
        is_last = self._rank == self._case.world_size - 1
        local = local_batch(self._case, action.batch, self._rank)
        batch = to_batch(self._case, local, is_reversed=is_last)
        with self._evaluating(), torch.no_grad():
            try:
                self._seen.scores[index] = copied(self._parallel(batch)[1])
            except tdsp.errors.InputError as error:
                self._seen.refusals[index] = str(error)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._parallel.eval()
        try:
            yield
        finally:
            self._parallel.train()

    def _read(self, kind: str) -> StateSeen:
        if kind == "fused_state":
            state = self._parallel.fused_optimizer.state_dict()["state"]
            for values in state.values():
                for value in values.values():
                    local_shards(value)
        weights, dense, id_maps = [], {}, {}
        for name, value in self._parallel.state_dict().items():
            if name.startswith("over") or "._feature_processors." in name:
                dense[name] = whole(value)
                continue
            table = name.split(".")[-2]
            if "_managed_collision_modules" in name:
                id_maps[".".join(name.split(".")[-2:])] = copied(value)
                continue
            weights += [
                Piece(table, row, column, copied(tensor))
                for tensor, (row, column) in local_shards(value)
            ]
        if isinstance(self._dense, tdsp.PipelinedDense):
            flat = gathered(self._case, dense)
        else:
            flat = torch.cat([dense[name] for name in named_dense(self._case, self._parallel)])
        return StateSeen(
            weights, _moments(self._parallel), _hot_copies(self._parallel), flat, id_maps
        )

    def _load_own_state(self) -> None:
        state = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in self._parallel.state_dict().items()
        }
        self._parallel.load_state_dict(state)

    def _sync_now(self) -> None:
        if isinstance(self._parallel, tdsp.ModelParallel2D):
            self._parallel.sync_now()

    def _refresh_hot(self) -> None:
        self._num_refreshes += 1
        hot_sets = {
            name: self._case.hot_ids(name, self._num_refreshes)
            for name, table in self._case.tables.items()
            if table.hot != "none"
        }
        if isinstance(self._parallel, tdsp.ModelParallel2D) and hot_sets:
            self._parallel.refresh_hot_sets(hot_sets)

    def _halve_learning_rates(self) -> None:
        halve_learning_rates(self._optimizer)
        self._lr /= 2

    def _unfreeze(self, most: int | None) -> None:
        """Unfreeze tables by one call, while the dense part's optimizer goes on."""
        names = self._frozen[:most]
        if not names:
            return
        del self._frozen[:most]
        self._parallel.unfreeze(*reversed(names))
        fused: Any = self._parallel.fused_optimizer
        for group in fused.param_groups:
            # Frozen tables' moments are zero.
            group["lr"] = self._lr if group["lr"] else 0.0
        self._optimizer = CombinedOptimizer([fused, self._optimizer.optimizers[-1]])

    def _save(self, index: int) -> None:
        self._saved = self._folder / f"action{index}"
        tdsp.save_checkpoint(self._saved, self._parallel, self._optimizer)

    def _load(self) -> None:
        if self._saved is not None:
            tdsp.load_checkpoint(self._saved, self._parallel, self._optimizer)

    def _flush(self) -> None:
        if isinstance(self._dense, tdsp.DelayedDense):
            self._dense.flush(self._optimizer)
        elif isinstance(self._dense, tdsp.ThresholdedDataParallel):
            self._dense.flush()


def _moments(parallel: nn.Module) -> list[Piece]:
    """Return the moments in this rank's shards, expanded to the shard's columns."""
    pieces = []
    for shard in shards_of(parallel):
        moment = shard.tensors.get("sum", shard.tensors.get("exp_avg_sq"))
        if moment is None:
            continue
        width = shard.tensors["weight"].shape[1]
        if moment.dim() == 1:
            moment = moment[:, None].expand(-1, width)
        pieces.append(Piece(shard.table, shard.row, shard.column, copied(moment)))
    return pieces


def _hot_copies(parallel: nn.Module) -> dict[str, torch.Tensor]:
    """Copy this rank's replicas of hot rows, where they are up to date."""
    copies = {}
    for part in sharded_tables(parallel):
        hot_rows = part.hot_rows
        if hot_rows is None or hot_rows._stale:
            continue
        for kernel in hot_rows.tbes:
            for hot in kernel.shards():
                for name, tensor in hot.tensors.items():
                    copies[f"{hot.table}, column {hot.column}, {name}"] = copied(tensor)
    return copies
