"""Samples on their way to a stage, from the ranks that looked them up, and results on theirs back.

    rank 0: rows 0 to 5   --together-->  rank 0: rows 0 to 9  --stages-->  rank 1: rows 0 to 9
    rank 1: rows 6 to 9   ----------->
    rank 0: rows 0 to 5   <-------------own rows of the losses-----------  rank 1: rows 0 to 9
    rank 1: rows 6 to 9   <----------------------------------------------

The inputs go to all ranks of the first stage, and the targets to all ranks of the last one.
"""

from collections.abc import Sequence

import torch

from torchrec_2dsp.dense.pipelined.given import GivenTogether
from torchrec_2dsp.dense.pipelined.groups import PipelineGroups
from torchrec_2dsp.dense.pipelined.links import Links, TensorKind


def send_together(
    own: Sequence[torch.Tensor],
    kinds: Sequence[TensorKind],
    given: GivenTogether,
    position: int,
    groups: PipelineGroups,
    links: Links,
) -> list[torch.Tensor] | None:
    """Send this rank's samples to the ranks at a position; there, receive those of all ranks.

    Args:
        own: this rank's tensors.
        kinds: of these tensors.
        given: how many samples each rank has.
        position: of the ranks that need all samples.
        groups: of the pipeline.
        links: by which the samples travel.

    Returns:
        Each tensor with the samples of all ranks, on the ranks at the position; else `None`.

    Collectives:
        A send of each tensor to each rank at the position, and a receive of each there.
    """
    for rank in groups.ranks_at(position):
        if rank != groups.rank:
            for tensor in own:
                links.send(tensor, rank)
    if groups.position != position:
        return None
    together = [kind.empty(given.num_samples, groups.device) for kind in kinds]
    arriving = []
    for rank in range(groups.size):
        for joined, tensor in zip(together, own, strict=True):
            rows = joined[given.rows_of(rank)]
            if rank == groups.rank:
                rows.copy_(tensor.detach())
            else:
                arriving.append(links.receive(rows, rank))
    for work in arriving:
        if work is not None:
            work.wait()
    return together


def send_back(
    together: torch.Tensor | None,
    kind: TensorKind | None,
    given: GivenTogether,
    position: int,
    groups: PipelineGroups,
    links: Links,
) -> tuple[torch.Tensor, TensorKind]:
    """Give each rank its own rows of a result that the ranks at a position have.

    Args:
        together: the rows of all ranks, on ranks at the position.
        kind: what the result looks like; `None` if this isn't known yet, on any rank.
        given: how many samples each rank has.
        position: of the ranks that have the result.
        groups: of the pipeline.
        links: by which rows travel.

    Returns:
        This rank's rows, and the kind of the result.

    Collectives:
        A send of its rows to each rank, and one of the kind before it, if it isn't known.
    """
    source = groups.rank_at(position)
    if groups.rank != source:
        if kind is None:
            kind = links.receive_kind(source)
        rows = kind.empty(given.sizes[groups.rank], groups.device)
        work = links.receive(rows, source)
        if work is not None:
            work.wait()
        return rows, kind
    assert together is not None
    for other in range(groups.mesh.pp):
        rank = groups.rank_at(other)
        if rank != source:
            if kind is None:
                links.send_kind(TensorKind.of(together), rank)
            links.send(together[given.rows_of(rank)], rank)
    return together[given.rows_of(source)].clone(), TensorKind.of(together)
