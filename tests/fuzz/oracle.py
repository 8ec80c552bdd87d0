"""The oracle: what each action of a case must give, on plain tensors and without process groups.

There is one copy of each table for each sharding group where groups train by themselves
(`WeightSync`), else one in all. Gradients are written out by hand, so that nothing here shares code
with what is tested.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from tests.fuzz.actions import Action, actions_of, batches_of
from tests.fuzz.batches import LocalBatch, Lookups, corrected, local_batch
from tests.fuzz.case import Case, ModuleCase, TableCase, feature_name, table_name
from tests.fuzz.dense_net import DenseNet, NetPass
from tests.fuzz.dense_oracle import DenseState
from tests.fuzz.noise import Noise
from tests.fuzz.parts import parts_of_case
from tests.fuzz.tables import TableState
from tests.fuzz.weights import LR, initial_tables
from tests.fuzz.wire import TableWire

POSITION_WEIGHT = 0.25
"""What each further place in a sequence adds to the weight of its row."""


@dataclass
class Expected:
    """What must come out, by action."""

    scores: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """The scores of each rank in each action."""
    losses: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """The losses of each rank's samples in each action."""
    weights: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    """Each table's weights after each action that reads the state."""
    moments: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    """Each table's moments after the same actions, spread over its columns."""
    dense: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """Each rank's parameters of the dense part, flat, after each action that reads the state."""
    left_out: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """What all ranks together haven't sent of dense gradients, after the same actions."""
    sent_whole: set[int] = field(default_factory=set)
    """The actions whose dense gradients all ranks send as a whole, whatever their density."""


def losses_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of each sample. Its gradient is bounded, so that no case trains away."""
    return nn.functional.smooth_l1_loss(scores, targets.to(scores.dtype), reduction="none")


def expect(
    case: Case, noise: Noise | None = None, applied: Mapping[int, torch.Tensor] | None = None
) -> Expected:
    """What a case must give.

    Args:
        case: which is run.
        noise: of numbers that travel; none by default.
        applied: the mean dense gradients of each action, where ranks choose what they send.
    """
    return _Simulation(case, noise or Noise(), applied or {}).run()


@dataclass(frozen=True)
class _Column:
    """Some columns of the dense part's input: a feature's bags of one table."""

    table: str
    module: int
    feature: int
    start: int
    width: int


class _Simulation:
    def __init__(self, case: Case, noise: Noise, applied: Mapping[int, torch.Tensor]) -> None:
        self._case, self._noise, self._applied = case, noise, applied
        self._world = case.world_size
        self._lr = LR
        self._dense, self._net = DenseState(case, noise), DenseNet(case)
        averaged = case.sync.kind == "weight" and case.groups > 1
        self._states = {
            name: TableState(
                case,
                case.tables[name],
                weight.to(noise.dtype),
                is_copied=averaged and _has_copies(case.tables[name]),
                noise=noise,
            )
            for name, weight in initial_tables(case).items()
        }
        self._wires = {name: TableWire.of(case, name, noise) for name in case.tables}
        self._parts = parts_of_case(case, self._states)
        self._columns = list(_columns(case))
        self._saved: tuple[dict[str, TableState], DenseState] | None = None

    def run(self) -> Expected:
        """All actions."""
        expected = Expected()
        for index, action in enumerate(actions_of(self._case)):
            if action.kind in ("train", "detach"):
                self._train(index, action, expected)
            elif action.kind in ("evaluate", "detach_eval", "reordered"):
                self._read_all()
                self._look_up_all(index, action, expected, action.batch)
            elif action.kind == "lr":
                self._lr /= 2
                self._dense.halve_learning_rate()
            elif action.kind == "flush":
                self._dense.flush(self._lr)
            elif action.kind not in ("refuse", "refresh_hot", "sync_now") or (
                action.kind == "sync_now" and self._case.wrapper == "2d"
            ):
                self._read(index, action, expected)
        return expected

    def _read(self, index: int, action: Action, expected: Expected) -> None:
        if action.kind == "load" and self._saved is None:
            return
        self._read_all()
        if action.kind in ("save", "save_load"):
            states = {name: state.copy() for name, state in self._states.items()}
            self._saved = (states, self._dense.copy())
        elif action.kind == "load":
            assert self._saved is not None
            states, dense = self._saved
            self._dense.restore(dense)
            for name, state in self._states.items():
                state.restore(states[name])
        elif action.kind in ("state_dict", "fused_state", "final"):
            for rank, values in enumerate(self._dense.values):
                expected.dense[index, rank] = values.clone()
            if self._case.dense.leaves_out:
                expected.left_out[index, 0] = self._dense.left_out
            for name, state in self._states.items():
                expected.weights[index, name] = state.weights[0].clone()
                if state.has_moments:
                    expected.moments[index, name] = state.moment_columns()

    def _read_all(self) -> None:
        for part in self._parts:
            part.read()

    def _batches(self, number: int) -> list[LocalBatch]:
        return [
            corrected(self._case, local_batch(self._case, number, rank))
            for rank in range(self._world)
        ]

    def _look_up_all(
        self, index: int, action: Action, expected: Expected, number: int
    ) -> list[tuple[LocalBatch, NetPass, torch.Tensor]]:
        """Each rank's batch, what the dense part makes of it, and the gradient of the mean loss."""
        for part in self._parts:
            part.hold(action.hot)
        looked_up = []
        for rank, batch in enumerate(self._batches(number)):
            group = self._case.mesh.group_of(rank)
            bags = [self._pool(batch, column, group, action.hot) for column in self._columns]
            inputs, values = torch.cat(bags, 1).tanh(), self._dense.values[rank]
            net_pass = self._net.forward(values, inputs, batch.uses_shortcut)
            errors = net_pass.scores - batch.targets.to(self._noise.dtype)
            expected.scores[index, rank] = net_pass.scores
            expected.losses[index, rank] = losses_of(net_pass.scores, batch.targets)
            looked_up.append((batch, net_pass, errors.clamp(-1, 1) / self._world))
        return looked_up

    def _train(self, index: int, action: Action, expected: Expected) -> None:
        for part in self._parts:
            part.before_lookup()
        self._dense.before_lookup()
        totals = {
            name: torch.zeros(self._world, *state.weights[0].shape, dtype=self._noise.dtype)
            for name, state in self._states.items()
        }
        dense = torch.zeros_like(self._dense.values)
        numbers = batches_of(self._case, action)
        for number in numbers:
            looked_up = self._look_up_all(index, action, expected, number)
            grads, dense_grads = self._gradients(action, looked_up, 1 / len(numbers))
            for name, grad in grads.items():
                totals[name] += grad
            dense += dense_grads
        self._dense.train(dense, self._lr, self._applied.get(index))
        if self._dense.sent_whole:
            expected.sent_whole.add(index)
        for part in self._parts:
            part.train(totals, self._lr)

    def _gradients(
        self,
        action: Action,
        looked_up: list[tuple[LocalBatch, NetPass, torch.Tensor]],
        share: float,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Each rank's row gradients of each table, and those of the dense part, of one batch.

        Args:
            action: that trains.
            looked_up: what `_look_up_all` has given.
            share: of the batch in the loss.
        """
        grads = {
            name: torch.zeros(self._world, *state.weights[0].shape, dtype=self._noise.dtype)
            for name, state in self._states.items()
        }
        dense_grads = torch.zeros_like(self._dense.values)
        for rank, (batch, net_pass, grads_of_mean) in enumerate(looked_up):
            dense_grads[rank], input_grads = self._net.backward(
                self._dense.values[rank], net_pass, grads_of_mean * share
            )
            input_grads = input_grads * (1 - net_pass.inputs[0].square())
            for column in self._columns:
                lookups = batch.features[column.module, column.feature]
                bags = input_grads[:, column.start : column.start + column.width]
                wire, hot = self._wires[column.table], self._is_hot(column.table, action.hot)
                rows = wire.row_gradients(bags, lookups, self._shares(column, lookups), hot)
                grads[column.table][rank].index_add_(0, lookups.ids, rows)
            for name, wire in self._wires.items():
                hot = self._is_hot(name, action.hot)
                grads[name][rank] = wire.summed_gradients(grads[name][rank], hot)
        return grads, dense_grads

    def _pool(
        self, batch: LocalBatch, column: _Column, group: int, hot_number: int
    ) -> torch.Tensor:
        """A feature's bags of one rank."""
        lookups = batch.features[column.module, column.feature]
        weights = self._states[column.table].weights_of(group)
        is_hot = self._is_hot(column.table, hot_number)
        shares = self._shares(column, lookups)
        return self._wires[column.table].bags(weights, lookups, shares, is_hot)

    def _is_hot(self, name: str, hot_number: int) -> torch.Tensor:
        """For each row of a table, whether it is hot after so many refreshes."""
        table = self._case.tables[name]
        is_hot = torch.zeros(table.rows, dtype=torch.bool)
        rows = table.refreshed_hot_rows if hot_number % 2 else table.hot_rows
        is_hot[list(rows)] = True
        return is_hot

    def _shares(self, column: _Column, lookups: Lookups) -> torch.Tensor:
        """What each id's row is multiplied by in its bag."""
        shares = torch.ones(lookups.ids.numel())
        module = self._case.modules[column.module]
        if module.kind == "weighted":
            shares = lookups.weights
        elif module.kind == "sequences":
            shares = 1 + POSITION_WEIGHT * lookups.positions
        elif self._case.tables[column.table].pooling == "mean":
            shares = 1 / lookups.lengths.to(self._noise.dtype)[lookups.samples]
        return shares.to(self._noise.dtype)[:, None]


def _has_copies(table: TableCase) -> bool:
    return not table.once and table.sharding != "data_parallel"


def _columns(case: Case) -> Iterator[_Column]:
    start = 0
    for number, module in enumerate(case.modules):
        for index, table in enumerate(module.tables):
            for feature in table.features:
                yield _Column(table_name(number, index), number, feature, start, table.dim)
                start += table.dim


def output_names(module: int, case: ModuleCase) -> list[str]:
    """What TorchRec calls the outputs of a module: by table, then by feature."""
    users = [feature for table in case.tables for feature in table.features]
    return [
        feature_name(module, feature)
        + (f"@{table_name(module, index)}" if users.count(feature) > 1 else "")
        for index, table in enumerate(case.tables)
        for feature in table.features
    ]
