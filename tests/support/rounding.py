"""The oracle of rounded exchanges: the unsharded model, with numbers rounded where they travel."""

import math
from typing import Any, cast

import torch
from torch.func import functional_call
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_2dsp as tdsp
from tests.support.loop_oracles import DelayedOracle
from tests.support.loops import make_stream, shard
from tests.support.models import tables_of
from tests.support.oracle import Oracle, local_loss
from tests.support.parity import LR, Cell, compare, make_optimizer
from torchrec_2dsp.codecs.rows import RowCodec
from torchrec_2dsp.plan.parameter_sharding import ROW_EXCHANGES, Exchange, base_type

HOT_ROWS = (("t0", (0, 1, 5)), ("t1", (0, 2)))
ROUNDING = 1e-6


class Rounded(torch.autograd.Function):
    """Rows as they come after they have travelled, and their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, codec: RowCodec, width: int) -> torch.Tensor:
        ctx.codec, ctx.width = codec, width
        return round_trip(values, codec, width)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return round_trip(grads[0], ctx.codec, ctx.width), None, None


def round_trip(values: torch.Tensor, codec: RowCodec, width: int) -> torch.Tensor:
    """Values in rows of ``width`` numbers, encoded and decoded."""
    rows = values.detach().reshape(-1, width)
    return codec.decode(codec.encode(rows), width).view(values.shape)


class RoundingOracle(Oracle):
    """Trains on the global batch, as ranks do whose rows, bags and gradients are rounded.

    With an exchange of rows each rank sees rounded rows, and sends one rounded gradient for each.
    Otherwise bags or vectors of sequences are rounded, of row-wise tables in parts, a part for
    each owner. Tables whose rows are dealt among the ranks of a host have their bags rounded once
    more, as sums of a host. A rank that is alone in a group sends nothing, and rounds nothing.
    """

    def __init__(
        self, cell: Cell, plan: tdsp.Plan2D, *, local_world_size: int, **kwargs: Any
    ) -> None:
        """Take the codec and the shard widths from a cell and its plan.

        Args:
            cell: the trained cell; its bags are summed.
            plan: the cell's plan.
            local_world_size: how many ranks share a host.
            kwargs: passed to `Oracle`.
        """
        super().__init__(cell.spec, **kwargs)
        (module,) = (part for _, part in plan.modules())
        self._tables = dict(module.tables())
        self._codec = tdsp.Transport(cell.transport).codec
        self._by_row = Exchange(cell.exchange) in ROW_EXCHANGES
        widths = [shard.shard_sizes[1] for name in self._tables for shard in self._shards(name)]
        self._width = math.gcd(*widths)
        self._hot = {name: list(rows) for name, rows in cell.hot_rows}
        self._sends, self._num_hosts = cell.mesh.group_size > 1, 1
        if base_type(cell.sharding) in ("table_row_wise", "grid_shard"):
            host_size = cell.mesh.node_group_size(local_world_size)
            self._sends = host_size > 1
            self._num_hosts = cell.mesh.group_size // host_size

    def scores(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        weights = {name: cast(Any, table).weight for name, table in tables_of(self.model).items()}
        if self._by_row:
            rounded = {name: self._rounded_rows(name, weight) for name, weight in weights.items()}
            outputs = self._outputs_of(rounded, batch)
        else:
            parts = [
                {
                    name: self._rounded(part) if self._sends else part
                    for name, part in self._outputs_of(of_owner, batch).items()
                }
                for of_owner in self._by_owner(weights)
            ]
            outputs: dict[str, Any] = {name: sum(part[name] for part in parts) for name in parts[0]}
            if self._num_hosts > 1:
                outputs = {name: self._rounded(bags) for name, bags in outputs.items()}
        return self._over(outputs, batch)

    def _rounded_rows(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        rounded: torch.Tensor = Rounded.apply(weight, self._codec, weight.shape[1])  # pyright: ignore
        is_hot = torch.zeros(len(weight), 1, dtype=torch.bool)
        is_hot[self._hot.get(name, [])] = True
        return torch.where(is_hot, weight, rounded)

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        return Rounded.apply(values, self._codec, self._width)  # pyright: ignore

    def _shards(self, name: str) -> list[Any]:
        return cast(Any, self._tables[name].sharding_spec).shards

    def _by_owner(self, weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Return the tables as each row owner sees them, with zeros for others' rows."""
        starts = {name: self._starts(name) for name in weights}
        by_owner = []
        for owner in range(max(map(len, starts.values()))):
            part = {}
            for name, weight in weights.items():
                start, stop = [*starts[name], len(weight)][owner : owner + 2]
                is_own = torch.zeros(len(weight), 1, dtype=torch.bool)
                is_own[start:stop] = True
                part[name] = torch.where(is_own, weight, 0.0)
            by_owner.append(part)
        return by_owner

    def _starts(self, name: str) -> list[int]:
        """Return the first row of each part that a table's rows are dealt in."""
        return sorted({shard.shard_offsets[0] for shard in self._shards(name)})

    def _outputs_of(
        self, weights: dict[str, torch.Tensor], batch: KeyedJaggedTensor
    ) -> dict[str, torch.Tensor]:
        """Return each feature's output: bags, or its sequences' vectors."""
        is_bags = hasattr(self.model, "ebc")
        module = cast(Any, self.model.ebc if is_bags else cast(Any, self.model).ec)
        path = "embedding_bags" if is_bags else "embeddings"
        named = {f"{path}.{name}.weight": weight for name, weight in weights.items()}
        outputs = functional_call(module, named, (batch,))
        return {
            name: outputs[name] if is_bags else outputs[name].values()
            for name in self.model.features
        }

    def _over(self, outputs: dict[str, Any], batch: KeyedJaggedTensor) -> torch.Tensor:
        """Run the model's dense part over outputs by feature."""
        if hasattr(self.model, "ebc"):
            joined = torch.cat([outputs[name] for name in self.model.features], dim=1)
            return self.model.over(joined).squeeze(1)
        parts = []
        for name in self.model.features:
            lengths = batch[name].lengths()
            sample = torch.arange(lengths.numel()).repeat_interleave(lengths)
            total = outputs[name].new_zeros(lengths.numel(), outputs[name].shape[1])
            parts.append(total.index_add(0, sample, outputs[name].tanh()))
        return self.model.over(torch.cat(parts, dim=1)).squeeze(1)


def train_late(rank: int, world_size: int, cells: list[Cell]) -> list[tuple[float, float, float]]:
    """Gaps to the late oracle, of losses and at the end; and how far tables have moved."""
    gaps = []
    for cell in cells:
        parallel, stream = shard(cell), make_stream(cell, 6)
        oracle = DelayedOracle(cell.spec, optimizer=cell.optimizer, lr=LR, eps=cell.eps)
        optimizer, loss_gap = make_optimizer(parallel), 0.0
        for batches in stream:
            optimizer.zero_grad()
            loss = local_loss(parallel(batches[rank]))
            loss.backward()
            optimizer.step()
            expected = oracle.step(batches)[rank]
            loss_gap = max(loss_gap, abs(loss.item() - expected) / (1 + expected))
        oracle.finish()
        gaps.append((loss_gap, compare(parallel, oracle).worst, largest_change(cell, oracle)))
    return gaps


def largest_change(cell: Cell, oracle: DelayedOracle) -> float:
    """Return the largest change of any table."""
    start = DelayedOracle(cell.spec, optimizer=cell.optimizer, lr=LR)
    return max(
        (weight - start.weights[name]).abs().max().item() for name, weight in oracle.weights.items()
    )
