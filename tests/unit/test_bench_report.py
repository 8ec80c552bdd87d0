"""The page on benchmark results: every number comes from the data, and nobody is left out."""

import json
import math
import re
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.support.bench_results import (
    CONTESTANTS,
    FAILED,
    STEPS_MS,
    bench_result,
    with_figures,
    with_predictions,
)
from torchrec_2dsp.programs.bench.labels import setting_labels
from torchrec_2dsp.programs.bench.page import markdown_report
from torchrec_2dsp.programs.bench.results import BenchResult, ComputeTimes, Outcome
from torchrec_2dsp.programs.bench.statistics import summarize
from torchrec_2dsp.programs.bench.tables import shares_of, shares_table
from torchrec_2dsp.programs.bench.tracing import (
    DenseTraffic,
    EncodedTraffic,
    compute_times,
    mean_encoded,
    mean_known,
)
from torchrec_2dsp.programs.run_report.gain import Contenders


def rows_of(page: str, heading: str) -> list[list[str]]:
    """Return the cells in the first table after a heading, its column heads first."""
    lines = page[page.index(heading) :].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return [rows[0], *rows[2:]]


def test_results_survive_json(tmp_path: Path) -> None:
    diverged = {"stock": {"losses": (0.7, math.inf, math.nan)}}
    result = with_figures(bench_result(failed=FAILED), diverged)

    result.save(tmp_path / "a.json")
    again = BenchResult.load(tmp_path / "a.json")
    again.save(tmp_path / "b.json")

    assert again.contestants[1:] == result.contestants[1:]
    assert again.setting == result.setting
    assert [str(loss) for loss in again.contestants[0].losses] == ["0.7", "inf", "nan"]
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


def test_earlier_results_have_more_figures_and_may_have_dealt_their_samples(tmp_path: Path) -> None:
    path, result = tmp_path / "earlier.json", bench_result()
    result.save(path)
    tree = json.loads(path.read_text())
    sections = tree["setting"]["config"]["contestants"]
    for section in sections.values():
        section |= {} if section["kind"] == "ceiling" else {"balance": None}
        former = {"moment_scale": "expected", "moment_rho": 0.01}
        section |= former if section["kind"] == "two_d" else {}
    for contestant in tree["contestants"]:
        contestant["dealt"] = None
        contestant["blocks"][0]["loopback_bytes"] = 5.0
    sections["stock_duplex"]["balance"] = {"cost": {"linear": 1.0, "quadratic": 0.0}}
    tree["contestants"][1]["dealt"] = {"imbalance_before": 1.5, "imbalance_after": 1.1}
    path.write_text(json.dumps(tree))
    earlier = BenchResult.load(path)
    assert earlier.contestants == result.contestants
    # TorchRec doesn't deal samples.
    for each, name in ((result, "stock_duplex"), (earlier, "stock")):
        stock = Contenders.of(each).stock
        assert summarize(each).best_stock == name
        assert stock is not None
        assert stock.name == name
    assert "The best stock contestant is stock, with gloo's own" in markdown_report([earlier])


def test_every_contestant_has_a_row_with_its_figures() -> None:
    headings, *rows = rows_of(markdown_report([bench_result()]), "### Step times")

    assert [row[0] for row in rows] == list(CONTESTANTS)
    ours = dict(zip(headings, rows[2], strict=True))
    assert [ours[f"{which} ms"] for which in ("min", "median", "max")] == [
        "126.0",
        "129.0",
        "139.0",
    ]
    assert ours["samples/s"] == f"{4 * 1024 / 0.129:,.0f}"
    assert ours["x best stock"] == "1.28 [1.26, 1.28]"
    assert ours["x best plain stock"] == "1.37 [1.37, 1.38]"
    assert ours["of ceiling"] == f"{107 / 129:.0%}"
    assert (ours["link MB"], ours["peak MB"]) == ("1.20", "64")
    assert (ours["loss gap"], ours["NE gap"]) == ("1.5e-07", "+0.003%")
    assert rows[0][-1] == "reference"


def test_a_page_says_what_ran_where() -> None:
    page = markdown_report([bench_result(overrides={"model": {"dim": 32}})], data=["demo_1.json"])

    for text in (
        "# demo\n",
        "2 x 2 (hosts x ranks per host)",
        "- Network: 1 Gbit/s\n",
        "to other hosts, all-reduce 117.0 MB/s; in a host, all-reduce none",
        "processor some processor; cores 2",
        "torch 2.13.0",
        "3 tables of 1,000 to 50,000 rows (71,000 in all, 9 MB in fp32)",
        "Zipf exponent 1.05 to 1.2, 0 to 6 ids per sample and table (5 per sample), dimension 32",
        "1,024 samples per rank and step",
        "\n\n      torchrun --nproc-per-node 2 -m torchrec_2dsp bench --config demo.toml\n",
        "The best stock contestant is stock_duplex, given the full-duplex all-to-all; of those "
        "with gloo's own, it is stock. The lowest ceiling is floor.",
        "[demo_1.json](demo_1.json)",
    ):
        assert text in page
    for heading in rows_of(page, "### Step times")[0][4:]:
        assert f"**{heading}**:" in page


def test_phases_add_up_and_waiting_ones_are_marked() -> None:
    headings, *rows = rows_of(markdown_report([bench_result()]), "### Where the time goes")

    assert {"pooled rows (waits)", "sync", "sync (waits)", "forward"} <= set(headings)
    waits = ["(waits)" in heading for heading in headings[1:-1]]
    assert waits == sorted(waits)
    for row in rows:
        parts = [float(cell) for cell in row[1:-1] if cell != "-"]
        assert float(row[-1]) == pytest.approx(sum(parts))
    assert rows[0][headings.index("sync")] == "-"


def test_the_way_of_row_gradients_is_shown_where_they_travel() -> None:
    page = markdown_report([bench_result()])
    assert "| exact_2d   |      12.3 |       4.5 |" in page
    stock = {"stock": {"kind": "stock"}, "stock_duplex": {"kind": "stock", "full_duplex": True}}
    assert "waited ms" not in markdown_report([bench_result(contestants=stock)])


def test_predictions_stand_beside_what_was_measured() -> None:
    known = with_predictions(bench_result())
    page = markdown_report([known])
    headings, *rows = rows_of(page, "### Predicted steps")
    assert headings[:4] == ["contestant", "measured ms", "predicted ms", "error"]
    assert headings[4:] == ["dense", "sync"]
    # Median steps are 178, 166 and 129 ms.
    assert rows[0] == ["stock", "178.0", "220.0", "+24%", "200.0", "20.0"]
    assert [row[3] for row in rows] == ["+24%", "+14%", "-7%"]
    assert "Median error: 14%; largest: 24%. Rank correlation: 1.00." in page
    assert "Dense:" not in page
    page = markdown_report([known.model_copy(update={"dense_from": ("floor",)})])
    assert "Rank correlation: 1.00. Dense: what floor took in the same rounds, less" in page
    # All have 20 ms beside the dense part; measured are -22, -4 and 29.
    assert "Without it, median error of the rest: -31%." in page
    assert "Predicted steps" not in markdown_report([bench_result()])


def test_predictions_of_several_settings_stand_together() -> None:
    both = [with_predictions(bench_result()), with_predictions(bench_result(hosts=4), "stock")]
    page = markdown_report([*both, bench_result(network="other")])
    # All steps are as in the test above, or were predicted alike.
    assert "4 plans of 2 settings. Median error: 19%; largest: 24%. Rank correlation: 1.00." in page
    assert "2 of them are of contestants that all settings have: stock. Median error: 24%" in page
    alike = markdown_report([both[0], with_predictions(bench_result(hosts=4))])
    assert "6 plans of 2 settings." in alike
    assert "that all settings have" not in alike
    assert "of all settings" not in markdown_report([both[0], bench_result(hosts=4)])


def test_noise_is_shown() -> None:
    # 0.25 itself is not above the limit.
    loads = [0.1, 0.5, 0.25, 0.1, 0.1, 0.2, 0.3]
    result = bench_result(foreign_load={"stock": loads})
    _, stock, other, *_ = rows_of(markdown_report([result]), "### Noise")

    assert stock[4:] == ["10.1%", "0.20", "0.50", "1, 6", "1.50 / 1.50 / 1.50"]
    assert other[5:] == ["0.05", "0.05", "none", "1.50 / 1.50 / 1.50"]


def test_failures_are_listed_with_their_reasons() -> None:
    page = markdown_report([bench_result(failed=FAILED)])
    rows = {row[0]: row[2] for row in rows_of(page, "### Step times")}

    assert rows["exact_2d"] == "crashed"
    assert rows["floor"] == "hung"
    assert "- exact_2d crashed: SyncError: rows \\| \\<3\\> of \\*4\\*\n" in page
    assert '\n        File "x.py", line 3\n' in page
    assert "- floor hung: a block took over 180 s\n" in page
    assert "139.0" not in page


def test_a_page_is_markdown() -> None:
    network = "a|b <c> [d](e) `f` *g* __h__"
    page = markdown_report([bench_result(failed=FAILED, network=network)])
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    inline = [token.content for token in tokens if token.type == "inline"]
    html = MarkdownIt("commonmark").enable("table").render(page)

    assert sum(token.type == "table_open" for token in tokens) == 5
    assert not [text for text in inline if text.startswith("|")]
    code = [token.content.strip() for token in tokens if token.type == "code_block"]
    assert FAILED["exact_2d"][1] in code
    assert "<h2>2x2, a|b &lt;c&gt; [d](e) `f` *g* __h__</h2>" in html


def test_a_page_on_nothing_but_failures() -> None:
    crashed = dict.fromkeys(CONTESTANTS, (Outcome.CRASHED, ""))
    page = markdown_report([bench_result(failed=crashed)])

    assert "No stock contestant was measured, so there are no ratios." in page
    assert page.count("crashed: no reason was recorded") == len(CONTESTANTS)


def test_uncounted_links_are_replaced_by_what_collectives_sent() -> None:
    page = markdown_report([bench_result(is_counted=False)])
    headings, stock, *_ = rows_of(page, "### Step times")

    assert stock[headings.index("sent MB")] == "2.90"
    assert "link MB" not in page


def test_several_results_share_what_they_have_in_common() -> None:
    results = [bench_result(), bench_result(hosts=4, failed=FAILED), bench_result(hosts=4)]
    page = markdown_report(results, plots={"scaling": "s.svg"})
    headings, *rows = rows_of(page, "# demo")

    labels = ["2x2, 1 Gbit/s", "4x2, 1 Gbit/s, run 1", "4x2, 1 Gbit/s, run 2"]
    assert headings == ["contestant", *labels] == ["contestant", *setting_labels(results)]
    assert rows[2] == ["exact_2d", "129.0 (1.28)", "crashed", "129.0 (1.28)"]
    assert page.count("- Machine:") == page.count("- Network:") == 1
    assert page.count("- Ranks:") == 3
    assert page.index("(s.svg)") < page.index("## What and where")
    assert page.index(f"## {labels[1]}") < page.index(f"## {labels[2]}")


def test_other_work_at_the_same_place_is_named() -> None:
    entry = bench_result()
    setting = entry.setting.model_copy(update={"title": "sorted ids"})
    labels = setting_labels([entry, entry.model_copy(update={"setting": setting})])
    where = f"{entry.setting.hosts}x{entry.setting.ranks_per_host}, {entry.setting.network}"
    assert labels == [f"{where}, demo", f"{where}, sorted ids"]


def test_columns_of_other_workloads_are_numbered() -> None:
    feature = {"name": "user", "num_rows": 50_000, "skew": 1.05}
    mild, long_bags = {**feature, "skew": 0.3}, {**feature, "min_ids": 10, "max_ids": 30}
    results = [
        bench_result(overrides={"data": {"features": [only]}})
        for only in (feature, mild, mild, long_bags)
    ]
    headings = rows_of(markdown_report(results), "# demo")[0]
    assert headings[1:] == [
        "2x2, 1 Gbit/s, workload 1",
        "2x2, 1 Gbit/s, workload 2, run 1",
        "2x2, 1 Gbit/s, workload 2, run 2",
        "2x2, 1 Gbit/s, workload 3",
    ]


def test_places_that_tell_workloads_apart_say_no_more() -> None:
    steep = {"data": {"features": [{"name": "user", "num_rows": 50_000, "skew": 1.2}]}}
    results = [bench_result(), bench_result(network="200 Mbit/s", overrides=steep)]
    assert setting_labels(results) == ["2x2, 1 Gbit/s", "2x2, 200 Mbit/s"]
    batches = [bench_result(overrides={"schedule": {"batch_size": size}}) for size in (1024, 2048)]
    assert setting_labels(batches) == ["2x2, 1 Gbit/s, workload 1", "2x2, 1 Gbit/s, workload 2"]


def test_a_contestant_that_only_some_have_is_not_left_out() -> None:
    more = {**CONTESTANTS, "extra": {"kind": "two_d"}}
    steps_ms = {**STEPS_MS, "extra": [100.0] * 7}
    page = markdown_report([bench_result(), bench_result(contestants=more, steps_ms=steps_ms)])
    assert rows_of(page, "# demo")[-1] == ["extra", "-", "100.0 (1.66)"]


def test_what_transports_save_is_shown_where_they_encode() -> None:
    result = bench_result()
    assert "fp32 MB" not in markdown_report([result])
    rows = EncodedTraffic(rows_fp32_bytes=3.2e6, rows_bytes=1e6)
    replicas = EncodedTraffic(replicas_fp32_bytes=4e6, replicas_bytes=2.5e6)
    encoded = {"exact_2d": {"encoded": rows}, "stock_duplex": {"encoded": replicas}}
    page = markdown_report([with_figures(result, encoded)])

    assert rows_of(page, "What transports save") == [
        [
            "contestant",
            "rows fp32 MB",
            "rows encoded MB",
            "replicas fp32 MB",
            "replicas encoded MB",
        ],
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
    ranks = [
        DenseTraffic(fp32_bytes=8e6, sent_bytes=1e5, density=0.004, residual_norm=1.5),
        DenseTraffic(fp32_bytes=8e6, sent_bytes=3e5, density=0.006, residual_norm=2.5),
        None,
    ]
    result = with_figures(bench_result(), {"stock": {"dense": mean_known(ranks)}})
    page = markdown_report([result])

    headings, *rows = rows_of(page, "What thresholds save")
    assert headings == ["contestant", "fp32 MB", "sent MB", "fewer", "density", "residual norm"]
    assert rows == [["stock", "8.00", "0.20", "40.0x", "0.500%", "2"]]
    assert mean_known(ranks[2:]) is None


def test_ranks_are_compared_step_by_step() -> None:
    # The slowest rank is another one in each step.
    assert compute_times([[3.0, 1.0], [1.0, 3.0]]) == ComputeTimes(mean_s=2.0, slowest_s=3.0)
    assert compute_times([[], []]) is None


def test_a_page_says_how_busy_ranks_were_and_what_the_slowest_cost() -> None:
    result = bench_result(steps_ms=STEPS_MS | {"stock": (300, *[125] * 6)})
    assert shares_table(result) is None
    assert "Lost to imbalance" not in markdown_report([result])
    # A step takes 150 ms in the mean. Another rank is the slowest in each step.
    times = compute_times([[0.05, 0.1], [0.1, 0.05]])
    result = with_figures(result, {"stock": {"compute": times}})
    first, other, *_ = result.contestants
    table = shares_table(result)
    assert table is not None
    assert table.rows == [
        ["stock", "50.0%", "16.7%", "33.3%", "1.333"],
        *([name, *["-"] * 4] for name in ("stock_duplex", "exact_2d", "floor")),
    ]
    assert table.markdown() in markdown_report([result])
    assert shares_of(other) is None
    # Nobody waits for a ceiling's slowest rank.
    ceiling = shares_of(first.model_copy(update={"kind": "ceiling"}))
    assert ceiling is not None
    assert (ceiling.busy, ceiling.lost) == (pytest.approx(0.5), 0.0)
    unmeasured = first.model_copy(update={"blocks": ()})
    assert shares_of(unmeasured) is None
