"""Input exchanges that are started twice, as TorchRec's pipelines do when attached again."""

from typing import Any

from torchrec_2dsp._compat.torchrec import KJTAllToAllSplitsAwaitable, KJTListSplitsAwaitable


def completed_input(ctx: Any, asked: KJTListSplitsAwaitable, arrived: Any) -> Any:
    """What the input exchange of a batch gives, with a context that knows all batch sizes.

    A pipeline that is attached again starts the exchange of its next batch once more, in a context
    of its own, and then looks up what the first exchange gave. Nobody waits for the second one, so
    its context lacks the sizes of the other ranks' batches, which TorchRec takes for equal sizes.

    Args:
        ctx: TorchRec's context of the batch.
        asked: what ``input_dist`` has returned for that context.
        arrived: what the pipeline has for the lookup.

    Returns:
        ``arrived`` where the context is complete, else the same ids from the second exchange.

    Collectives:
        The rest of the second exchange, on all ranks alike, if there was one.
    """
    is_incomplete = any(
        isinstance(awaitable, KJTAllToAllSplitsAwaitable) and not sharding.batch_size_per_rank
        for awaitable, sharding in zip(asked.awaitables, ctx.sharding_contexts, strict=True)
    )
    return asked.wait().wait() if is_incomplete else arrived
