"""Codecs from the plan or the user, under TorchRec's names, and the exchange for encoded bags."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import (
    CommOp,
    NoWait,
    QuantizedCommCodec,
    QuantizedCommCodecs,
    ShardingType,
)
from torchrec.modules.embedding_configs import PoolingType

from torchrec_2dsp._compat.shardings import parts_of_reduce_scatter
from torchrec_2dsp._compat.torchrec import (
    PooledEmbeddingsAwaitable,
    PooledEmbeddingsReduceScatter,
    get_gradient_division,
)
from torchrec_2dsp.codecs.rows import Transport
from torchrec_2dsp.comms.collectives import all_gather_ragged
from torchrec_2dsp.comms.row_wire import StockCodec, stock_codecs
from torchrec_2dsp.errors import UnsupportedError
from torchrec_2dsp.plan.parameter_sharding import Exchange, TableType

_OPERATIONS = (
    CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
    CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER,
    CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
)

_SUMMED = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)
"""The types whose output exchange adds partial bags."""


def codecs_registry(
    kind: TableType, sharding_infos: Sequence[Any], registry: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return a sharding's codecs by TorchRec's names: the plan's, or else the user's.

    Shards of different widths travel in one tensor, so a scale covers the widths' greatest common
    divisor of columns.
    """
    if kind.transport is Transport.FP32:
        _check_packing(kind, sharding_infos, pack_size(registry))
        return registry
    widths = shard_widths(info.param_sharding for info in sharding_infos)
    codecs = stock_codecs(kind.transport, math.gcd(*widths))
    return dict.fromkeys((operation.name for operation in _OPERATIONS), codecs)


def pack_size(registry: dict[str, Any] | None) -> int:
    """Return how many numbers the user's codecs encode together, as TorchRec's INT8 codec does."""
    pairs = (registry or {}).values()
    return max(
        (_pack_size(codec) for pair in pairs for codec in (pair.forward, pair.backward)), default=1
    )


def _pack_size(codec: Any) -> int:
    context = codec.create_context()
    try:
        codec.calc_quantized_size(1, context)
    except (AssertionError, RuntimeError):
        return context.row_dim
    return 1


def shard_widths(shardings: Iterable[Any]) -> list[int]:
    """Return each shard's column count, given the tables' parameter shardings."""
    specs = [sharding.sharding_spec for sharding in shardings]
    return [shard.shard_sizes[1] for spec in specs if spec for shard in spec.shards]


def _check_packing(kind: TableType, sharding_infos: Sequence[Any], size: int) -> None:
    """Refuse codecs with which TorchRec's exchange fails for this type."""
    if size == 1:
        return
    table = sharding_infos[0].embedding_config
    widths = shard_widths(info.param_sharding for info in sharding_infos)
    is_pooled = kind.exchange is Exchange.POOLED and table.pooling is not PoolingType.NONE
    if is_pooled and kind.base in _SUMMED:
        raise UnsupportedError(
            f"table {table.name!r} is {kind.base.value}, whose bags TorchRec can't add in packs of "
            f"{size} numbers (as by INT8); leave out the codecs and plan with precision=['int8']"
        )
    if not is_pooled and math.gcd(*widths) % size:
        raise UnsupportedError(
            f"the rows of table {table.name!r} don't fill packs of {size} numbers, in which the "
            "codecs (such as TorchRec's INT8) encode; leave them out and plan with "
            "precision=['int8']"
        )


def codecs_by_dim(
    kind: TableType, registry: dict[str, Any] | None
) -> Callable[[int], QuantizedCommCodecs | None]:
    """Return a function from a row's dim to its codecs: the plan's, or else the user's."""
    if kind.transport is not Transport.FP32:
        return lambda dim: stock_codecs(kind.transport, dim)
    of_user = (registry or {}).get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name)
    return lambda dim: of_user


class UnevenReduceScatter(PooledEmbeddingsReduceScatter):
    """TorchRec's output exchange for row-wise tables, which also supports uneven batches on gloo.

    In the backward, TorchRec's uneven reduce-scatter needs an uneven all-gather, which only NCCL
    has, and no backend adds encoded rows. So partial bags are sent to their ranks and added there.
    Everything else takes TorchRec's own path.
    """

    def forward(
        self, local_embs: torch.Tensor, input_splits: list[int] | None = None
    ) -> PooledEmbeddingsAwaitable:
        """Sum partial bags over ranks; each rank gets its own batch."""
        group, codecs = parts_of_reduce_scatter(self)
        num_ranks = dist.get_world_size(group)
        is_even = input_splits is None or len(set(input_splits)) == 1
        is_encoded = codecs is not None and isinstance(codecs.forward, StockCodec)
        is_known = is_even or dist.get_backend(group) == "nccl"
        # With a single rank nothing travels, so nothing is encoded.
        if num_ranks == 1 or (is_known and not is_encoded):
            return super().forward(local_embs, input_splits)
        if input_splits is None:
            input_splits = [len(local_embs) // num_ranks] * num_ranks
        pooled = _ReduceScatterRagged.apply(local_embs, input_splits, group, codecs)
        return PooledEmbeddingsAwaitable(tensor_awaitable=NoWait(pooled))


class _ReduceScatterRagged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        partial: torch.Tensor,
        splits: list[int],
        group: dist.ProcessGroup,
        codecs: QuantizedCommCodecs | None,
    ) -> torch.Tensor:
        ctx.splits, ctx.group, ctx.codecs = splits, group, codecs
        world_size, dim = dist.get_world_size(group), partial.shape[1]
        own = splits[dist.get_rank(group)]
        sent = partial if codecs is None else codecs.forward.encode(partial)
        sent = sent.view(len(partial), _width(dim, codecs and codecs.forward))
        received = sent.new_empty((world_size * own, sent.shape[1]))
        dist.all_to_all_single(
            received,
            sent.contiguous(),
            output_split_sizes=[own] * world_size,
            input_split_sizes=splits,
            group=group,
        )
        received = received if codecs is None else codecs.forward.decode(received)
        return received.view(world_size, own, dim).sum(dim=0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        grad = grad_outputs[0].contiguous()
        num_bags, dim = grad.shape
        grad = grad if ctx.codecs is None else ctx.codecs.backward.encode(grad)
        grad = grad.view(num_bags, _width(dim, ctx.codecs and ctx.codecs.backward))
        gathered = torch.cat(all_gather_ragged(grad, ctx.splits, ctx.group))
        gathered = gathered if ctx.codecs is None else ctx.codecs.backward.decode(gathered)
        gathered = gathered.view(sum(ctx.splits), dim)
        if get_gradient_division():
            gathered = gathered / dist.get_world_size(ctx.group)
        return gathered, None, None, None


def _width(dim: int, codec: QuantizedCommCodec[Any] | None) -> int:
    """Return how many numbers travel per row; TorchRec's codecs don't change the count."""
    return codec.calc_quantized_size(dim) if isinstance(codec, StockCodec) else dim
