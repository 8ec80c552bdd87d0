"""`TableGradients`: a hook of DDP's for data-parallel tables, of which a batch touches few rows.

Every rank has the gradient of a whole table, and most of its rows are zero. For each bucket: all
ranks tell each other how many rows they have touched; then each sends these, and all add up the
same. Where that would be more than an all-reduce, it is an all-reduce.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardingEnv

from torchrec_2dsp._compat.ddp import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    data_parallel_module,
    data_parallel_tables,
)
from torchrec_2dsp.codecs.rows import FlatCodec, Transport
from torchrec_2dsp.codecs.sparse import ThresholdRule
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.dense.dense_parts import group_of
from torchrec_2dsp.dense.gradient_sums import GradientReport, GradientRoute
from torchrec_2dsp.dense.thresholded_gradients import ThresholdedGradients, ThresholdSettings
from torchrec_2dsp.errors import ConfigError

_NUMBER_BYTES = 4
"""Rows travel with their numbers in int32."""


class TableSize(NamedTuple):
    """The size of a data-parallel table."""

    num_rows: int
    dim: int


class TableGradients:
    """Means of the gradients of data-parallel tables over all ranks, by the rows they touch.

    The numbers are those of an all-reduce, up to the order in which ranks are added.
    """

    def __init__(self, tables: Mapping[int, Sequence[TableSize]], group: dist.ProcessGroup) -> None:
        self._tables, self._group = tables, group
        self._num_ranks = dist.get_world_size(group)
        self.total = GradientReport()
        """What this rank has sent so far."""

    def reduce(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Replace the gradients of a bucket by their mean over the ranks; DDP calls it.

        Collectives:
            One all-gather of 8 bytes for each table, waited for; then an all-gather of rows, or an
            all-reduce, not waited for.
        """
        buffer = bucket.buffer()
        tables = list(self._split(bucket))
        touched = [table.any(dim=1).nonzero().view(-1) for table in tables]
        counts = self._gather_counts(touched, buffer.device)
        message = _MessageForm([table.shape[1] for table in tables], buffer.dtype)
        capacity = max(message.num_bytes(of_rank) for of_rank in counts)
        gathered_bytes = float((self._num_ranks - 1) * capacity)
        dense_bytes = 2.0 * (self._num_ranks - 1) / self._num_ranks * buffer.nbytes
        self.total += GradientReport(
            num_bytes=min(gathered_bytes, dense_bytes), dense_bytes=dense_bytes
        )
        if dense_bytes <= gathered_bytes:
            work = dist.all_reduce(buffer.div_(self._num_ranks), group=self._group, async_op=True)
            assert work is not None
            return work.get_future().then(lambda future: future.value()[0])
        if capacity == 0:
            # No rank has touched a row, so the gradients of all are zero, and nothing is sent.
            untouched: torch.futures.Future[torch.Tensor] = torch.futures.Future(
                devices=[buffer.device] if buffer.is_cuda else None
            )
            untouched.set_result(buffer)
            return untouched
        own = buffer.new_empty(capacity, dtype=torch.uint8)
        message.write(
            own, [(rows, table[rows]) for rows, table in zip(touched, tables, strict=True)]
        )
        received = own.new_empty(self._num_ranks * capacity)
        work = dist.all_gather_into_tensor(received, own, group=self._group, async_op=True)
        assert work is not None

        def add_up(arrived: torch.futures.Future[object]) -> torch.Tensor:
            arrived.wait()
            buffer.zero_()
            # In the order of ranks, so that all ranks compute the same bits.
            for of_rank, sent in zip(counts, received.split(capacity), strict=True):
                parts = message.read(sent, of_rank)
                for table, (rows, gradients) in zip(tables, parts, strict=True):
                    table.index_add_(0, rows, gradients / self._num_ranks)
            return buffer

        return work.get_future().then(add_up)

    def _split(self, bucket: dist.GradBucket) -> Iterator[torch.Tensor]:
        """The gradients of a bucket by table, as its own memory, a row for each row of a table."""
        start = 0
        for param in bucket.parameters():
            for num_rows, dim in self._tables[id(param)]:
                size = num_rows * dim
                yield bucket.buffer()[start : start + size].view(num_rows, dim)
                start += size

    def _gather_counts(
        self, touched: Sequence[torch.Tensor], device: torch.device
    ) -> list[list[int]]:
        """How many rows of each table each rank has touched."""
        own = torch.tensor([rows.numel() for rows in touched], device=device)
        counts = own.new_empty(self._num_ranks * own.numel())
        dist.all_gather_into_tensor(counts, own, group=self._group)
        return counts.view(self._num_ranks, -1).tolist()


@dataclass(frozen=True)
class _MessageForm:
    """The form of a rank's message: the numbers of its rows by table, then their gradients."""

    dims: Sequence[int]
    """The columns of each table."""

    dtype: torch.dtype
    """The type of gradients."""

    def num_bytes(self, counts: Sequence[int]) -> int:
        """How long a message with so many rows of each table is."""
        size = self.dtype.itemsize
        own = sum(
            count * (_NUMBER_BYTES + dim * size)
            for count, dim in zip(counts, self.dims, strict=True)
        )
        # Ranks' messages are read in place, one after the other.
        return -(-own // 8) * 8

    def write(
        self, message: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Write rows, and their gradients, of each table."""
        start = 0
        numbers = [rows.int() for rows, _ in parts]
        for piece in (*numbers, *(gradients for _, gradients in parts)):
            piece_bytes = piece.contiguous().view(-1).view(torch.uint8)
            message[start : start + piece_bytes.numel()] = piece_bytes
            start += piece_bytes.numel()
        message[start:] = 0

    def read(
        self, message: torch.Tensor, counts: Sequence[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Rows, and their gradients, of each table."""
        numbers_end = _NUMBER_BYTES * sum(counts)
        numbers = message[:numbers_end].view(torch.int32).split(list(counts))
        parts, start = [], numbers_end
        for rows, count, dim in zip(numbers, counts, self.dims, strict=True):
            end = start + count * dim * self.dtype.itemsize
            parts.append((rows, message[start:end].view(self.dtype).view(count, dim)))
            start = end
        return parts


_AUTO = "auto"


class ThresholdedDataParallel(DataParallelWrapper):
    """Runs what isn't sharded in DDP, and sends the largest elements of its gradients.

    What isn't sent is kept in a *residual* and added to the gradients of the next step. So nothing
    is lost, and all of it comes late. Weights stay equal on all ranks, bit for bit. Training isn't
    exact: compare its quality with DDP's.

    A stock `DistributedModelParallel` takes it as well as `ModelParallel2D`. Of data-parallel
    tables the rows that a batch touches are sent, all and exactly.

    Example::

        dense = tdsp.ThresholdedDataParallel(density=0.005, warm_up=500)
        model = tdsp.ModelParallel2D(
            model, plan=plan, sharders=sharders, data_parallel_wrapper=dense
        )

    Reference: V. Gupta et al., Training recommender systems at scale: communication-efficient
    model and data parallelism, KDD 2021.
    """

    def __init__(
        self,
        density: float = 0.005,
        *,
        warm_up: int = 0,
        values: Transport | str = Transport.BF16,
        refresh: int = 1,
        exact_thresholds: bool = False,
        dense_below: int = 1_024,
        route: GradientRoute | str = _AUTO,
        bucket_cap_mb: int = 25,
        static_graph: bool = True,
        find_unused_parameters: bool = False,
    ) -> None:
        """
        Args:
            density: the share of each parameter's elements that is sent in a step, above 0; with 1
                all are, by DDP's own arithmetic.
            warm_up: how many first steps are dense.
            values: how the elements that are sent travel: fp32, bf16, fp16, int8 or int4.
            refresh: every so many steps thresholds are measured. With 1, about as much is sent as
                asked; with more, often less.
            exact_thresholds: whether thresholds are measured with all elements, not with a sample.
            dense_below: parameters with fewer elements are sent as a whole.
            route: how sums are made: "gather", "owners", "dense", or "auto" for the one that sends
                least.
            bucket_cap_mb: the size of DDP's buckets.
            static_graph: as in DDP.
            find_unused_parameters: as in DDP.
        """
        _check(0 < density <= 1, f"density={density!r} is no share; use one above 0, at most 1")
        _check_count("warm_up", warm_up, 0)
        _check_count("refresh", refresh, 1)
        _check_count("dense_below", dense_below, 0)
        names = [way.value for way in Transport]
        _check(values in names, f"values={values!r} is no transport; use one of {', '.join(names)}")
        routes = [way.value for way in GradientRoute]
        _check(
            route == _AUTO or route in routes,
            f"route={route!r} is unknown; use one of {', '.join([_AUTO, *routes])}",
        )
        self._settings = ThresholdSettings(
            density=float(density),
            warm_up=warm_up,
            dense_below=dense_below,
            values=FlatCodec(Transport(values).codec),
            rule=ThresholdRule(refresh=refresh, is_exact=exact_thresholds),
            route=None if route == _AUTO else GradientRoute(route),
        )
        self._wrapper = DefaultDataParallelWrapper(
            bucket_cap_mb=bucket_cap_mb,
            static_graph=static_graph,
            find_unused_parameters=find_unused_parameters,
        )
        self._gradients: ThresholdedGradients | None = None
        self._tables: list[TableGradients] = []
        self._params: list[nn.Parameter] = []

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wrap what isn't sharded; TorchRec calls it.

        Collectives:
            An agreement of all ranks on the settings, and DDP's broadcast of parameters.
        """
        group = group_of(env)
        with agreeing(group) as facts:
            _check(
                self._gradients is None,
                "this ThresholdedDataParallel has a model already; make another one, because it "
                "keeps that model's residuals",
            )
            facts["the settings of ThresholdedDataParallel"] = str(self._settings)
        self._wrapper.wrap(dmp, env, device)
        for tables, sizes in data_parallel_tables(dmp):
            by_parameter = {
                parameter: [TableSize(*size) for size in of_parameter]
                for parameter, of_parameter in sizes.items()
            }
            self._tables.append(TableGradients(by_parameter, tables.process_group or group))
            tables.register_comm_hook(None, self._tables[-1].reduce)
        ddp = data_parallel_module(dmp)
        if ddp is None:
            return
        names = {id(param): name for name, param in ddp.module.named_parameters()}
        self._gradients = ThresholdedGradients(self._settings, names, group)
        self._params = [
            param
            for name, param in ddp.module.named_parameters()
            if param.requires_grad and name not in ddp.parameters_to_ignore
        ]
        ddp.register_comm_hook(None, self._gradients.reduce)
        ddp.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, _: tuple[Any, ...]) -> None:
        """Tell the first batch of a step from those whose gradients are added to its own."""
        if module.training and torch.is_grad_enabled():
            assert self._gradients is not None
            grads = [param.grad for param in self._params]
            is_first = not any(grad is not None and grad.any() for grad in grads)
            self._gradients.begin_batch(is_first=is_first)

    @property
    def total(self) -> GradientReport:
        """What this rank has sent so far, rows of data-parallel tables included."""
        parts = [*self._tables, *([self._gradients] if self._gradients else [])]
        return sum((part.total for part in parts), GradientReport())

    def residual_norm(self) -> float:
        """The Euclidean norm of this rank's residuals."""
        return self._gradients.residual_norm() if self._gradients else 0.0

    def flush(self) -> None:
        """Let the next step be dense, and take along what earlier ones have left out.

        If a rank calls it, all ranks do so. Afterwards nothing is left out: for a checkpoint
        without a `TrainState`, or for the end of the training.
        """
        if self._gradients:
            self._gradients.flush()

    def state_dict(self) -> dict[str, Any]:
        """The residuals and thresholds of this rank; a `TrainState` stores them by itself."""
        return self._gradients.state_dict() if self._gradients else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of this rank."""
        self.load_rank_states([state])

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over the sum of the residuals of several ranks; there may be none."""
        if self._gradients:
            self._gradients.load_rank_states([state for state in states if state])


def _check(is_right: bool, message: str) -> None:
    if not is_right:
        raise ConfigError(f"ThresholdedDataParallel: {message}")


def _check_count(name: str, value: object, least: int) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _check(is_count, f"{name}={value!r} is no count; use {least} or more")
