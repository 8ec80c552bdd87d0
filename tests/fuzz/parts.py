"""The tables of a module that one mesh repeats, in the oracle: what they sync, and when."""

from collections import deque
from collections.abc import Mapping

import torch

from tests.fuzz.case import Case, TableCase, table_name
from tests.fuzz.tables import TableState
from torchrec_2dsp.plan.sync_policy import parse_policy

Grads = Mapping[str, torch.Tensor]
"""Each table's gradients of the world's mean loss, by the rank that they come from."""


class Part:
    """Tables that share a sync point, as one sharded module has it."""

    def __init__(
        self, case: Case, tables: dict[str, TableCase], states: Mapping[str, TableState]
    ) -> None:
        """
        Args:
            case: says how they are synced.
            tables: of one module, and of one mesh.
            states: of all tables.
        """
        self._tables = tables
        self._states = {name: states[name] for name in tables}
        sync = case.sync
        self._policy = parse_policy(sync.policy)
        self._moments_policy = parse_policy(sync.moments_policy or sync.policy)
        self._delay = sync.delay if sync.kind == "gradient" else 0
        is_repeated = case.groups > 1 and not any(table.once for table in tables.values())
        self._delays_cold = bool(self._delay) and (
            is_repeated or case.optimizer == "delayed_moment"
        )
        self._hot_number = 0
        self._num_steps = 0
        self._waiting: deque[list[tuple[str, torch.Tensor, torch.Tensor, float, bool]]] = deque()
        """Updates by step: table, gradients, rows, learning rate, and whether they are hot."""

    def before_lookup(self) -> None:
        """A training lookup comes: apply what may not be later."""
        while len(self._waiting) > self._delay:
            self._apply_oldest()

    def hold(self, number: int) -> None:
        """A batch comes that was distributed after so many refreshes of the hot sets."""
        if number != self._hot_number and any(table.hot_rows for table in self._tables.values()):
            self.read()
            self._hot_number = number

    def read(self) -> None:
        """Make the state complete, and copies equal."""
        while self._waiting:
            self._apply_oldest()
        for state in self._states.values():
            if state.is_copied:
                state.average(weights=True, moments=True)

    def train(self, grads: Grads, lr: float) -> None:
        """Apply the gradients of one backward, or keep them until they are due."""
        delayed = []
        for name, table in self._tables.items():
            state, hot = self._states[name], self._hot_rows(table)
            if state.is_copied:
                state.train_locally(grads[name], hot, lr)
                state.train_merged(grads[name], hot, lr, is_hot=True)
                continue
            is_cold = torch.ones(table.rows, dtype=torch.bool)
            is_cold[hot] = False
            cold = is_cold.nonzero().squeeze(1)
            for rows, is_hot in ((cold, False), (hot, True)):
                is_delayed = self._delay if is_hot else self._delays_cold
                update = (name, grads[name], rows, lr, is_hot)
                if is_delayed and table.sharding != "data_parallel":
                    delayed.append(update)
                else:
                    state.train_merged(*update[1:4], is_hot=is_hot)
        if self._delay:
            self._waiting.append(delayed)
        self._num_steps += 1
        for state in self._states.values():
            if state.is_copied:
                state.average(
                    weights=self._policy.is_due(self._num_steps),
                    moments=self._moments_policy.is_due(self._num_steps),
                )

    def _apply_oldest(self) -> None:
        for name, grads, rows, lr, is_hot in self._waiting.popleft():
            self._states[name].train_merged(grads, rows, lr, is_hot=is_hot)

    def _hot_rows(self, table: TableCase) -> torch.Tensor:
        rows = table.refreshed_hot_rows if self._hot_number % 2 else table.hot_rows
        return torch.tensor(rows, dtype=torch.int64)


def parts_of_case(case: Case, states: Mapping[str, TableState]) -> list[Part]:
    """The parts of all modules."""
    parts = []
    for number, module in enumerate(case.modules):
        named = {table_name(number, index): table for index, table in enumerate(module.tables)}
        for once in (False, True):
            tables = {name: table for name, table in named.items() if table.once is once}
            if tables:
                parts.append(Part(case, tables, states))
    return parts
