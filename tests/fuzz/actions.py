"""A run's actions, one after another: the ranks and the oracle follow the same list."""

from dataclasses import dataclass

from tests.fuzz.batches import is_refused
from tests.fuzz.case import Case

EVENTS = (
    "state_dict",
    "fused_state",
    "load_state_dict",
    "evaluate",
    "sync_now",
    "refresh_hot",
    "save",
    "save_load",
    "load",
    "detach",
    "detach_eval",
    "lr",
    "reordered",
    "flush",
    "peek",
    "abandon",
    "unfreeze",
    "unfreeze_all",
)
"""The events that a case may have between two steps:

- ``state_dict``, ``fused_state``: the state is read; ``load_state_dict``: and loaded again;
- ``evaluate``: a batch is looked up in evaluation mode, by the loop or pipeline that trains;
- ``sync_now``, ``refresh_hot``: the calls of `ModelParallel2D`;
- ``save``, ``save_load``, ``load``: checkpoints; ``load`` goes back to the last one saved, if any;
- ``detach``, ``detach_eval``: a pipeline lets go of the model, which trains or evaluates a batch by
  a plain loop meanwhile;
- ``lr``: the learning rate is halved;
- ``reordered``: a plain loop evaluates a batch whose features come in another order on the last
  rank; it may be refused on all ranks instead;
- ``flush``: the call of wrappers whose dense gradients come late, if there is such a one;
- ``peek``: a batch is looked up in training mode without gradients;
- ``abandon``: a batch is looked up with gradients, but no backward follows;
- ``unfreeze``: the first table that is still frozen is trained from now on, if there is one;
- ``unfreeze_all``: one call trains all of them, named from the last to the first.
"""

_NUM_AHEAD = {"plain": 0, "base": 0, "sparse_dist": 1, "row_prefetch": 2}
"""The number of batches that each loop distributes ahead."""
_EXTRA, _REFUSED, _ACCUMULATED = 100, 200, 300
"""Numbers of batches that no stream has."""


@dataclass(frozen=True)
class Action:
    """A step or an event that all ranks run."""

    kind: str
    """``"train"``, ``"refuse"`` (a batch with ids that raise), ``"final"`` or one of `EVENTS`."""
    batch: int = -1
    """The number of the batch that it looks up."""
    hot: int = 0
    """The number of hot-set refreshes before that batch was distributed."""
    distributed_again: int = -1
    """The action in which a pipeline that is attached again distributes it for a second time."""

    @property
    def in_stream(self) -> bool:
        """Tell whether a pipeline takes the batch from its stream."""
        return 0 <= self.batch < _EXTRA


def batches_of(case: Case, action: Action) -> list[int]:
    """Return all batch numbers that an action accumulates into one update."""
    is_accumulated = action.kind == "train" and case.loop == "plain"
    return [
        action.batch + _ACCUMULATED * number
        for number in range(case.accumulated if is_accumulated else 1)
    ]


def actions_of(case: Case) -> list[Action]:
    actions: list[Action] = []
    batch, hot = 0, 0
    for step in range(case.steps):
        actions.append(Action("train", batch, hot))
        batch += 1
        if has_refusals(case) and is_refused(case, _REFUSED + step):
            actions.append(Action("refuse", _REFUSED + step, hot))
        for index, (after, kind) in enumerate(case.events):
            if after != step:
                continue
            if kind == "evaluate":
                actions.append(Action(kind, batch, hot))
                batch += 1
            elif kind == "reordered" and case.loop != "plain":
                continue
            elif kind in ("detach", "detach_eval", "reordered", "peek", "abandon"):
                actions.append(Action(kind, _EXTRA + index, hot))
            else:
                hot += kind == "refresh_hot" and case.wrapper == "2d"
                actions.append(Action(kind, hot=hot))
    actions.append(Action("final"))
    return actions if case.loop == "plain" else _distributed_ahead(actions, case.loop)


def distributions(case: Case, actions: list[Action]) -> dict[int, list[int]]:
    """Map each action to the actions whose batches are distributed in it, in order."""
    stream = [index for index, action in enumerate(actions) if action.in_stream]
    first = {
        index: stream[max(0, place - _NUM_AHEAD[case.loop])] for place, index in enumerate(stream)
    }
    by_action: dict[int, list[int]] = {index: [] for index in range(len(actions))}
    for index, action in enumerate(actions):
        if action.batch >= 0:
            by_action[first.get(index, index)].append(index)
    return by_action


def has_refusals(case: Case) -> bool:
    """Tell whether some batches are refused; a pipeline would lose its batches in flight."""
    return case.has_bad_ids and case.bad_ids == "raise" and case.loop == "plain"


def _distributed_ahead(actions: list[Action], loop: str) -> list[Action]:
    """Return a pipeline's actions; its next batches were distributed before a refresh."""
    num_ahead = _NUM_AHEAD[loop]
    stream = [index for index, action in enumerate(actions) if action.in_stream]
    now = {index: actions[index].hot for index in range(len(actions))}
    hot_of, again = {}, {}
    for place, index in enumerate(stream):
        # Nothing is refreshed before the first step; later batches are distributed in an
        # earlier batch's step.
        hot_of[index] = now[stream[max(0, place - num_ahead)]]
        # Reattached, it distributes its batch again: at once after an evaluation, else in the step.
        for other in range(stream[place - 1] + 1, index) if place else ():
            if actions[other].kind in ("detach", "detach_eval"):
                again[index] = index if actions[other].kind == "detach" else other
                hot_of[index] = now[again[index]]
    return [
        Action(action.kind, action.batch, hot_of.get(index, action.hot), again.get(index, -1))
        for index, action in enumerate(actions)
    ]
