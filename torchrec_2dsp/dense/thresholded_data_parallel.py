"""`ThresholdedDataParallel`: DDP that sends only the largest gradient elements.

Data-parallel tables send the rows that a batch touches: all ranks exchange their row counts, then
each sends its rows, and all compute the same sum. Where that is more than an all-reduce, it is one.
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
from torchrec_2dsp.dense.dense_parts import ddp_params, group_of, have_gradients
from torchrec_2dsp.dense.gradient_sums import GradientReport, GradientRoute, all_reduce, done
from torchrec_2dsp.dense.thresholded_gradients import ThresholdedGradients, ThresholdSettings
from torchrec_2dsp.errors import ConfigError

_NUMBER_BYTES = 4


class TableSize(NamedTuple):
    """A data-parallel table's size."""

    num_rows: int
    dim: int


class TableGradients:
    """A DDP hook that averages data-parallel tables' gradients by the rows that ranks touch.

    Results equal an all-reduce's, up to the order in which ranks are added.
    """

    def __init__(self, tables: Mapping[int, Sequence[TableSize]], group: dist.ProcessGroup) -> None:
        self._tables, self._group = tables, group
        self._num_ranks = dist.get_world_size(group)
        self.total = GradientReport()

    def reduce(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Replace a bucket's gradients by their mean over the ranks; DDP calls it.

        Collectives:
            One 8-byte all-gather per table, waited for; then a gather of rows, or an
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
            return all_reduce(buffer.div_(self._num_ranks), self._group)
        if capacity == 0:
            # No rank has touched a row, so the gradients of all are zero, and nothing is sent.
            return done(buffer)
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
        """Yield each table's gradients as a view of the bucket."""
        start = 0
        for param in bucket.parameters():
            for num_rows, dim in self._tables[id(param)]:
                size = num_rows * dim
                yield bucket.buffer()[start : start + size].view(num_rows, dim)
                start += size

    def _gather_counts(
        self, touched: Sequence[torch.Tensor], device: torch.device
    ) -> list[list[int]]:
        own = torch.tensor([rows.numel() for rows in touched], device=device)
        counts = own.new_empty(self._num_ranks * own.numel())
        dist.all_gather_into_tensor(counts, own, group=self._group)
        return counts.view(self._num_ranks, -1).tolist()


@dataclass(frozen=True)
class _MessageForm:
    """The layout of a rank's message: row numbers by table, then their gradients."""

    dims: Sequence[int]
    dtype: torch.dtype

    def num_bytes(self, counts: Sequence[int]) -> int:
        """Return a message's size for so many rows of each table."""
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
        """Write each table's rows and gradients."""
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
        """Read each table's rows and gradients."""
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
    """Runs the dense part in DDP and sends its largest gradient elements.

    What isn't sent stays in a *residual* and is added to the next step's gradients: nothing is
    lost, but it comes late. Weights stay equal on all ranks, bit for bit. Training isn't exact:
    compare its quality with DDP's. Data-parallel tables send the rows that a batch touches,
    exactly.

    Args:
        density: share of each parameter's elements that a step sends, above 0; 1 sends all, by
            DDP's own arithmetic.
        warm_up: first steps that are dense.
        values: wire format of the elements: fp32, bf16, fp16, int8 or int4.
        refresh: interval in steps at which thresholds are measured. 1 sends about the share
            asked for, more often sends less.
        exact_thresholds: measure thresholds with all elements rather than a sample.
        dense_below: parameters with fewer elements are sent whole.
        route: "gather", "owners", "dense", or "auto" for the one that sends least.
        bucket_cap_mb: DDP's bucket size.
        static_graph: as in DDP.
        find_unused_parameters: as in DDP.

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
        """Wrap the dense part; TorchRec calls it.

        Collectives:
            An agreement on the settings, and DDP's parameter broadcast.
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
        self._params = list(ddp_params(ddp).values())
        ddp.register_comm_hook(None, self._gradients.reduce)
        ddp.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: nn.Module, _: tuple[Any, ...]) -> None:
        """Tell a step's first batch from those that add to it."""
        if module.training and torch.is_grad_enabled():
            assert self._gradients is not None
            self._gradients.begin_batch(is_first=not have_gradients(self._params))

    @property
    def total(self) -> GradientReport:
        """Everything that this rank has sent so far, data-parallel tables included."""
        parts = [*self._tables, *([self._gradients] if self._gradients else [])]
        return sum((part.total for part in parts), GradientReport())

    def residual_norm(self) -> float:
        """Return the Euclidean norm over this rank's residuals."""
        return self._gradients.residual_norm() if self._gradients else 0.0

    def flush(self) -> None:
        """Let the next step be dense, residuals included.

        If a rank calls it, all ranks do so. Afterwards no residual is left: for a checkpoint
        without a `TrainState`, or for the end of the training.
        """
        if self._gradients:
            self._gradients.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals and thresholds; a `TrainState` stores them."""
        return self._gradients.state_dict() if self._gradients else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's state."""
        self.load_rank_states([state])

    def load_rank_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over several ranks' summed residuals; there may be none."""
        if self._gradients:
            self._gradients.load_rank_states([state for state in states if state])


def _check(is_right: bool, message: str) -> None:
    if not is_right:
        raise ConfigError(f"ThresholdedDataParallel: {message}")


def _check_count(name: str, value: object, least: int) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _check(is_count, f"{name}={value!r} is no count; use {least} or more")
