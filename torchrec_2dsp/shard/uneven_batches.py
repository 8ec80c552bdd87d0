"""A reduce-scatter for ranks with batches of different size, on backends that have none."""

from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import NoWait, QuantizedCommCodecs

from torchrec_2dsp._compat.torchrec import (
    PooledEmbeddingsAwaitable,
    PooledEmbeddingsReduceScatter,
    get_gradient_division,
)
from torchrec_2dsp.comms.collectives import all_gather_ragged


class UnevenReduceScatter(PooledEmbeddingsReduceScatter):
    """TorchRec's output exchange of row-wise tables, also for uneven batches on gloo.

    TorchRec's backward of an uneven reduce-scatter needs an uneven all-gather, which only NCCL
    has. Even batches take TorchRec's own path.
    """

    def forward(
        self, local_embs: torch.Tensor, input_splits: list[int] | None = None
    ) -> PooledEmbeddingsAwaitable:
        """The sum over ranks of their partial bags, each rank getting its own batch."""
        even = input_splits is None or len(set(input_splits)) == 1
        if even or dist.get_backend(self._pg) == "nccl":
            return super().forward(local_embs, input_splits)
        pooled = _ReduceScatterRagged.apply(local_embs, input_splits, self._pg, self._codecs)
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
        received = sent.new_empty((world_size * own, dim))
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
        grad = grad if ctx.codecs is None else ctx.codecs.backward.encode(grad)
        gathered = torch.cat(all_gather_ragged(grad, ctx.splits, ctx.group))
        gathered = gathered if ctx.codecs is None else ctx.codecs.backward.decode(gathered)
        if get_gradient_division():
            gathered = gathered / dist.get_world_size(ctx.group)
        return gathered, None, None, None
