"""The tables of a benchmark report on what travels: collectives, encoded numbers, row gradients."""

from torchrec_2dsp.programs.bench.markdown_tables import MISSING, megabytes, ms, table
from torchrec_2dsp.programs.bench.statistics import Summary


def travel_table(summary: Summary) -> str:
    """How row gradients travel; empty if nobody sends any."""
    rows = [
        [contestant.name, ms(travel.window_s), ms(travel.waited_s)]
        for contestant in summary.contestants
        if (travel := contestant.result.row_travel)
    ]
    return table(["contestant", "window ms", "waited ms"], rows) if rows else ""


def traffic_table(summary: Summary) -> str:
    """The table of what each kind of collective carried; empty if nothing was traced."""
    rows = [
        [contestant.name, part.name, f"{part.calls:,.1f}", megabytes(part.sent_bytes)]
        for contestant in summary.contestants
        for part in contestant.result.traffic
    ]
    if not rows:
        return ""
    return table(["contestant", "collective", "calls", "sent MB"], rows, num_left=2)


def encoded_table(summary: Summary) -> str:
    """The bytes before and after encoding; empty if no transport encodes any."""
    rows = []
    for contestant in summary.contestants:
        if (encoded := contestant.result.encoded) is None:
            continue
        pairs = [
            (encoded.rows_fp32_bytes, encoded.rows_bytes),
            (encoded.replicas_fp32_bytes, encoded.replicas_bytes),
        ]
        cells = [
            cell
            for before, after in pairs
            for cell in ((megabytes(before), megabytes(after)) if before else (MISSING, MISSING))
        ]
        rows.append([contestant.name, *cells])
    headings = ["rows fp32 MB", "rows encoded MB", "replicas fp32 MB", "replicas encoded MB"]
    return table(["contestant", *headings], rows) if rows else ""


def dense_table(summary: Summary) -> str:
    """The bytes of thresholded dense gradients; empty if nobody thresholds any."""
    rows = [
        [
            contestant.name,
            megabytes(dense.fp32_bytes),
            megabytes(dense.sent_bytes),
            f"{dense.fp32_bytes / dense.sent_bytes:,.1f}x" if dense.sent_bytes else MISSING,
            f"{dense.density:.3%}",
            f"{dense.residual_norm:.3g}",
        ]
        for contestant in summary.contestants
        if (dense := contestant.result.dense)
    ]
    headings = ["fp32 MB", "sent MB", "fewer", "density", "residual norm"]
    return table(["contestant", *headings], rows) if rows else ""
