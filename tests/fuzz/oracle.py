"""The oracle: each action's expected results, on plain tensors and without process groups.

There is one copy of each table for each sharding group where groups train by themselves
(`WeightSync`), else one in all. Gradients are written out by hand, so that nothing here shares code
with what is tested.

Numbers sent in few bits are rounded where the ranks round them:

exchanges of rows    each row on its way to a rank; the rank's gradient on the way back
sequences            each vector; its gradient
bags                 each owner's partial sum of a bag; the bag's gradient
bags, by hosts       these, and once more each host's partial sum

A rank that is alone in its group sends nothing, so nothing is rounded.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import torchrec_2dsp as tdsp
from tests.fuzz.actions import Action, actions_of, batches_of
from tests.fuzz.batches import LocalBatch, Lookups, corrected, local_batch
from tests.fuzz.case import Case, ModuleCase, TableCase, feature_name, table_name
from tests.fuzz.dense_oracle import DenseNet, DenseState, NetPass, PositionWeights
from tests.fuzz.id_maps import HotRows, IdMaps, IdMapState
from tests.fuzz.state import ADAMS, LR, Noise, TableState, initial_tables, parts_of_case

_BY_HOST = ("table_row_wise", "grid_shard")
BY_OWNER = ("row_wise", *_BY_HOST)
"""Shardings that deal a column's rows to several ranks; each sums part of a bag."""


@dataclass(frozen=True)
class TableWire:
    """A table's transport settings: encoding, exchange width and number of hops."""

    table: TableCase
    is_bags: bool
    transport: tdsp.Transport
    width: int
    """The number of numbers that share a scale."""
    num_ranks: int
    """The number of ranks among which numbers travel."""
    num_owners: int
    """The number of ranks to which a column's rows are dealt."""
    num_hosts: int
    """The number of hosts between which bags travel once more."""
    noise: Noise

    @classmethod
    def of(cls, case: Case, name: str, noise: Noise) -> "TableWire":
        """Return how the named table's numbers travel."""
        table, module = case.tables[name], case.modules[case.module_of(name)]
        together = [other for other in module.tables if _message(other) == _message(table)]
        by_row = table.exchange in ("row", "row_per_host")
        widths = [other.dim // other.num_blocks for other in together]
        mesh = tdsp.Mesh2D(1, case.world_size) if table.once else case.mesh
        host_size = mesh.node_group_size(case.local_world_size)
        num_ranks = case.world_size if table.once else case.size
        by_host = table.sharding in _BY_HOST
        num_owners = {"row_wise": num_ranks} | dict.fromkeys(_BY_HOST, host_size)
        transport = table.transport if table.transport != "fp32" else case.qcomms
        is_still = table.sharding == "data_parallel" or transport == "none"
        return cls(
            table=table,
            is_bags=module.kind != "sequences",
            transport=tdsp.Transport("fp32" if is_still else transport),
            width=table.dim if by_row else math.gcd(*widths),
            num_ranks=host_size if by_host else num_ranks,
            num_owners=num_owners.get(table.sharding, 1),
            num_hosts=num_ranks // host_size if by_host else 1,
            noise=noise,
        )

    @property
    def _by_row(self) -> bool:
        return self.table.exchange in ("row", "row_per_host")

    @property
    def _divides_late(self) -> bool:
        """Tell whether mean-pooled bags travel as sums."""
        is_mean = self.is_bags and self.table.pooling == "mean"
        return is_mean and (self.table.sharding in BY_OWNER or self.table.hot != "none")

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        if self.num_ranks == 1:
            return values
        return self.noise.sent(values, self.transport, self.width)

    def _sent_to_hosts(self, bags: torch.Tensor) -> torch.Tensor:
        """Return hosts' partial bags as they arrive, or bag gradients, which go to hosts first."""
        if self.num_hosts == 1:
            return bags
        return self.noise.sent(bags, self.transport, self.width)

    def bags(
        self, weights: torch.Tensor, lookups: Lookups, shares: torch.Tensor, hot: torch.Tensor
    ) -> torch.Tensor:
        """Return a rank's bags for one feature; ``shares`` has each id's row factor."""
        rows, ids = weights[lookups.ids], lookups.ids
        is_hot = hot[ids][:, None]
        bags = rows.new_zeros(lookups.lengths.numel(), rows.shape[1])
        if self._by_row or not self.is_bags:
            rows = torch.where(is_hot, rows, self._sent(rows))
            return bags.index_add_(0, lookups.samples, rows * shares)
        lengths = lookups.lengths.clamp(min=1).to(rows.dtype)[:, None]
        if self._divides_late:
            shares = torch.ones_like(shares)
        owners = ids // max(1, -(-self.table.rows // self.num_owners))
        for owner in range(self.num_owners):
            is_own = (owners == owner)[:, None] & ~is_hot
            part = torch.zeros_like(bags).index_add_(0, lookups.samples, rows * shares * is_own)
            bags += self._sent(part)
        bags = self._sent_to_hosts(bags)
        bags = bags.index_add_(0, lookups.samples, rows * shares * is_hot)
        return bags / lengths if self._divides_late else bags

    def row_gradients(
        self, bags: torch.Tensor, lookups: Lookups, shares: torch.Tensor, hot: torch.Tensor
    ) -> torch.Tensor:
        """Return each id's row gradient, given the bags' gradients."""
        if self._by_row:
            return bags[lookups.samples] * shares
        is_hot = hot[lookups.ids][:, None]
        exact = bags[lookups.samples] * shares
        if not self.is_bags:
            return torch.where(is_hot, exact, self._sent(exact))
        lengths = lookups.lengths.clamp(min=1).to(bags.dtype)[:, None]
        if self._divides_late:
            bags, shares = bags / lengths, torch.ones_like(shares)
        rows = self._sent(self._sent_to_hosts(bags))[lookups.samples] * shares
        return torch.where(is_hot, exact, rows)

    def share_gradients(
        self, weights: torch.Tensor, bags: torch.Tensor, lookups: Lookups, hot: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient for each id's row factor in its bag."""
        is_hot, rows = hot[lookups.ids][:, None], weights[lookups.ids]
        grads = bags[lookups.samples]
        # The rows come to the rank, or the gradients to their owners.
        if self._by_row:
            rows = torch.where(is_hot, rows, self._sent(rows))
        else:
            sent = self._sent(self._sent_to_hosts(bags))[lookups.samples]
            grads = torch.where(is_hot, grads, sent)
        return (rows * grads).sum(dim=1)

    def summed_gradients(self, grads: torch.Tensor, hot: torch.Tensor) -> torch.Tensor:
        """Return a rank's row gradients as they arrive at the rows' owners."""
        if not self._by_row:
            return grads
        return torch.where(hot[:, None], grads, self._sent(grads))


def _message(table: TableCase) -> tuple[Any, ...]:
    """Return the options that tables must share for their numbers to travel in one message."""
    return table.sharding, table.exchange, table.transport, table.once, table.frozen


_LOOKED_UP = 1e-30
POSITION_WEIGHT = 0.25
"""The amount that each further place in a sequence adds to its row's weight."""


@dataclass
class Expected:
    """The expected results, by action."""

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
    """The dense gradients that all ranks together haven't sent, after the same actions."""
    sent_whole: set[int] = field(default_factory=set)
    """The actions whose dense gradients all ranks send as a whole, whatever their density."""
    id_maps: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """The buffers of all id maps, after the actions that read the state."""
    num_evicted: int = 0


def losses_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each sample's loss. Its gradient is bounded, so that no case diverges."""
    return nn.functional.smooth_l1_loss(scores, targets.to(scores.dtype), reduction="none")


def expect(
    case: Case, noise: Noise | None = None, applied: Mapping[int, torch.Tensor] | None = None
) -> Expected:
    """Return a case's results; ``applied`` has mean dense gradients that ranks chose to send."""
    return _Simulation(case, noise or Noise(), applied or {}).run()


@dataclass(frozen=True)
class _Column:
    """Columns in the dense part's input: one feature's bags from one table."""

    table: str
    module: int
    feature: int
    start: int
    width: int
    place: int
    """Its place among the module's outputs."""


class _Simulation:
    def __init__(self, case: Case, noise: Noise, applied: Mapping[int, torch.Tensor]) -> None:
        self._case, self._noise, self._applied = case, noise, applied
        self._world = case.world_size
        self._lr = LR
        self._dense, self._net = DenseState(case, noise), DenseNet(case)
        self._positions = PositionWeights(case)
        averaged = case.sync.kind == "weight" and case.groups > 1
        mapped = [
            name
            for module, tables in zip(case.modules, case.tables_by_module, strict=True)
            for name in (tables if module.evicts else ())
        ]
        self._states = {
            name: TableState(
                case,
                case.tables[name],
                weight.to(noise.dtype),
                is_copied=averaged and _has_copies(case.tables[name]),
                is_mapped=name in mapped,
                noise=noise,
            )
            for name, weight in initial_tables(case).items()
        }
        self._wires = {name: TableWire.of(case, name, noise) for name in case.tables}
        self._parts = parts_of_case(case, self._states)
        self._columns = list(_columns(case))
        self._saved: tuple[dict[str, TableState], DenseState, IdMapState] | None = None
        self._id_maps = IdMaps(case, self._batches)
        self._hot_rows: HotRows = {}

    def run(self) -> Expected:
        expected = Expected()
        for index, action in enumerate(actions_of(self._case)):
            self._id_maps.distribute(index)
            if action.kind in ("train", "detach"):
                self._train(index, action, expected)
            elif action.kind in ("evaluate", "detach_eval", "reordered", "peek", "abandon"):
                if action.kind == "abandon":
                    self._before_lookup(is_abandoned=True)
                else:
                    self._read_all()
                self._look_up_all(index, action, expected, action.batch)
            elif action.kind == "lr":
                self._lr /= 2
                self._dense.halve_learning_rate()
            elif action.kind in ("unfreeze", "unfreeze_all"):
                self._unfreeze(1 if action.kind == "unfreeze" else None)
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
            self._saved = (states, self._dense.copy(), self._id_maps.state())
        elif action.kind == "load":
            assert self._saved is not None
            states, dense, id_maps = self._saved
            self._dense.restore(dense)
            self._id_maps.load(id_maps)
            for name, state in self._states.items():
                state.restore(states[name])
        elif action.kind in ("state_dict", "fused_state", "final"):
            for rank, values in enumerate(self._dense.values):
                expected.dense[index, rank] = values.clone()
            expected.id_maps[index] = self._id_maps.state()
            if self._case.dense.leaves_out:
                expected.left_out[index, 0] = self._dense.left_out
            for name, state in self._states.items():
                expected.weights[index, name] = state.weights[0].clone()
                if state.has_moments:
                    expected.moments[index, name] = state.moment_columns()
        if action.kind in ("load_state_dict", "save_load"):
            self._id_maps.load(self._id_maps.state())

    def _unfreeze(self, most: int | None) -> None:
        """Train the first ``most`` frozen tables from now on, in step with others' policies."""
        num_steps = max(part.num_steps for part in self._parts)
        frozen = {name: part for part in self._parts for name in part.frozen}
        for name in [name for name in self._case.unfreezable if name in frozen][:most]:
            frozen[name].unfreeze(self._case.optimizer, num_steps)

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
        self._hot_rows = self._id_maps.hot_rows(index)
        for part in self._parts:
            part.hold(action.hot, self._hot_rows)
        looked_up = []
        for table, rows, values in self._id_maps.evicted_until(index):
            self._states[table].reset(rows, values, self._hot_rows[table])
            expected.num_evicted += len(rows)
        for rank, batch in enumerate(self._id_maps.mapped(index, self._batches(number))):
            bags = [self._pool(batch, column, rank) for column in self._columns]
            inputs, values = torch.cat(bags, 1).tanh(), self._dense.values[rank]
            net_pass = self._net.forward(values, inputs, batch.uses_shortcut)
            errors = net_pass.scores - batch.targets.to(self._noise.dtype)
            expected.scores[index, rank] = net_pass.scores
            expected.losses[index, rank] = losses_of(net_pass.scores, batch.targets)
            looked_up.append((batch, net_pass, errors.clamp(-1, 1) / self._world))
        return looked_up

    def _before_lookup(self, *, is_abandoned: bool = False) -> None:
        for part in self._parts:
            part.before_lookup(is_abandoned=is_abandoned)
        self._dense.before_lookup()

    def _train(self, index: int, action: Action, expected: Expected) -> None:
        self._before_lookup()
        totals = {
            name: torch.zeros(self._world, *state.weights[0].shape, dtype=self._noise.dtype)
            for name, state in self._states.items()
        }
        dense = torch.zeros_like(self._dense.values)
        numbers = batches_of(self._case, action)
        for number in numbers:
            looked_up = self._look_up_all(index, action, expected, number)
            grads, dense_grads = self._gradients(looked_up, 1 / len(numbers))
            for name, grad in grads.items():
                totals[name] += grad
            dense += dense_grads
        self._dense.train(dense, self._lr, self._applied.get(index))
        if self._dense.sent_whole:
            expected.sent_whole.add(index)
        for part in self._parts:
            part.train(totals, self._lr)
            if self._case.evaluates_in_step:
                part.read()

    def _gradients(
        self,
        looked_up: list[tuple[LocalBatch, NetPass, torch.Tensor]],
        share: float,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return each rank's row gradients by table, and dense ones, for a share of the loss."""
        grads = {
            name: torch.zeros(self._world, *state.weights[0].shape, dtype=self._noise.dtype)
            for name, state in self._states.items()
        }
        dense_grads = torch.zeros_like(self._dense.values)
        for rank, (batch, net_pass, grads_of_mean) in enumerate(looked_up):
            values = self._dense.values[rank]
            layer_grads, input_grads = self._net.backward(values, net_pass, grads_of_mean * share)
            dense_grads[rank, self._positions.num_trained :] = layer_grads
            input_grads = input_grads * (1 - net_pass.inputs[0].square())
            for column in self._columns:
                lookups = batch.features[column.module, column.feature]
                bags = input_grads[:, column.start : column.start + column.width]
                if self._is_left_out(column, batch):
                    bags = torch.zeros_like(bags)
                wire, hot = self._wires[column.table], self._is_hot(column.table)
                shares = self._shares(column, lookups, rank)
                rows = wire.row_gradients(bags, lookups, shares, hot)
                grads[column.table][rank].index_add_(0, lookups.ids, rows)
                of_shares = wire.share_gradients(self._weights(column, rank), bags, lookups, hot)
                key = column.module, column.feature
                self._positions.add_gradients_(dense_grads[rank], key, lookups, of_shares)
                if self._case.optimizer in ADAMS:
                    # Tells rows without a gradient from rows that nobody looked up; ranks also
                    # look up bags that no sample has.
                    ids = batch.sent[column.module, column.feature].ids
                    grads[column.table][rank][ids] += _LOOKED_UP
            for name, wire in self._wires.items():
                hot = self._is_hot(name)
                grads[name][rank] = wire.summed_gradients(grads[name][rank], hot)
        return grads, dense_grads

    def _pool(self, batch: LocalBatch, column: _Column, rank: int) -> torch.Tensor:
        lookups = batch.features[column.module, column.feature]
        is_hot = self._is_hot(column.table)
        shares = self._shares(column, lookups, rank)
        weights = self._weights(column, rank)
        bags = self._wires[column.table].bags(weights, lookups, shares, is_hot)
        return torch.zeros_like(bags) if self._is_left_out(column, batch) else bags

    def _is_left_out(self, column: _Column, batch: LocalBatch) -> bool:
        return self._case.modules[column.module].is_left_out(column.place, batch.left_out)

    def _weights(self, column: _Column, rank: int) -> torch.Tensor:
        return self._states[column.table].weights_of(self._case.mesh.group_of(rank))

    def _is_hot(self, name: str) -> torch.Tensor:
        """Return a mask of a table's rows that were hot in the last lookup."""
        is_hot = torch.zeros(self._case.tables[name].rows, dtype=torch.bool)
        is_hot[self._hot_rows[name]] = True
        return is_hot

    def _shares(self, column: _Column, lookups: Lookups, rank: int) -> torch.Tensor:
        """Return each id's row factor in its bag on a rank."""
        shares = torch.ones(lookups.ids.numel())
        module = self._case.modules[column.module]
        if module.kind == "weighted":
            shares = lookups.weights
        elif module.kind == "positions":
            key = column.module, column.feature
            shares = self._positions.of(self._dense.values[rank], key, lookups)
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
        users = [
            (index, feature)
            for index, table in enumerate(module.tables)
            for feature in table.features
        ]
        for place, (index, feature) in enumerate(users):
            width = module.tables[index].dim
            yield _Column(table_name(number, index), number, feature, start, width, place)
            start += width


def output_names(module: int, case: ModuleCase) -> list[str]:
    """Return TorchRec's names for a module's outputs: by table, then by feature."""
    users = [feature for table in case.tables for feature in table.features]
    return [
        feature_name(module, feature)
        + (f"@{table_name(module, index)}" if users.count(feature) > 1 else "")
        for index, table in enumerate(case.tables)
        for feature in table.features
    ]
