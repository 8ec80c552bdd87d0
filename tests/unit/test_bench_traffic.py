"""What transports and thresholds save, on the page and as the mean over ranks."""

from tests.support.bench_results import bench_result
from tests.unit.test_bench_report import rows_of
from torchrec_2dsp.programs.bench.page import markdown_report
from torchrec_2dsp.programs.bench.tracing import (
    DenseTraffic,
    EncodedTraffic,
    mean_encoded,
    mean_known,
)


def test_what_transports_save_is_shown_where_they_encode() -> None:
    result = bench_result()
    assert "fp32 MB" not in markdown_report([result])
    encoded = {
        "exact_2d": EncodedTraffic(rows_fp32_bytes=3.2e6, rows_bytes=1e6),
        "stock_duplex": EncodedTraffic(replicas_fp32_bytes=4e6, replicas_bytes=2.5e6),
    }
    contestants = tuple(
        contestant.model_copy(update={"encoded": encoded.get(contestant.name)})
        for contestant in result.contestants
    )
    page = markdown_report([result.model_copy(update={"contestants": contestants})])

    headings, *rows = rows_of(page, "What transports save")
    assert headings == [
        "contestant",
        "rows fp32 MB",
        "rows encoded MB",
        "replicas fp32 MB",
        "replicas encoded MB",
    ]
    assert rows == [
        ["stock_duplex", "-", "-", "4.00", "2.50"],
        ["exact_2d", "3.20", "1.00", "-", "-"],
    ]


def test_a_mean_rank_has_encoded_the_mean() -> None:
    ranks = [
        EncodedTraffic(rows_fp32_bytes=300, rows_bytes=100),
        EncodedTraffic(replicas_fp32_bytes=50, replicas_bytes=50),
    ]

    assert mean_encoded(ranks) == EncodedTraffic(
        rows_fp32_bytes=150, rows_bytes=50, replicas_fp32_bytes=25, replicas_bytes=25
    )
    assert mean_encoded(ranks[1:]) is None, "replicas without a transport"


def test_what_thresholds_save_is_shown() -> None:
    result = bench_result()
    ranks = [
        DenseTraffic(fp32_bytes=8e6, sent_bytes=1e5, density=0.004, residual_norm=1.5),
        DenseTraffic(fp32_bytes=8e6, sent_bytes=3e5, density=0.006, residual_norm=2.5),
        None,
    ]
    contestants = tuple(
        contestant.model_copy(
            update={"dense": mean_known(ranks) if contestant.name == "stock" else None}
        )
        for contestant in result.contestants
    )
    page = markdown_report([result.model_copy(update={"contestants": contestants})])

    headings, *rows = rows_of(page, "What thresholds save")
    assert headings == ["contestant", "fp32 MB", "sent MB", "fewer", "density", "residual norm"]
    assert rows == [["stock", "8.00", "0.20", "40.0x", "0.500%", "2"]]
    assert mean_known(ranks[2:]) is None
