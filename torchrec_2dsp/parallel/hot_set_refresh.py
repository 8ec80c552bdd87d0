"""`HotSetRefresh`: hot sets that follow the rows which are used most at the time."""

from collections.abc import Mapping

from torchrec_2dsp.access.counter import RowCounter
from torchrec_2dsp.access.hot_set import HotSet
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.parallel.model_parallel2d import ModelParallel2D


class HotSetRefresh:
    """Makes the most used rows hot, once in ``every`` steps.

    Each hot table keeps the room that its plan gives it. The user updates the counter, with every
    batch or some of them; give it a ``half_life``, or old batches count as much as new ones.

    Example:
        The counter is made before the model is sharded::

            counter = tdsp.RowCounter.for_model(model, half_life=10_000)
            ...
            refresh = tdsp.HotSetRefresh(model, counter, every=10_000)
            for batch in batches:
                counter.update(batch.sparse_features)
                train_step(model, batch)
                refresh.step()
    """

    def __init__(self, model: ModelParallel2D, counter: RowCounter, *, every: int) -> None:
        """
        Args:
            model: a model with hot sets in its plan.
            counter: the counter of this rank's batches.
            every: after how many steps to choose anew.
        """
        if every < 1:
            raise ConfigError(f"every={every} must be at least one step")
        self._rows = {name: len(hot_set) for name, hot_set in model.hot_sets.items()}
        missing = sorted(self._rows.keys() - set(counter.tables))
        if missing:
            raise ConfigError(
                f"the counter doesn't count table {missing[0]!r}, whose hot rows it is to choose; "
                "make it by RowCounter.for_model(model), before the model is sharded"
            )
        if not self._rows:
            raise ConfigError("the model has no hot rows to refresh; pin some when you plan")
        self._model, self._counter, self._every = model, counter, every
        self._num_steps = 0

    def step(self) -> bool:
        """Count a step that is over, on all ranks; whether other rows are hot from now on.

        Collectives:
            Once in ``every`` steps those of `RowCounter.gather`, and if other rows are used most
            now, those of `ModelParallel2D.refresh_hot_sets`.
        """
        self._num_steps += 1
        if self._num_steps % self._every:
            return False
        stats = self._counter.gather(world_group())
        current = self._model.hot_sets
        changed = {
            name: hot_set
            for name, rows in self._rows.items()
            if stats[name].num_lookups
            and (hot_set := HotSet.from_stats(stats, name, rows=rows)) != current[name]
        }
        if changed:
            self._model.refresh_hot_sets(changed)
        return bool(changed)

    def state_dict(self) -> dict[str, int]:
        """How many steps were counted. Hot sets are in the model's state, and counts of rows in the
        counter's: a `TrainState` stores all three."""
        return {"num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting steps from a stored state."""
        self._num_steps = state["num_steps"]
