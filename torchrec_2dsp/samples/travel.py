"""Samples that travel to other ranks, in two all-to-alls.

The first message holds what is equally large for all samples: rows of tensors, and the lengths of
jagged ones. From the lengths each rank knows how large the second message is, which holds values.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchrec_2dsp.comms.collectives import start_all_to_all_ragged
from torchrec_2dsp.samples.sample_rows import (
    Jagged,
    SampleRows,
    row_bytes,
    starts_of,
    take_segments,
)


def send_samples(
    own: SampleRows,
    receivers: torch.Tensor,
    counts: Sequence[int],
    group: dist.ProcessGroup,
) -> tuple[Any, int]:
    """Send each sample to its rank.

    Args:
        own: this rank's samples.
        receivers: the rank that gets each of them.
        counts: how many samples each rank has for this one.
        group: the ranks, at least two.

    Returns:
        The batch of the samples that this rank gets, in the order of ranks and of their samples;
        and the bytes that were sent to others.

    Collectives:
        Two all-to-alls of bytes, waited for.
    """
    order = receivers.argsort(stable=True)
    num_ranks = dist.get_world_size(group)
    sent_counts = receivers.bincount(minlength=num_ranks).tolist()
    tables = [*own.fixed, *(part.lengths for part in own.jagged)]
    packed = torch.cat([_bytes_of(table) for table in tables], dim=1)[order]
    arrived = start_all_to_all_ragged(packed.split(sent_counts), counts, group).by_rank()
    columns = _unpacked(torch.cat(arrived), tables)
    fixed, lengths = columns[: len(own.fixed)], columns[len(own.fixed) :]
    messages = _messages(own.jagged, order, sent_counts)
    by_rank = [
        _content_bytes(part, part_lengths, counts)
        for part, part_lengths in zip(own.jagged, lengths, strict=True)
    ]
    # Each rank's message holds the contents of all jagged tensors, one after the other.
    sizes = [[size for part in by_rank for size in part[rank]] for rank in range(num_ranks)]
    received = start_all_to_all_ragged(messages, [sum(size) for size in sizes], group).by_rank()
    pieces = [message.split(size) for message, size in zip(received, sizes, strict=True)]
    contents = [content for part in own.jagged for content in part.contents]
    arrived_contents = iter(
        torch.cat(list(from_ranks)).view(content.dtype).view(-1, *content.shape[1:])
        for from_ranks, content in zip(zip(*pieces, strict=True), contents, strict=True)
    )
    jagged = [
        Jagged(part.keys, part_lengths, tuple(next(arrived_contents) for _ in part.contents))
        for part, part_lengths in zip(own.jagged, lengths, strict=True)
    ]
    own_rank = dist.get_rank(group)
    num_bytes = sum(
        message.numel() + count * packed.shape[1]
        for rank, (message, count) in enumerate(zip(messages, sent_counts, strict=True))
        if rank != own_rank
    )
    return own.put_together(fixed, jagged), num_bytes


def _bytes_of(rows: torch.Tensor) -> torch.Tensor:
    """Rows x bytes."""
    width = row_bytes(rows)
    return rows.contiguous().view(-1).view(torch.uint8).view(len(rows), width)


def _unpacked(packed: torch.Tensor, tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors whose rows were put beside each other."""
    parts = packed.split([row_bytes(table) for table in tables], dim=1)
    return [
        # A copy begins where its type may begin.
        part.clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(table.dtype)
        .view(len(packed), *table.shape[1:])
        for part, table in zip(parts, tables, strict=True)
    ]


def _messages(
    parts: Sequence[Jagged], order: torch.Tensor, counts: Sequence[int]
) -> list[torch.Tensor]:
    """The contents of this rank's samples for each rank, as bytes."""
    pieces: list[list[torch.Tensor]] = [[torch.empty(0, dtype=torch.uint8)] for _ in counts]
    for part in parts:
        lengths = part.lengths.sum(1)
        starts, ordered = starts_of(lengths)[order], lengths[order]
        elements = [int(of_rank.sum()) for of_rank in ordered.split(list(counts))]
        for content in part.contents:
            in_order = take_segments(content, starts, ordered)
            for rank, rows in enumerate(in_order.split(elements)):
                pieces[rank].append(rows.contiguous().view(-1).view(torch.uint8))
    return [torch.cat(of_rank) for of_rank in pieces]


def _content_bytes(part: Jagged, lengths: torch.Tensor, counts: Sequence[int]) -> list[list[int]]:
    """The bytes of each content of a jagged tensor, from each rank."""
    elements = [int(of_rank.sum()) for of_rank in lengths.split(list(counts))]
    return [[number * row_bytes(content) for content in part.contents] for number in elements]
