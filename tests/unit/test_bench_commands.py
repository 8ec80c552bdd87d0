"""The benchmark commands' output, and a contestant's process as the system sees it."""

import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from tests.support.bench_results import (
    CONTESTANTS,
    FAILED,
    STEPS_MS,
    bench_result,
    with_predictions,
)
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.bench.labels import setting_labels
from torchrec_2dsp.programs.bench.machine import (
    MachineLoad,
    foreign_load,
    keep_libraries_in_memory,
    load,
    peak_bytes,
    resident_bytes,
    sent_bytes,
)
from torchrec_2dsp.programs.bench.plots import predicted_plot, scaling_plot
from torchrec_2dsp.programs.bench.process import (
    Answer,
    ContestantProcess,
    How,
    failure_line,
    failure_report,
)
from torchrec_2dsp.programs.bench.results import BenchResult
from torchrec_2dsp.programs.cli.bench import bench_compare, bench_report, show_bench

app = typer.Typer()
app.command()(bench_report)
app.command()(bench_compare)

SLOWER = {name: [step * 1.2 for step in steps] for name, steps in STEPS_MS.items()}


def printed(result: BenchResult) -> str:
    file = StringIO()
    show_bench(result, Console(file=file, width=80))
    return file.getvalue()


def save(folder: Path, *results: BenchResult) -> list[str]:
    paths = [folder / f"result_{index}.json" for index in range(len(results))]
    for path, result in zip(paths, results, strict=True):
        result.save(path)
    return [str(path) for path in paths]


def test_the_closing_table_fits_a_log_file() -> None:
    long = "stock_with_a_name_that_is_longer_than_any_column"
    contestants = {long: {"kind": "stock"}, **CONTESTANTS}
    steps_ms = {name: [step * 10 for step in steps] for name, steps in STEPS_MS.items()}
    text = printed(bench_result(contestants=contestants, steps_ms={**steps_ms, long: [3e3] * 7}))

    assert max(len(line) for line in text.splitlines()) <= 80
    first_cells = "".join(line.split(" ")[0] for line in text.splitlines())
    assert long in first_cells
    assert "1,260.0  1,290.0  1,390.0  1.28 [1.26, 1.28]" in text


def test_a_name_has_the_room_of_a_column_without_figures() -> None:
    named = {"parallelized_any": {"kind": "parallelized"}}
    steps_ms = STEPS_MS | {"parallelized_any": [100.0] * 7}
    contestants = named | CONTESTANTS
    text = printed(bench_result(contestants=contestants, steps_ms=steps_ms, failed=FAILED))
    assert "parallelized_any  " in text
    assert "of\nceiling" not in text


def test_the_closing_table_says_what_it_compares_with_and_who_failed() -> None:
    text = " ".join(printed(bench_result(failed=FAILED)).split())

    assert "Best stock: stock_duplex, in full duplex; how many times as fast" in text
    assert "sent on the counted interface" in text
    assert "Of ceiling" not in text
    assert "exact_2d crashed: Traceback (most recent call last):" in text
    assert "SyncError: rows | <3> of *4*" in text
    assert "floor hung: a block took over 180 s" in text
    uncounted = " ".join(printed(bench_result(is_counted=False)).split())
    assert "that the traced collectives send" in uncounted


def test_plots_name_everyone_and_are_the_same_twice(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    results = [
        bench_result(hosts=hosts, network=network, failed=FAILED if hosts == 4 else {})
        for hosts in (2, 4)
        for network in ("1 Gbit/s", "for $5 to $9")
    ]
    before = dict(matplotlib.rcParams)
    for number in (1, 2):
        scaling_plot(results, tmp_path / f"scaling_{number}.svg")
        with_some_predictions = [results[0], *map(with_predictions, results[1:3])]
        predicted_plot(with_some_predictions, tmp_path / f"predicted_{number}.svg")

    assert dict(matplotlib.rcParams) == before
    for name in ("scaling", "predicted"):
        first, second = ((tmp_path / f"{name}_{n}.svg").read_bytes() for n in (1, 2))
        assert first == second
    drawings = (ElementTree.parse(tmp_path / f"{name}_1.svg") for name in ("scaling", "predicted"))
    scaling, predicted = ({*map(str.strip, drawing.getroot().itertext())} for drawing in drawings)
    assert {*CONTESTANTS, "1 Gbit/s", "for $5 to $9", "2x2", "4x2", "4", "8"} <= scaling
    shown = {label for label in predicted if "Gbit/s" in label or "$" in label}
    assert shown == set(setting_labels(with_some_predictions)[1:])


def test_without_matplotlib_a_plot_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'torchrec-2dsp\[report\]'"):
        scaling_plot([bench_result()], tmp_path / "x.svg")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("with_plots", [True, False])
def test_a_report_comes_with_its_data_and_plots(tmp_path: Path, with_plots: bool) -> None:
    if with_plots:
        pytest.importorskip("matplotlib")
    sources = save(tmp_path, *map(with_predictions, (bench_result(), bench_result(hosts=4))))
    page = tmp_path / "docs" / "benchmarks" / "demo.md"
    flag = "--plots" if with_plots else "--no-plots"

    result = CliRunner().invoke(app, ["bench-report", *sources, "--output", str(page), flag])

    assert result.exit_code == 0, result.output
    names = ["predicted", "scaling"]
    plots = [f"demo_{name}.svg" for name in names] if with_plots else []
    expected = sorted(["demo.md", "demo_1.json", "demo_2.json", *plots])
    assert sorted(path.name for path in page.parent.iterdir()) == expected
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    assert sorted(links) == sorted(set(expected) - {"demo.md"})
    for number, source in enumerate(sources, 1):
        copy = page.parent / f"demo_{number}.json"
        assert copy.read_bytes() == Path(source).read_bytes()
    assert result.output.count("wrote ") == len(expected)


def test_a_report_is_made_again_from_its_copies_in_another_order(tmp_path: Path) -> None:
    first, second = bench_result(), bench_result(hosts=4)
    page = str(tmp_path / "demo.md")
    arguments = ["--output", page, "--no-plots"]
    CliRunner().invoke(app, ["bench-report", *save(tmp_path, first, second), *arguments])
    copies = [str(tmp_path / f"demo_{number}.json") for number in (2, 1)]

    assert CliRunner().invoke(app, ["bench-report", *copies, *arguments]).exit_code == 0

    assert [BenchResult.load(copy) for copy in copies] == [first, second]


@pytest.mark.parametrize(
    ("sources", "output", "message"),
    [
        (["nowhere.json"], "x.md", "error: nowhere.json can't be read"),
        (["x.txt"], "x.md", "x.txt is not the JSON of a benchmark"),
        (["result_0.json"], "result_0.json", "no Markdown page; use a name that ends in .md"),
        (["result_0.json"], "folder.md", "error: folder.md is a folder; name a file in it"),
        (["result_0.json"], "x.txt/x.md", "x.txt/x.md can't be written: x.txt is no folder"),
    ],
)
def test_a_report_that_can_not_be_written_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sources: Sequence[str],
    output: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, bench_result())
    Path("x.txt").touch()
    Path("folder.md").mkdir()
    before = Path("result_0.json").read_bytes()

    result = CliRunner().invoke(app, ["bench-report", *sources, "--output", output])

    assert result.exit_code == 2
    assert message in result.stderr
    assert Path("result_0.json").read_bytes() == before


def test_runs_that_agree_pass(tmp_path: Path) -> None:
    sources = save(tmp_path, bench_result(), bench_result(), bench_result(steps_ms=SLOWER))

    agreeing = CliRunner().invoke(app, ["bench-compare", *sources[:2]])
    apart = CliRunner().invoke(app, ["bench-compare", *sources])
    tolerated = CliRunner().invoke(app, ["bench-compare", *sources, "--tolerance", "0.25"])

    assert [label.exit_code for label in (agreeing, apart, tolerated)] == [0, 1, 0]
    assert "The runs agree: medians within 10%" in agreeing.output
    assert re.search(r"exact_2d\s+129.0\s+129.0\s+154.8\s+20.0%", apart.output)
    assert "The runs don't agree" in apart.output


def test_the_speed_of_the_machine_is_shown(tmp_path: Path) -> None:
    sources = save(tmp_path, *(bench_result(probe_ms=probe_ms) for probe_ms in (1.5, 1.8)))

    result = CliRunner().invoke(app, ["bench-compare", *sources])

    assert result.exit_code == 0, "the machine's speed is no contestant"
    assert re.search(r"\(machine\)\s+1.500\s+1.800\s+20.0%", result.output)


def test_a_turned_order_and_failures_are_shown(tmp_path: Path) -> None:
    turned = {**STEPS_MS, "exact_2d": [step * 1.6 for step in STEPS_MS["exact_2d"]]}
    failed = bench_result(failed={"floor": FAILED["floor"]})
    sources = save(tmp_path, bench_result(), bench_result(), bench_result(steps_ms=turned), failed)

    tolerant = ["bench-compare", "--tolerance", "1"]
    in_turn = CliRunner().invoke(app, [*tolerant, *sources[:3]])
    incomplete = CliRunner().invoke(app, [*tolerant, sources[0], sources[3]])

    assert [result.exit_code for result in (in_turn, incomplete)] == [1, 1]
    pairs = re.findall(r"(\w+) is faster than (\w+) in run 3 and slower in run 1", in_turn.output)
    assert pairs == [("stock", "exact_2d"), ("stock_duplex", "exact_2d")]
    assert re.search(r"floor\s+107.0\s+failed", incomplete.output)


def test_runs_of_something_else_are_an_error(tmp_path: Path) -> None:
    sources = save(tmp_path, bench_result(), bench_result(hosts=4))

    result = CliRunner().invoke(app, ["bench-compare", *sources])

    assert result.exit_code == 2
    problem = "run 2 is not a repetition of run 1: hosts is 4 instead of 2. Compare"
    assert problem in result.stderr


class Subject:
    """A contestant's process in these tests."""

    def double(self, value: int) -> int:
        return 2 * value

    def fail(self) -> None:
        raise ValueError("it is broken")

    def die(self) -> None:
        os._exit(7)

    def sleep(self) -> None:
        time.sleep(600)

    def pin(self) -> tuple[bool, int]:
        could = keep_libraries_in_memory()
        status = Path("/proc/self/status").read_text()
        return could, int(status.partition("VmLck:")[2].split()[0])


def state_of(pid: int) -> str:
    """Return a process's state letter in /proc; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for_state(pid: int, states: str) -> str:
    end = time.monotonic() + 20
    while state_of(pid) not in states and time.monotonic() < end:
        time.sleep(0.01)
    return state_of(pid)


@pytest.fixture
def process() -> Iterator[ContestantProcess]:
    process = ContestantProcess(Subject)
    yield process
    process.kill()


def test_a_process_answers_and_survives_an_error(process: ContestantProcess) -> None:
    assert process.ask("double", 4, deadline_s=30) == Answer(How.ANSWERED, 8)
    failed = process.ask("fail", deadline_s=30)
    assert failed.how is How.RAISED
    assert failed.report.endswith("ValueError: it is broken\n")
    assert process.ask("double", 5, deadline_s=30).value == 10


def test_a_paused_process_rests_until_it_is_asked(process: ContestantProcess) -> None:
    process.pause()
    assert wait_for_state(process.pid, "T") == "T"
    assert process.ask("double", 4, deadline_s=30).value == 8
    process.pause()
    process.kill()
    assert state_of(process.pid) == ""


def test_a_paused_process_dies_with_its_parent() -> None:
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        process = ContestantProcess(Subject)
        process.ask("double", 4, deadline_s=30)
        process.pause()
        os.write(write, str(process.pid).encode())
        os._exit(0)
    pid = int(os.read(read, 20))
    os.waitpid(parent, 0)

    # Whoever inherits it may not have noticed yet.
    assert wait_for_state(pid, "Z") in ("", "Z")


def test_libraries_are_pinned_if_that_is_allowed(process: ContestantProcess) -> None:
    could, locked_kib = process.ask("pin", deadline_s=60).value
    # Torch alone has more code than this.
    assert not could or locked_kib > 50_000


def test_a_process_that_dies_is_noticed(process: ContestantProcess) -> None:
    answer = process.ask("die", deadline_s=30)
    assert answer.how is How.DIED
    assert "died in die with exit code 7" in answer.report


def test_a_process_that_hangs_says_where(process: ContestantProcess) -> None:
    late = process.ask("sleep", deadline_s=0.5)
    process.kill()
    assert late.how is How.LATE
    assert late.report.startswith("sleep took over 0.5 s")
    assert "in sleep" in late.report
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_waiting_ends_when_another_rank_failed(process: ContestantProcess) -> None:
    answer = process.ask("sleep", deadline_s=60, give_up=lambda: True)
    assert answer.how is How.STOPPED


def test_failures_of_all_ranks_are_told() -> None:
    answers = [
        Answer(How.RAISED, report="Traceback\n  line\nValueError: bad"),
        Answer(How.ANSWERED, 3),
        Answer(How.LATE, report="block took over 5 s\nstack"),
        Answer(How.STOPPED, report="stopped"),
    ]

    line = failure_line("block", answers)

    assert line == ("in block: rank 0: ValueError: bad; rank 2: block took over 5 s")
    assert "in block, rank 2: block took" in failure_report("block", answers)


def test_foreign_load_is_what_nobody_here_used() -> None:
    before = [
        MachineLoad("a", 100.0, 5.0),
        MachineLoad("a", 100.1, 7.0),
        MachineLoad("b", 50.0, 1.0),
    ]
    after = [
        MachineLoad("a", 116.0, 9.0),
        MachineLoad("a", 116.1, 13.0),
        MachineLoad("b", 51.0, 2.0),
    ]

    assert foreign_load(before, after, seconds=10.0) == pytest.approx(0.6)


def test_a_busy_process_counts_as_its_own() -> None:
    before = load([os.getpid()])
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass

    used = load([os.getpid()])

    assert used.own_s - before.own_s == pytest.approx(0.3, abs=0.15)
    assert used.busy_s - before.busy_s > 0.15
    assert used.machine == before.machine


def test_memory_and_bytes_are_counted() -> None:
    resident, peak = resident_bytes(), peak_bytes()
    assert peak >= 0.9 * resident > 1e7
    before = sent_bytes()["lo"]
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        client.sendall(bytes(10_000))
    assert sent_bytes()["lo"] >= before + 10_000
