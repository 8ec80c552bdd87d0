"""`Checkpoints`: where a run's checkpoints lie, which it goes on from, and which stay."""

from dataclasses import dataclass
from pathlib import Path

from torchrec.optim.keyed import KeyedOptimizer

from torchrec_2dsp.comms.agreement import agreeing
from torchrec_2dsp.comms.world_groups import world_group
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.parallel.checkpoint.latest import drop_old_checkpoints, latest_checkpoint
from torchrec_2dsp.parallel.checkpoint.load import load_checkpoint
from torchrec_2dsp.parallel.checkpoint.pending import PendingSave
from torchrec_2dsp.parallel.checkpoint.save import save_checkpoint
from torchrec_2dsp.parallel.train_state.state import TrainState
from torchrec_2dsp.programs.train.sections import CheckpointConfig

_LAST, _BEST = "last", "best"
"""The folders of a run's newest checkpoints, and of those whose evaluation was the best so far."""


@dataclass(frozen=True)
class Resume:
    """Where the runs of a program begin.

    Example:
        >>> from torchrec_2dsp.programs.train.checkpoints import Resume
        >>> Resume.of("auto"), Resume.of("runs/one/last/300").path.name
        (Resume(automatic=True, path=None), '300')
    """

    automatic: bool = False
    """Whether each run goes on from its newest checkpoint, if it has one."""

    path: Path | None = None
    """The checkpoint that the only run goes on from."""

    @classmethod
    def of(cls, text: str) -> "Resume":
        """What a user says: auto, never, or the path of a checkpoint."""
        if text == "never":
            return cls()
        return cls(automatic=True) if text == "auto" else cls(path=Path(text))


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, config: CheckpointConfig, run: str) -> None:
        """
        Args:
            config: equal on all ranks.
            run: the run's name, and that of its folder.
        """
        self._config = config
        self._folder = Path(config.folder) / run if config.folder else None
        self._pending: PendingSave | None = None

    def due_after(self, step: int) -> int | None:
        """The first step after ``step`` that ends with a checkpoint; none without a folder."""
        every = self._config.every
        return None if self._folder is None else (step // every + 1) * every

    @property
    def keeps_best(self) -> bool:
        """Whether checkpoints stay of the best evaluations."""
        return self._folder is not None and self._config.keep_best > 0

    def first(self, resume: Resume) -> Path | None:
        """The checkpoint that the run begins with, if any; call it on all ranks.

        Raises:
            ConfigError: the run would write over newer checkpoints, or nothing says where
                checkpoints are.

        Collectives:
            Those of `latest_checkpoint`, and an agreement of all ranks.
        """
        if self._folder is None:
            if resume.automatic:
                raise ConfigError(
                    "--resume auto needs a folder of checkpoints; set checkpoint.folder, or give "
                    "--resume the path of a checkpoint"
                )
            return resume.path
        newest = max(
            filter(None, (latest_checkpoint(self._folder / kind) for kind in (_LAST, _BEST))),
            key=_step_of,
            default=None,
        )
        if resume.automatic:
            return newest
        with agreeing(world_group()) as facts:
            facts["the checkpoint to resume from"] = str(resume.path)
            start = 0 if resume.path is None else _step_of(resume.path)
            if newest is not None and _step_of(newest) > start:
                raise ConfigError(
                    f"the checkpoint {newest} is newer than step {start}, at which this run would "
                    "begin, and the run would save over it; use --resume auto, or another "
                    "checkpoint.folder"
                )
        return resume.path

    def load(self, path: Path, optimizer: KeyedOptimizer, state: TrainState) -> None:
        """Read a checkpoint into a run.

        Collectives:
            Those of `load_checkpoint`.
        """
        load_checkpoint(path, state.model, optimizer, train_state=state)

    def save(self, optimizer: KeyedOptimizer, state: TrainState) -> None:
        """Save the newest checkpoint, and drop those that are too old; nothing without a folder.

        Collectives:
            Those of `save_checkpoint`.
        """
        self._save(_LAST, self._config.keep_last, optimizer, state)

    def save_best(self, optimizer: KeyedOptimizer, state: TrainState) -> None:
        """Save a checkpoint whose evaluation was the best so far, and drop older ones.

        Collectives:
            Those of `save_checkpoint`.
        """
        self._save(_BEST, self._config.keep_best, optimizer, state)

    def _save(self, kind: str, keep: int, optimizer: KeyedOptimizer, state: TrainState) -> None:
        if self._folder is None:
            return
        folder = self._folder / kind
        path = folder / str(state.step)
        is_being_written = self._pending is not None and self._pending.folder == path
        if is_being_written or latest_checkpoint(folder) == path:
            return  # The last step was due anyway, or the run goes on from its end.
        self._pending = save_checkpoint(
            path,
            state.model,
            optimizer,
            train_state=state,
            asynchronous=self._config.asynchronous,
        )
        drop_old_checkpoints(folder, keep=keep)

    def finish(self) -> None:
        """Wait for a save that is still being written, and drop what it replaces."""
        if self._folder is not None and self._pending is not None:
            self._pending.result()
            drop_old_checkpoints(self._folder / _LAST, keep=self._config.keep_last)
            drop_old_checkpoints(self._folder / _BEST, keep=max(1, self._config.keep_best))


def _step_of(path: Path) -> int:
    """The number of steps in a checkpoint's name; 0 for a name without one."""
    return int(path.name) if path.name.isdecimal() else 0
