"""The oracle's tables: initial weights, rounding, and each table's and module's state."""

import copy
import itertools
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

import torchrec_2dsp as tdsp
from tests.fuzz.case import DTYPES, Case, TableCase, feature_name
from torchrec_2dsp.codecs.rows import EXACT, FloatRows
from torchrec_2dsp.plan.sync import parse_policy
from torchrec_2dsp.rows.eight_bits import decoded, encoded

LR, EPS = 0.05, 1e-2
"""``EPS`` is large enough that a gradient which cancels to rounding is no full AdaGrad step."""
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
"""The rate and the momentum by which ranks that meet move by the mean of their changes."""


def initial_tables(case: Case) -> dict[str, torch.Tensor]:
    """Return all tables' weights, in their types."""
    return {
        name: (0.3 * _normal(case, index, (table.rows, table.dim))).to(DTYPES[table.dtype])
        for index, (name, table) in enumerate(case.tables.items())
    }


def initial_positions(case: Case) -> dict[tuple[int, int], torch.Tensor]:
    """Return position weights by module and feature number."""
    positions = {}
    for number, module in enumerate(case.modules):
        for place, feature in enumerate(module.features if module.kind == "positions" else ()):
            if module.by_feature or place % 3 < 2:
                index, count = 1_200 + 100 * number + feature, case.max_length + feature % 2
                positions[number, feature] = 1 + 0.3 * _normal(case, index, (count,))
    return positions


def position_name(case: Case, module: int, feature: int) -> str:
    """Return a feature's position weights' name in the model."""
    name = feature_name(module, feature)
    by_feature = case.modules[module].by_feature
    place = f"{name}.position_weight" if by_feature else f"position_weights.{name}"
    return f"m{module}._feature_processors.{place}"


def initial_dense(case: Case) -> dict[str, torch.Tensor]:
    """Return trained position weights, then layers, by their names in the model."""
    positions = {
        position_name(case, *key): weights
        for key, weights in initial_positions(case).items()
        if case.modules[key[0]].trains_positions
    }
    return positions | {f"over.{name}": param for name, param in initial_layers(case).items()}


def initial_layers(case: Case) -> dict[str, torch.Tensor]:
    """Return the dense layers' parameters, by their names in the dense part."""
    width = sum(table.dim * len(table.features) for table in case.tables.values())
    widths = [width, *case.dense.hidden, 1]
    params = {}
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        # There is an activation between any two.
        name, index = f"layers.{2 * number}", 1_000 + 2 * number
        params[f"{name}.weight"] = 0.4 * _normal(case, index, (outputs, inputs))
        params[f"{name}.bias"] = 0.1 * _normal(case, index + 1, (outputs,))
    if case.dense.has_shortcut:
        params["shortcut.weight"] = 0.4 * _normal(case, 1_100, (1, width))
    return params


def _normal(case: Case, index: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(case.seed * 2_000 + index)
    return torch.randn(shape, generator=generator)


_SHARE_OF_ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Noise:
    """Rounding of numbers that travel; none by default."""

    dtype: torch.dtype = torch.float64
    """The type of all arithmetic."""
    signs: tuple[int, int] | None = None
    """The signs of rounding errors in neighbouring rows (of ranks, or samples) and in neighbouring
    columns. Each choice is the worst one somewhere, where others cancel."""
    rounds: bool = False
    """True if numbers that travel are really rounded, as the ranks do it."""
    nudge: float = 0.0
    """The share of its row's largest number by which a number is larger before it is rounded."""

    def rounded(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the values with the largest errors that rounding to a type can cause.

        Real rounding may be exact by chance, so it is no bound.
        """
        share = _SHARE_OF_ROUNDING[dtype]
        if self.signs is None or not share:
            return values
        return values * (1 + share * self._signs_of(values, self.signs))

    def in_8_bits(self, rows: torch.Tensor, is_exact: torch.Tensor) -> torch.Tensor:
        """Return rows as they are stored in 8 bits; ``is_exact`` ones stay exact."""
        low, high = rows.aminmax(dim=1, keepdim=True) if rows.numel() else (rows, rows)
        if self.rounds:
            nudged = rows + self.nudge * low.abs().maximum(high.abs())
            return torch.where(is_exact, rows, decoded(encoded(nudged.float())).to(rows))
        if self.signs is None:
            return rows
        # Other rows may become hot, and hot rows may cease to be.
        return rows + (high - low) / 254 * self._signs_of(rows, self.signs)

    def sent(
        self, values: torch.Tensor, transport: tdsp.Transport, width: int | None = None
    ) -> torch.Tensor:
        """Return the values as they arrive; ``width`` in a row share a scale, or the whole row."""
        width = width or values.shape[-1]
        codec = transport.codec_for(width)
        if codec == EXACT or not values.numel():
            return values
        if self.rounds:
            rows = values.reshape(-1, width)
            rows = (rows + self.nudge * rows.abs().amax(dim=1, keepdim=True)).float()
            return codec.decode(codec.encode(rows), width).view(values.shape).to(values.dtype)
        if isinstance(codec, FloatRows):
            return self.rounded(values, codec.dtype)
        if self.signs is None:
            return values
        bounds = codec.error_bound(values.float().reshape(-1, width))
        bounds = bounds[:, None].expand(-1, width).reshape(values.shape)
        come = values + bounds.to(values.dtype) * self._signs_of(values, self.signs)
        # Integers have their number's sign, or are zero.
        return torch.where(come * values > 0, come, 0.0)

    def _signs_of(self, values: torch.Tensor, signs: tuple[int, int]) -> torch.Tensor:
        pattern = torch.ones_like(values)
        pattern[1::2] *= signs[0]
        pattern[..., 1::2] *= signs[1]
        return pattern


SIGNS = ((1, 1), (-1, 1), (1, -1))
"""The sign patterns that are tried."""


ROW_WISE = ("rowwise_adagrad", "moment_scaled")
"""Optimizers with one moment for each row of a column shard."""
ADAMS = ("adam", "partial_adam")
"""Optimizers that also average gradients, and move every row that is looked up."""
BETA1, BETA2 = torch.tensor([0.9, 0.999]).tolist()
"""FBGEMM's, which are float32 numbers."""


def peers_of_first_rank(case: Case) -> list[int]:
    """Return the ranks with the same shards as the first rank, one in each group."""
    groups = [case.mesh.group_of(rank) for rank in range(case.world_size)]
    return [groups.index(group) for group in range(case.groups)]


def sends_by_host(case: Case, senders: list[int]) -> bool:
    """Tell whether senders first sum their gradients within their hosts."""
    hosts = Counter(rank // case.local_world_size for rank in senders)
    return len(hosts) > 1 and min(hosts.values()) == max(hosts.values()) > 1


class TableState:
    """A table's training state."""

    def __init__(
        self,
        case: Case,
        table: TableCase,
        weight: torch.Tensor,
        *,
        is_copied: bool,
        is_mapped: bool,
        noise: Noise,
    ) -> None:
        self._case, self._table, self._noise = case, table, noise
        self._at_random = case.at_random
        self._transport = tdsp.Transport(case.sync.transport)
        is_still = table.sharding == "data_parallel"
        self._is_sent = case.groups > 1 and not table.once and not is_still
        self._is_sent_hot = case.world_size > 1
        self._groups = [case.mesh.group_of(rank) for rank in range(case.world_size)]
        self.is_copied = is_copied
        """True if each group has a copy that it trains by itself."""
        self._is_hot = torch.zeros(table.rows, 1, dtype=torch.bool)
        if not is_mapped:
            self._is_hot[list(table.hot_rows)] = True
        if table.dtype == "int8":
            weight = self._noise.in_8_bits(weight, self._is_hot)
        self.weights = weight.expand(case.groups if is_copied else 1, -1, -1).clone()
        """The weights of each copy: ``[copies, rows, dim]``."""
        is_averaged = case.sync.kind == "weight" and is_copied
        self._moment_scale = float(case.groups) if is_averaged else 1.0
        self._begin("frozen" if table.frozen else case.optimizer)

    def _begin(self, rule: str) -> None:
        """Train by a rule from now on, with fresh moments."""
        self._rule, table = rule, self._table
        moments_per_row = {"adagrad": table.dim, "sgd": 0, "frozen": 0, "adam": table.dim}.get(
            rule, table.num_blocks
        )
        self._num_averages = table.dim if rule in ADAMS else 0
        moments_per_row += self._num_averages
        zeros = torch.zeros(len(self.weights), table.rows, moments_per_row)
        self._moments = zeros.to(self.weights)
        self._synced = (self.weights[0].clone(), self._moments[0].clone())
        self._scale = self._moment_scale if rule == "moment_scaled" else 1.0

    def unfreeze(self, rule: str) -> None:
        """Train this frozen table from now on."""
        self._table = replace(self._table, frozen=False)
        self._begin(rule)

    @property
    def has_moments(self) -> bool:
        """Tell whether its optimizer has a state."""
        return self._moments.shape[2] > 0

    def weights_of(self, group: int) -> torch.Tensor:
        return self.weights[group if self.is_copied else 0]

    def moment_columns(self) -> torch.Tensor:
        """Return the first copy's moments, one for each column: ``[rows, dim]``."""
        moments = self._moments[0][:, self._num_averages :]
        return moments.repeat_interleave(self._table.dim // moments.shape[1], dim=1)

    def copy(self) -> "TableState":
        """Return a copy of the state, which further training doesn't change."""
        other = copy.copy(self)
        other.weights, other._moments = self.weights.clone(), self._moments.clone()
        other._synced = (self._synced[0].clone(), self._synced[1].clone())
        return other

    def restore(self, other: "TableState") -> None:
        """Take over a copied state."""
        self.weights, self._moments = other.weights.clone(), other._moments.clone()
        self._synced = (other._synced[0].clone(), other._synced[1].clone())

    def reset(self, rows: torch.Tensor, values: torch.Tensor, hot: torch.Tensor) -> None:
        """Reset rows to these values on all copies; some rows are hot."""
        values = values.to(DTYPES[self._table.dtype]).to(self.weights)
        if self._table.dtype == "int8":
            values = self._noise.in_8_bits(values, torch.isin(rows, hot)[:, None])
        self.weights[:, rows] = values
        self._moments[:, rows] = 0

    def train_locally(self, grads: torch.Tensor, hot: torch.Tensor, lr: float, step: int) -> None:
        """Train each group's copy with the group's gradient, except hot rows."""
        is_cold = torch.ones(self._table.rows, dtype=torch.bool)
        is_cold[hot] = False
        num_groups = len(self.weights)
        for group in range(num_groups):
            ranks = [rank for rank, other in enumerate(self._groups) if other == group]
            # A group takes the mean over its own ranks.
            grad = num_groups * grads[ranks].sum(dim=0)
            self._apply(group, grad * is_cold[:, None], lr, step, self._scale)

    def train_merged(
        self, grads: torch.Tensor, rows: torch.Tensor, lr: float, step: int, *, is_hot: bool = False
    ) -> None:
        """Train these rows in all copies with all ranks' gradients."""
        if is_hot and self._is_sent_hot:
            grad = self._exchanged(grads, list(range(len(grads))))
        elif self._is_sent and not is_hot:
            # Groups add their own gradients before they exchange them.
            groups = torch.tensor(self._groups)
            of_groups = grads.new_zeros(max(self._groups) + 1, *grads.shape[1:])
            of_groups.index_add_(0, groups, grads)
            grad = self._exchanged(of_groups, peers_of_first_rank(self._case))
        else:
            grad = grads.sum(dim=0)
        is_trained = torch.zeros(self._table.rows, 1, dtype=torch.bool)
        is_trained[rows] = True
        grad = grad * is_trained
        for number in range(len(self.weights)):
            self._apply(number, grad, lr, step, 1.0 if is_hot else self._scale)

    def _exchanged(self, grads: torch.Tensor, senders: list[int]) -> torch.Tensor:
        """Return the sum of the senders' gradients, rounded on each hop.

        Where hosts have several senders each, a row's owner in its host sums them, hosts exchange
        these sums, and the owner gives the total to its host. Else, with more than two senders,
        an owner may send the total, where rows meet often.
        """
        width = self._table.dim // self._table.num_blocks
        arrived = self._noise.sent(grads, self._transport, width)
        if sends_by_host(self._case, senders):
            host_of = torch.tensor(senders) // self._case.local_world_size
            of_hosts = grads.new_zeros(int(host_of.max()) + 1, *grads.shape[1:])
            of_hosts.index_add_(0, host_of, arrived)
            arrived = self._noise.sent(of_hosts, self._transport, width)
        total = arrived.sum(dim=0)
        return self._noise.sent(total, self._transport, width) if len(grads) > 2 else total

    def average(self, *, weights: bool, moments: bool) -> None:
        """Replace all copies by their mean."""
        if self._rule == "frozen":
            return
        synced_weight, synced_moment = self._synced
        if weights:
            width = self._table.dim // self._table.num_blocks
            synced_weight = self._in_type(self._mean(self.weights, synced_weight, width))
            self.weights = synced_weight.expand_as(self.weights).clone()
        if moments:
            width = max(1, self._moments.shape[2] // self._table.num_blocks)
            synced_moment = self._mean(self._moments, synced_moment, width)
            self._moments = synced_moment.expand_as(self._moments).clone()
        self._synced = (synced_weight, synced_moment)

    def _mean(self, copies: torch.Tensor, synced: torch.Tensor, width: int) -> torch.Tensor:
        """Average the copies: add the mean change to the last synced values."""
        changes = self._noise.sent(copies - synced, self._transport, width)
        return synced + changes.mean(dim=0)

    def _apply(self, number: int, grad: torch.Tensor, lr: float, step: int, scale: float) -> None:
        weight, moment = self.weights[number], self._moments[number]
        if self._rule == "frozen":
            return
        before = weight.clone()
        if self._rule == "sgd":
            weight -= lr * grad
        elif self._rule == "adagrad":
            moment += grad.square()
            weight -= lr * grad / (moment.sqrt() + EPS)
        elif self._rule in ADAMS:
            self._apply_adam(weight, moment, grad, lr, step)
        else:
            blocks = moment.shape[1]
            moment += grad.reshape(grad.shape[0], blocks, -1).square().mean(dim=2)
            roots = (moment / scale).sqrt().repeat_interleave(grad.shape[1] // blocks, dim=1)
            weight -= lr * grad / (roots + EPS)
        weight = self._in_type(weight)
        if self._table.dtype == "int8":
            # Other rows aren't written.
            weight = torch.where(grad.any(dim=1, keepdim=True), weight, before)
        self.weights[number] = weight

    def _apply_adam(
        self, weight: torch.Tensor, moment: torch.Tensor, grad: torch.Tensor, lr: float, step: int
    ) -> None:
        rows = grad.any(dim=1)
        num_rows, dim = grad[rows].shape
        average, second = moment[rows, :dim], moment[rows, dim:]
        blocks = second.shape[1]
        squares = grad[rows].reshape(num_rows, blocks, dim // blocks).square().mean(dim=2)
        average = BETA1 * average + (1 - BETA1) * grad[rows]
        second = BETA2 * second + (1 - BETA2) * squares
        moment[rows] = torch.cat([average, second], dim=1)
        roots = (second / (1 - BETA2**step)).sqrt().repeat_interleave(dim // blocks, dim=1)
        weight[rows] -= lr * average / (1 - BETA1**step) / (roots + EPS)

    def _in_type(self, weights: torch.Tensor) -> torch.Tensor:
        # At random a number becomes either neighbour, which is twice as far off.
        for _ in range(1 + self._at_random):
            weights = self._noise.rounded(weights, DTYPES[self._table.dtype])
            if self._table.dtype == "int8":
                weights = self._noise.in_8_bits(weights, self._is_hot)
        return weights


Grads = Mapping[str, torch.Tensor]
"""Each table's gradients of the world's mean loss, by the rank that they come from."""


class Part:
    """Tables that share one sharded module's sync point."""

    def __init__(
        self, case: Case, tables: dict[str, TableCase], states: Mapping[str, TableState]
    ) -> None:
        self._tables = tables
        self._states = {name: states[name] for name in tables}
        sync = case.sync
        self._policy = parse_policy(sync.policy)
        self._moments_policy = parse_policy(sync.moments_policy or sync.policy)
        self._delay = sync.delay if sync.kind == "gradient" else 0
        is_repeated = case.groups > 1 and not any(table.once for table in tables.values())
        self._delays_cold = bool(self._delay) and is_repeated
        self._hot_number = 0
        self._hot_rows = {
            name: torch.tensor(table.hot_rows, dtype=torch.int64) for name, table in tables.items()
        }
        self._looks_up_again = case.modules[case.module_of(next(iter(tables)))].again
        self._num_steps = 0
        self._num_lookups = 0
        self._waiting: deque[list[tuple[str, torch.Tensor, torch.Tensor, float, int, bool]]]
        self._waiting = deque()
        """Updates by step: table, gradients, rows, learning rate, number of lookups, and whether
        they are hot."""

    @property
    def frozen(self) -> list[str]:
        """Names of its frozen tables."""
        return [name for name, table in self._tables.items() if table.frozen]

    @property
    def num_steps(self) -> int:
        """The policies' step count; 0 for frozen tables, which have no policies."""
        return 0 if self.frozen else self._num_steps

    def unfreeze(self, rule: str, num_steps: int) -> None:
        """Train its table from now on; the table's own steps count from here."""
        self._tables = {name: replace(table, frozen=False) for name, table in self._tables.items()}
        for state in self._states.values():
            state.unfreeze(rule)
        self._waiting.clear()
        self._num_steps, self._num_lookups = num_steps, 0

    def before_lookup(self, *, is_abandoned: bool = False) -> None:
        """Apply updates that may not wait past the next training lookup.

        A module with two lookups per forward counts once where its backward sums both.
        """
        self._num_lookups += 2 if is_abandoned and self._looks_up_again else 1
        while len(self._waiting) > self._delay:
            self._apply_oldest()

    def hold(self, number: int, rows: Mapping[str, torch.Tensor]) -> None:
        """Apply all updates first if a batch has other hot rows, or hot rows were chosen again."""
        own = {name: rows[name] for name in self._tables}
        is_same = all(torch.equal(own[name], held) for name, held in self._hot_rows.items())
        if any(table.hot_rows for table in self._tables.values()):
            if number != self._hot_number or not is_same:
                self.read()
            self._hot_number, self._hot_rows = number, own

    def read(self) -> None:
        """Bring the state up to date, and make copies equal."""
        while self._waiting:
            self._apply_oldest()
        for state in self._states.values():
            if state.is_copied:
                state.average(weights=True, moments=True)

    def train(self, grads: Grads, lr: float) -> None:
        """Apply the gradients of one backward, or keep them until they are due."""
        delayed, step = [], self._num_lookups
        for name, table in self._tables.items():
            state, hot = self._states[name], self._hot_rows[name]
            if state.is_copied:
                state.train_locally(grads[name], hot, lr, step)
                state.train_merged(grads[name], hot, lr, step, is_hot=True)
                continue
            is_cold = torch.ones(table.rows, dtype=torch.bool)
            is_cold[hot] = False
            cold = is_cold.nonzero().squeeze(1)
            for rows, is_hot in ((cold, False), (hot, True)):
                is_delayed = self._delay if is_hot else self._delays_cold
                update = (name, grads[name], rows, lr, step, is_hot)
                if is_delayed and table.sharding != "data_parallel":
                    delayed.append(update)
                else:
                    state.train_merged(*update[1:5], is_hot=is_hot)
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
        for name, grads, rows, lr, step, is_hot in self._waiting.popleft():
            self._states[name].train_merged(grads, rows, lr, step, is_hot=is_hot)


def parts_of_case(case: Case, states: Mapping[str, TableState]) -> list[Part]:
    parts = []
    for of_module in case.tables_by_module:
        for once in (False, True):
            tables = {name: table for name, table in of_module.items() if table.once is once}
            trained = {name: table for name, table in tables.items() if not table.frozen}
            frozen = [{name: tables[name]} for name in tables if name not in trained]
            parts += [Part(case, of_part, states) for of_part in (trained, *frozen) if of_part]
    return parts
