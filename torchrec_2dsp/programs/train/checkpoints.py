"""Save a run's checkpoints, prune old ones, and resume from them.

A checkpoint holds the model, the optimizers and the train state. This program adds `RunHistory`,
`RunSettings` and, where ranks train independently, `LocalMoments` to the train state.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.parallel.checkpoint.address import Place, place_of
from torchrec_2dsp.parallel.checkpoint.load import load_checkpoint
from torchrec_2dsp.parallel.checkpoint.save import (
    PendingSave,
    drop_old_checkpoints,
    latest_checkpoint,
    save_checkpoint,
)
from torchrec_2dsp.parallel.train_state.state import TrainState
from torchrec_2dsp.programs.config.section import flat
from torchrec_2dsp.programs.train.config import CheckpointConfig, TrainConfig
from torchrec_2dsp.programs.train.record import Evaluation, StepsTrained

_LAST, _BEST = "last", "best"
"""Folders for a run's newest checkpoints, and for those with the best evaluation so far."""

_STEP_KEYS = ("step", "seconds", "memory_bytes", "table_lr", "dense_lr", "samples_per_s")
"""Step figures that checkpoints store as they are; others differ between ranks."""


Resume = Place | Literal["auto"] | None
"""The start of a program's runs: a checkpoint of its only run, each run's newest checkpoint if it
has one, or the first step."""


class Checkpoints:
    """One run's checkpoints."""

    def __init__(
        self, config: CheckpointConfig, run: str, optimizer: KeyedOptimizer, state: TrainState
    ) -> None:
        self._config, self._optimizer, self._state = config, optimizer, state
        self._folder = place_of(config.folder) / run if config.folder else None
        self._pending: PendingSave | None = None
        self._saved: dict[str, int] = {}
        self._start = 0
        self.every = config.every if config.folder else 0
        """Steps between checkpoints; 0 for none."""

    def resume(self, resume: Resume) -> Place | None:
        """Load the checkpoint that the run resumes from, and return its path, if there is one.

        Raises:
            ConfigError: the run would write over newer checkpoints, no folder is given or it can't
                be written to, or the path is no checkpoint.

        Collectives:
            Same as `latest_checkpoint` and `load_checkpoint`, and an agreement of all ranks.
        """
        path = self._first(resume)
        if path is not None:
            load_checkpoint(path, self._state.model, self._optimizer, train_state=self._state)
            self._start = self._state.step
        return path

    def _first(self, resume: Resume) -> Place | None:
        if self._folder is None:
            if resume == "auto":
                raise ConfigError(
                    "--resume auto needs a folder of checkpoints; set checkpoint.folder, or give "
                    "--resume the path of a checkpoint"
                )
            return resume
        with agreeing(world_group()):
            self._make_folder(self._folder)
        newest = max(
            filter(None, (latest_checkpoint(self._folder / kind) for kind in (_LAST, _BEST))),
            key=_step_of,
            default=None,
        )
        if resume == "auto":
            return newest
        with agreeing(world_group()) as facts:
            facts["the checkpoint to resume from"] = str(resume)
            if resume is not None and not (resume / ".metadata").exists():
                raise ConfigError(
                    f"--resume {resume} is no finished checkpoint; give the folder of one, such as "
                    f"{newest or self._folder / _LAST / '1000'}, or use --resume auto"
                )
            start = 0 if resume is None else _step_of(resume)
            if newest is not None and _step_of(newest) > start:
                raise ConfigError(
                    f"the checkpoint {newest} is newer than step {start}, at which this run would "
                    "begin, and the run would save over it; use --resume auto, or another "
                    "checkpoint.folder"
                )
        return resume

    def _make_folder(self, folder: Place) -> None:
        """Create the run's folder now, to fail before the first steps if it can't be created."""
        try:
            if self.every and isinstance(folder, Path):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"checkpoint.folder={self._config.folder!r} can't be written to: {error.strerror}; "
                "use another"
            ) from error

    def save(self) -> None:
        """Save the newest checkpoint and drop the oldest; do nothing without a folder.

        Raises:
            ConfigError: another run saves to the same folder.

        Collectives:
            Same as `save_checkpoint`.
        """
        self._save(_LAST, self._config.keep_last)

    def save_best(self) -> None:
        """Save a checkpoint with the best evaluation so far, and drop older ones, if any are kept.

        Collectives:
            Same as `save_checkpoint`.
        """
        if self._config.keep_best:
            self._save(_BEST, self._config.keep_best)

    def _save(self, kind: str, keep: int) -> None:
        if self._folder is None:
            return
        folder, step = self._folder / kind, self._state.step
        path = folder / str(step)
        if self._saved.get(kind) == step:
            return  # The last step saved one already.
        newest = latest_checkpoint(folder)
        if newest == path and step == self._start:
            return  # The run resumed at its end.
        if newest is not None and _step_of(newest) >= step:
            raise ConfigError(
                f"{newest} was saved by another run while this one trained, and one folder can't "
                "keep the checkpoints of both; give each run its own checkpoint.folder"
            )
        self._saved[kind] = step
        self._pending = save_checkpoint(
            path,
            self._state.model,
            self._optimizer,
            train_state=self._state,
            asynchronous=self._config.asynchronous,
        )
        drop_old_checkpoints(folder, keep=keep)

    def finish(self) -> None:
        """Wait for a save in progress, then drop what it replaces."""
        if self._folder is not None and self._pending is not None:
            self._pending.result()
            drop_old_checkpoints(self._folder / _LAST, keep=self._config.keep_last)
            drop_old_checkpoints(self._folder / _BEST, keep=max(1, self._config.keep_best))


def _step_of(path: Place) -> int:
    """Return the step in a checkpoint's name; 0 for a name without one."""
    return int(path.name) if path.name.isdecimal() else 0


class RunHistory:
    """A run's measurements so far; equal on all ranks, part of the train state."""

    def __init__(self) -> None:
        self.progress: list[StepsTrained] = []
        """The run's training curve."""
        self.evaluations: list[Evaluation] = []
        """The run's evaluations."""
        self.bytes_per_step: dict[str, float] = {}
        """The bytes that a rank sent per step, averaged over ranks and steps, by the name in
        `RunRecord`."""

    @property
    def losses(self) -> list[float]:
        """Each step's train loss."""
        return [loss for steps in self.progress for loss in steps.losses]

    @property
    def seconds(self) -> float:
        """All steps' time."""
        return sum(steps.seconds or 0.0 for steps in self.progress)

    def state_dict(self) -> dict[str, Any]:
        """Return the losses as a tensor, the rest as plain values."""
        return {
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "progress": [
                {
                    **{key: getattr(steps, key) for key in _STEP_KEYS},
                    "num_losses": len(steps.losses),
                    "click_rate": steps.click_rate,
                    "memory_bytes": list(steps.memory_bytes),
                }
                for steps in self.progress
            ],
            "evaluations": [
                {**evaluation.model_dump(), "losses": evaluation.losses}
                | {"click_rate": evaluation.click_rate}
                for evaluation in self.evaluations
            ],
            "bytes_per_step": dict(self.bytes_per_step),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the run's history from before its restart."""
        losses, end = state["losses"].tolist(), 0
        self.progress = []
        for plain in state["progress"]:
            start, end = end, end + plain["num_losses"]
            figures = {key: plain[key] for key in _STEP_KEYS}
            self.progress.append(
                StepsTrained.of_losses(losses[start:end], plain["click_rate"], **figures)
            )
        self.evaluations = [Evaluation.model_validate(plain) for plain in state["evaluations"]]
        self.bytes_per_step = dict(state.get("bytes_per_step", {}))  # Older checkpoints lack it.


_LATER = {
    "model.table_dtype": '"fp32"',
    "optimizer.stochastic_rounding": "false",
    "optimizer.rounding_seed": "0",
    "run.moment_rho": "0.01",
}
"""Keys that some checkpoints lack, and the values that they stand for; saved only otherwise."""


_LENGTH = "loop.steps"
"""The key for a run's length, saved with schedules that depend on it."""

_RUN, _LOG = "run.", "the log's "
"""The prefixes of the keys for a run's own values, and of those that describe the data; older
checkpoints have none."""
_RUN_KEYS = {"splits", "split_threshold", "moment_scale"}
"""The run's own values: splits belong to its model, the scale to its tables' optimizer."""
_NOT_COMPARED = {"data.malformed_limit", "data.num_ahead", "data.prepared"}
"""Keys that change no sample, but that earlier checkpoints have."""
_FILES = ("data.files", "data.held_out.files")
"""The keys for files. A log may move: its fingerprint says whether it is the same."""


class RunSettings:
    """Config values that must not change between a run's restarts; part of the train state.

    They determine which samples a step trains and how; other values make another run. The mesh
    and the exchange may change.
    """

    def __init__(
        self,
        config: TrainConfig,
        run: str,
        log: Mapping[str, str] | None = None,
        num_steps: int = 0,
    ) -> None:
        """Take the values of a config's run.

        Args:
            config: the config.
            run: the run's name.
            log: the fingerprint of the data that the config names.
            num_steps: the run's planned steps; 0 for ``loop.steps``.
        """
        loop, optimizer = config.loop, config.optimizer
        self.num_steps = num_steps or loop.steps
        """The steps that schedules span: the planned ones, or the checkpoint's."""
        self._asked_steps = json.dumps(loop.steps)
        settings: dict[str, Any] = {
            "loop": loop.model_dump(mode="json", include={"global_batch_size", "accumulate"}),
            "data": config.data.model_dump(mode="json"),
            "model": config.model.model_dump(mode="json", exclude={"sharding_types"}),
            "optimizer": optimizer.model_dump(mode="json"),
            "run": config.runs[run].model_dump(mode="json", include=_RUN_KEYS),
        }
        if any(schedule.depends_on_length for schedule in optimizer.schedules):
            settings["loop"]["steps"] = self.num_steps
        values = _compared(dict(flat("", settings)))
        self._values = {key: value for key, value in values.items() if _LATER.get(key) != value}
        self._values |= {f"{_LOG}{name}": value for name, value in (log or {}).items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the settings by config key, each as JSON."""
        return dict(self._values)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the schedules' length; other settings are equal."""
        if length := state.get(_LENGTH):
            self.num_steps, self._values[_LENGTH] = json.loads(length), length

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise unless the saved settings equal these.

        Raises:
            ConfigError: they differ; it names the first key that does.
        """
        for key, saved, now in self.differences(state):
            remedy = "put the files back as they were" if key.startswith(_LOG) else "restore it"
            raise ConfigError(
                f"{key} was {saved} when the checkpoint was saved, and is {now} now, which would "
                f"be another run; {remedy}, or start a new run in another folder"
            )

    def differences(self, state: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
        """Yield each key that has changed, with the saved value and this one."""
        unsaid = [
            start for start in (_RUN, _LOG) if not any(key.startswith(start) for key in state)
        ]
        state = _compared(state)
        # The schedule says whether the length is there, so another schedule is named first.
        for key in sorted(state.keys() | self._values.keys(), key=lambda k: (k == _LENGTH, k)):
            unsaved = _LATER.get(key, "nothing")
            saved, now = (values.get(key, unsaved) for values in (state, self._values))
            if key == _LENGTH and saved == self._asked_steps:
                continue  # Earlier versions' schedules spanned loop.steps, also if the data ended.
            if saved != now and not key.startswith(tuple(unsaid)):
                yield key, saved, now


def _compared(values: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that distinguish runs, with the names of files instead of their paths."""
    compared = {key: value for key, value in values.items() if key not in _NOT_COMPARED}
    for key in compared.keys() & set(_FILES):
        compared[key] = json.dumps([Path(path).name for path in json.loads(compared[key])])
    return compared


class LocalMoments:
    """This rank's dense optimizer state, for the train state of a run with `LocalDense`.

    Every rank has its own moments there; a checkpoint's optimizer state keeps only one rank's.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state by parameter name."""
        state = self._optimizer.state
        return {
            name: dict(state[param])
            for name, param in self._optimizer.params.items()
            if param in state
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load this rank's state."""
        self.load_rank_states([state])

    @torch.no_grad()
    def load_rank_states(self, states: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
        """Load the first given rank's state; without any, keep the checkpoint's."""
        current: Any = self._optimizer.state
        for name, saved in states[0].items() if states else ():
            entries = current[self._optimizer.params[name]]
            for entry, value in saved.items():
                if isinstance(value, torch.Tensor):
                    entries[entry].copy_(value)
                else:
                    entries[entry] = value
