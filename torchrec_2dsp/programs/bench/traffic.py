"""What travels in a contestant's traced steps, and its mean over ranks."""

from collections.abc import Sequence

from torchrec_2dsp.comms.counting import Collective, EncodedBytes
from torchrec_2dsp.programs.config.section import Section
from torchrec_2dsp.replicas.sync_report import SyncReport


class MeasuredTraffic(Section):
    """The traffic of one kind of collective."""

    name: str
    """The operation, such as all_to_all_single."""

    calls: float
    """How many calls there were, per rank and step."""

    sent_bytes: float
    """Bytes that an ideal algorithm sends to other ranks, per rank and step."""


def measured_traffic(records: Sequence[Collective], num_steps: int) -> tuple[MeasuredTraffic, ...]:
    """The traffic of each kind of collective in some steps, by its name."""
    sums: dict[str, tuple[int, float]] = {}
    for record in records:
        calls, num_bytes = sums.get(record.op, (0, 0.0))
        sums[record.op] = (calls + 1, num_bytes + record.sent_bytes)
    return tuple(
        MeasuredTraffic(name=op, calls=calls / num_steps, sent_bytes=num_bytes / num_steps)
        for op, (calls, num_bytes) in sorted(sums.items())
    )


class EncodedTraffic(Section):
    """The bytes that a transport saves, per rank and step, mean over ranks."""

    rows_fp32_bytes: float = 0.0
    """Rows, bags and their gradients in fp32, before they were encoded; each counts once, whoever
    gets it. 0 without a row transport."""

    rows_bytes: float = 0.0
    """Bytes of these rows, bags and gradients as they travelled."""

    replicas_fp32_bytes: float = 0.0
    """Bytes that a rank would have sent to its replica peers, had all numbers travelled in fp32."""

    replicas_bytes: float = 0.0
    """Bytes that it sent to them, ids included."""


class DenseTraffic(Section):
    """The bytes of thresholded dense gradients, per rank and step, mean over ranks."""

    fp32_bytes: float
    """Bytes that a rank would have sent to others, had all been added up in fp32 by a ring."""

    sent_bytes: float
    """Bytes that it sent, data-parallel tables included."""

    density: float
    """The share of elements that were chosen."""

    residual_norm: float
    """The Euclidean norm of what a rank hadn't sent yet, when the last step was over."""


class RowTravel(Section):
    """How the row gradients of a step travel, mean over ranks."""

    window_s: float
    """Seconds from sending gradients until their rows are needed: so long they cost nothing."""

    waited_s: float
    """Seconds for which the lookup then waits for them."""


def encoded_between(
    rows: EncodedBytes, before: SyncReport, after: SyncReport, num_steps: int
) -> EncodedTraffic:
    """The bytes per step of what was encoded between two totals of syncs."""
    replicas_bytes = after.num_bytes - before.num_bytes
    saved_bytes = after.saved_bytes - before.saved_bytes
    return EncodedTraffic(
        rows_fp32_bytes=rows.before / num_steps,
        rows_bytes=rows.after / num_steps,
        replicas_fp32_bytes=(replicas_bytes + saved_bytes) / num_steps,
        replicas_bytes=replicas_bytes / num_steps,
    )


def row_travel_between(before: SyncReport, after: SyncReport, num_steps: int) -> RowTravel | None:
    """How long row gradients had to travel between two totals, and were waited for, per step."""
    window_s, waited_s = after.window_s - before.window_s, after.waited_s - before.waited_s
    if not window_s:
        return None
    return RowTravel(window_s=window_s / num_steps, waited_s=waited_s / num_steps)


def mean_traffic(ranks: Sequence[Sequence[MeasuredTraffic]]) -> tuple[MeasuredTraffic, ...]:
    """The traffic of a mean rank, by name; what a rank doesn't have counts as none."""
    names = sorted({part.name for traffic in ranks for part in traffic})
    rows = {
        name: [part for traffic in ranks for part in traffic if part.name == name] for name in names
    }
    return tuple(
        MeasuredTraffic(
            name=name,
            calls=sum(part.calls for part in parts) / len(ranks),
            sent_bytes=sum(part.sent_bytes for part in parts) / len(ranks),
        )
        for name, parts in rows.items()
    )


def mean_encoded(ranks: Sequence[EncodedTraffic]) -> EncodedTraffic | None:
    """The bytes of a mean rank; `None` if no rank's transport saves any."""
    mean = EncodedTraffic(
        **{
            name: sum(getattr(encoded, name) for encoded in ranks) / len(ranks)
            for name in EncodedTraffic.model_fields
        }
    )
    saves = mean.rows_bytes > 0 or mean.replicas_bytes != mean.replicas_fp32_bytes
    return mean if saves else None


def mean_travel(ranks: Sequence[RowTravel | None]) -> RowTravel | None:
    """Over the ranks whose rows travel; `None` if no rank's do."""
    measured = [travel for travel in ranks if travel is not None]
    if not measured:
        return None
    return RowTravel(
        window_s=sum(travel.window_s for travel in measured) / len(measured),
        waited_s=sum(travel.waited_s for travel in measured) / len(measured),
    )


def mean_dense(ranks: Sequence[DenseTraffic | None]) -> DenseTraffic | None:
    """Over the ranks; `None` if they don't threshold."""
    measured = [traffic for traffic in ranks if traffic is not None]
    if not measured:
        return None
    return DenseTraffic(
        **{
            name: sum(getattr(traffic, name) for traffic in measured) / len(measured)
            for name in DenseTraffic.model_fields
        }
    )
