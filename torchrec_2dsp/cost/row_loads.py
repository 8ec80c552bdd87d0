"""The loads that a table with row exchange adds to its group. Pure."""

from torchrec_2dsp.cost.loads import Loads, Ranks
from torchrec_2dsp.cost.placed import (
    FLOAT_BYTES,
    KEY_BYTES,
    Placed,
    TableBatch,
    distinct_by_owner,
    encode_and_decode,
    move_and_add,
)
from torchrec_2dsp.cost.span import Span
from torchrec_2dsp.cost.workload import Workload
from torchrec_2dsp.plan.parameter_sharding import Exchange


def add_row_exchange(
    loads: Loads, table: Placed, workload: Workload, batch: TableBatch, span: Span
) -> None:
    """Each distinct row of a batch comes from its owner, and its gradient goes back.

    With requests per host, a batch is that of a host's ranks together, each of which collects for
    one owner on every host.
    """
    lookups = workload.batch_size * table.work.ids_per_sample
    dim = table.work.dim
    of_rank = distinct_by_owner(table, lookups, loads.num_ranks)
    loads.found_ids += batch.ids
    loads.ids_to += of_rank * KEY_BYTES
    move_and_add(loads, batch.ids, batch.ids * dim * FLOAT_BYTES)
    owned_rows = of_rank * loads.num_ranks
    if table.exchange is Exchange.ROW_PER_HOST and span.crosses_hosts and span.ranks_per_host > 1:
        of_host = distinct_by_owner(table, span.ranks_per_host * lookups, loads.num_ranks)
        owned_rows = of_host * span.num_hosts
        handed_on = of_rank.sum() / span.ranks_per_host
        loads.found_ids += of_rank.sum()
        move_and_add(loads, of_rank.sum(), of_rank.sum() * dim * FLOAT_BYTES)
        loads.host_rows_from += handed_on * dim * FLOAT_BYTES
        loads.host_rows_to += handed_on * dim * FLOAT_BYTES
        loads.across_from += of_host * dim * table.forward_bytes(workload)
        loads.across_to += of_host * dim * table.backward_bytes(workload)
        _travel_beside(loads, table, workload, span.ranks_per_host * lookups)
    else:
        loads.rows_from += of_rank * dim * table.forward_bytes(workload)
        loads.rows_to += of_rank * dim * table.backward_bytes(workload)
        _travel_beside(loads, table, workload, lookups)
    encode_and_decode(loads, table, owned_rows * dim)
    loads.owned_ids += owned_rows
    loads.owned_bytes += owned_rows * table.row_bytes


def _travel_beside(loads: Loads, table: Placed, workload: Workload, lookups: float) -> None:
    """Rows that neither the batch before nor the lagging gradients of the one before that change,
    and gradients of rows that the next batch doesn't need.

    Args:
        loads: to add to.
        table: whose rows.
        workload: how they travel.
        lookups: of those who ask together.
    """
    if not workload.prefetches_rows:
        return
    of_all = loads.num_ranks * workload.batch_size * table.work.ids_per_sample

    def not_in(num_batches: int) -> Ranks:
        """How many distinct rows of the lookups aren't in so many other batches of all ranks."""
        others = num_batches * of_all
        with_others = distinct_by_owner(table, lookups + others, loads.num_ranks)
        return with_others - distinct_by_owner(table, others, loads.num_ranks)

    loads.early_from += not_in(2) * table.work.dim * table.forward_bytes(workload)
    loads.lagging_to += not_in(1) * table.work.dim * table.backward_bytes(workload)
