"""A reduce-scatter for what backends can't add: uneven batches, and numbers in 8 or 4 bits."""

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import NoWait, QuantizedCommCodec, QuantizedCommCodecs

from torchrec_2dsp._compat.shardings import parts_of_reduce_scatter
from torchrec_2dsp._compat.torchrec import (
    PooledEmbeddingsAwaitable,
    PooledEmbeddingsReduceScatter,
    get_gradient_division,
)
from torchrec_2dsp.comms.collectives import all_gather_ragged
from torchrec_2dsp.comms.row_wire import StockCodec


class UnevenReduceScatter(PooledEmbeddingsReduceScatter):
    """TorchRec's output exchange of row-wise tables, also for uneven batches on gloo.

    TorchRec's backward of an uneven reduce-scatter needs an uneven all-gather, which only NCCL
    has. No backend adds encoded rows. So parts of bags are sent to whom they are for, and added
    there. All else takes TorchRec's own path.
    """

    def forward(
        self, local_embs: torch.Tensor, input_splits: list[int] | None = None
    ) -> PooledEmbeddingsAwaitable:
        """The sum over ranks of their partial bags, each rank getting its own batch."""
        group, codecs = parts_of_reduce_scatter(self)
        num_ranks = dist.get_world_size(group)
        is_even = input_splits is None or len(set(input_splits)) == 1
        is_encoded = codecs is not None and isinstance(codecs.forward, StockCodec)
        is_known = is_even or dist.get_backend(group) == "nccl"
        # To a rank that is alone nothing travels, so nothing is encoded.
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
    """How many numbers travel for each row of ``dim``; TorchRec's codecs keep them one for one."""
    return codec.calc_quantized_size(dim) if isinstance(codec, StockCodec) else dim
