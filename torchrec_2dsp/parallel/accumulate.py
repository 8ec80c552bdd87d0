"""`accumulate`: one update of several batches, in the tables as in the dense part."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TypeVar

from torch import nn

from torchrec_2dsp._compat.ddp import data_parallel_parts, has_synced
from torchrec_2dsp.comms.alarm import agreeing
from torchrec_2dsp.comms.groups import world_group
from torchrec_2dsp.comms.notice_board import naming_faults
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.shard.parted import sharded_tables

T = TypeVar("T")


def accumulate(model: nn.Module, batches: Iterable[T]) -> Iterator[T]:
    """Give batches to train by, whose gradients make one update together.

    TorchRec's fused optimizers update tables in each backward. Here row gradients wait until the
    last batch, and a row gets one update by the sum of them all, as it does in a step on one large
    batch: with AdaGrad or Adam that is something else than an update for each batch. Dense
    gradients are added up over the ranks after the last batch alone.

    Example::

        sharders = [tdsp.EmbeddingBagCollectionSharder2D(optimizer, accumulates=True)]
        ...
        optimizer.zero_grad()
        for batch in tdsp.accumulate(model, batches):
            loss = model(batch) / len(batches)
            loss.backward()
        optimizer.step()

    Args:
        model: sharded by this package's sharders, in `ModelParallel2D` or TorchRec's wrapper.
        batches: of one step, as many on each rank.

    Raises:
        ConfigError: there are no batches, other ranks have more or fewer, the tables are updated in
            the backward, or another call isn't over.

    Collectives:
        An agreement of all ranks.
    """
    batches = list(batches)
    tables = sharded_tables(model)
    with agreeing(world_group()) as facts:
        if not batches:
            raise ConfigError("accumulate() got no batches, so there is nothing to update by")
        if any(part.sync_point.is_held for part in tables):
            raise ConfigError(
                "another accumulate() of this model isn't over, so its tables would never be "
                "updated; let its loop end, or close() it"
            )
        if not all(part.sync_point.can_hold for part in tables):
            raise ConfigError(
                "tables are updated in the backward of each batch; make their sharder with "
                "accumulates=True, or replicas with GradientSync()"
            )
        facts["the number of batches of accumulate()"] = str(len(batches))
    *waiting, last = batches
    with ExitStack() as tables_held:
        for part in tables if waiting else []:
            with naming_faults(part.groups.board, "accumulate()"):
                for stage in part.stages:
                    stage.before_accumulating()
                part.sync_point.hold()
            tables_held.callback(part.sync_point.release)
        with ExitStack() as dense_held:
            for ddp in data_parallel_parts(model):
                # In its first backward DDP learns the graph; adding up each time gives the same.
                if has_synced(ddp):
                    dense_held.enter_context(ddp.no_sync())
            yield from waiting
        # The lookup of the last batch would sync, too.
        yield last
