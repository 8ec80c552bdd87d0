"""Input exchanges that are started twice, as TorchRec's pipelines do when attached again."""

from typing import Any

from torchrec_2dsp._compat.torchrec import KJTAllToAllSplitsAwaitable
from torchrec_2dsp.shard.batch.notes import BatchNotes


def completed_input(notes: BatchNotes, arrived: Any) -> Any:
    """What the input exchange of a batch gives, with contexts that know all batch sizes.

    A pipeline that is attached again starts the exchange of its next batch once more, in a context
    of its own, and then looks up what the first exchange gave. Nobody waits for the second one, so
    its context lacks the sizes of the other ranks' batches, which TorchRec takes for equal sizes.

    Args:
        notes: of the batch.
        arrived: what the pipeline has for the lookup.

    Returns:
        ``arrived`` where the context is complete, else the same ids from the second exchange.

    Collectives:
        The rest of the second exchange, on all ranks alike, if there was one.
    """
    is_incomplete = any(
        isinstance(awaitable, KJTAllToAllSplitsAwaitable)
        and context is not None
        and not context.batch_size_per_rank
        for awaitable, context in zip(notes.asked.awaitables, notes.shardings, strict=True)
    )
    return notes.asked.wait().wait() if is_incomplete else arrived
