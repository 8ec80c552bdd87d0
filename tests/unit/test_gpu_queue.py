"""The GPU bundle is complete; the queue runs jobs as time permits, and survives them."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from tests.gpu import bundle, page as gpu_page
from tests.gpu.bundle import thin
from tests.gpu.jobs import FAULTS, JOBS, Job
from tests.gpu.lanes import CONTROL, Lane
from tests.gpu.queue import Machine, Queue, jobs_named
from tests.gpu.results import CRASHED, PASSED, STOPPED, TIMED_OUT, Result, read_results, sum_of_code
from tests.support.fault_cases import all_cases
from tests.support.programs import python
from tests.support.slices import patient

CPU = Machine("CPU", {"torch": "2.13.0"})

LEAVES_A_PROCESS = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("child", child.pid, flush=True)
"""


def job_of(name: str, code: str, **options: float) -> Job:
    return Job(name=name, arguments=(), in_small=("-c", code), **({"budget_s": 60.0} | options))  # type: ignore[arg-type]


def run_queue(folder: Path, jobs: list[Job], *, seconds: float = 60, code: str = "c") -> Queue:
    """Run jobs in two lanes; each run writes its own file."""
    place = folder / f"run{time.monotonic_ns()}"
    place.mkdir()
    lanes = [Lane(number, place, has_gpu=False) for number in range(2)]
    end = time.monotonic() + seconds
    before = read_results([folder])
    queue = Queue(CPU, lanes, folder / f"{place.name}.jsonl", before, end, code=code)
    queue.run(jobs, place)
    return queue


def outcomes(queue: Queue) -> dict[str, str]:
    return {result.name: result.outcome for result in queue.results}


def is_running(pid: int) -> bool:
    """Tell whether a process exists and isn't a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_queue_survives_its_jobs_and_goes_on(tmp_path: Path) -> None:
    done = tmp_path / "done"
    jobs = [
        job_of("crashes", f"import os; os.path.exists({str(done)!r}) or os.abort()"),
        job_of("hangs", "import time; print('here', flush=True); time.sleep(1000)", budget_s=2),
        job_of("passes", "print('well')"),
    ]
    first = run_queue(tmp_path, jobs, seconds=patient(90))
    assert outcomes(first) == {"crashes": CRASHED, "hangs": TIMED_OUT, "passes": PASSED}
    (hung,) = [result for result in first.results if result.name == "hangs"]
    # It was asked first, and could say where it was.
    assert "here" in hung.tail
    assert "KeyboardInterrupt" in hung.tail
    # Failed jobs come after jobs that haven't run.
    new = job_of("new", "")
    assert [job.name for job in first.left([*jobs, new])] == ["new", "crashes", "hangs"]

    done.touch()
    second = run_queue(tmp_path, jobs, seconds=patient(90))
    assert outcomes(second) == {"crashes": PASSED, "hangs": TIMED_OUT}
    assert outcomes(run_queue(tmp_path, jobs[::2], code="other")) == dict.fromkeys(
        ("crashes", "passes"), PASSED
    )
    written = read_results([tmp_path])
    assert len(written) == 7
    assert all((result.card, result.versions) == ("CPU", CPU.versions) for result in written)


def test_the_end_of_the_queue_is_no_fault_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.gpu.queue._LEAST_S", 0.5)
    jobs = [job_of("long", "import time; time.sleep(1000)"), job_of("later", "", lanes=2)]
    queue = run_queue(tmp_path, jobs, seconds=3)
    assert outcomes(queue) == {"long": STOPPED}
    assert [job.name for job in queue.left(jobs)] == ["long", "later"]


def test_no_process_of_a_job_is_left(tmp_path: Path) -> None:
    (result,) = run_queue(tmp_path, [job_of("leaves", LEAVES_A_PROCESS)]).results
    assert result.outcome == PASSED
    assert not is_running(int(result.tail.split()[1]))


def test_tests_that_passed_do_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "test_three.py"
    file.write_text(
        "import pathlib, pytest\n"
        "def test_good(): pass\n"
        f"def test_bad(): assert pathlib.Path({str(tmp_path / 'mended')!r}).exists()\n"
    )
    command = (
        "-m",
        "pytest",
        "-p",
        "tests.gpu.recorder",
        "-q",
        "-p",
        "no:cacheprovider",
        str(file),
    )
    jobs = [Job(name="tests", arguments=(), in_small=command, budget_s=60)]
    first = run_queue(tmp_path, jobs)
    assert sorted(how for _, how in first.results[0].tests.items()) == ["failed", "passed"]
    (tmp_path / "mended").touch()
    second = run_queue(tmp_path, jobs)
    assert [test.partition("::")[2] for test in second.results[0].tests] == ["test_bad"]
    assert outcomes(second) == {"tests": PASSED}


FAKE_CONTROL = """#!/bin/sh
[ "$1" = -d ] && text=begin || read -r text
echo "$text $CUDA_MPS_PIPE_DIRECTORY" >> "$MPS_LOG"
"""


def test_each_lane_has_a_server_and_another_one_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, control = tmp_path / "log", tmp_path / CONTROL
    control.write_text(FAKE_CONTROL)
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("MPS_LOG", str(log))
    monkeypatch.setattr("tests.gpu.lanes._PROBE", "")
    lanes = [Lane(number, tmp_path, has_gpu=True) for number in range(2)]
    places = [lane.environ(shares=True)["CUDA_MPS_PIPE_DIRECTORY"] for lane in lanes]
    assert len({*places}) == 2
    assert "CUDA_MPS_PIPE_DIRECTORY" not in lanes[0].environ(shares=False)
    assert lanes[0].renew(is_sure=False)
    monkeypatch.setattr("tests.gpu.lanes._PROBE", "raise SystemExit(1)")
    assert not lanes[1].renew(is_sure=False)
    for lane in lanes:
        lane.close()
    other = f"{places[0][:-1]}2"
    last = f"{places[1][:-1]}2"
    assert log.read_text().splitlines() == [
        *(f"begin {place}" for place in places),
        f"quit {places[0]}",
        f"begin {other}",
        f"quit {places[1]}",
        f"begin {last}",
        f"quit {last}",
        f"quit {other}",
    ]


def test_the_sum_changes_with_the_code(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    sums = []
    for text in ("x = 1", "x = 2"):
        (tmp_path / "a" / "b.py").write_text(text)
        sums.append(sum_of_code(tmp_path, ["a"]))
    (tmp_path / "a" / "b.pyc").touch()
    assert sum_of_code(tmp_path, ["a"]) == sums[1] != sums[0]


def test_jobs_are_what_they_say() -> None:
    assert len({job.name for job in JOBS}) == len(JOBS)
    cases = {str(case) for case in all_cases()}
    faults = [
        f"{program}: {fault}" for program, groups in FAULTS.items() for g in groups for fault in g
    ]
    assert len(faults) == 30
    assert {*faults} <= cases
    files = {part.partition("::")[0] for job in JOBS for part in job.arguments if ".py" in part}
    assert all(Path(file).exists() for file in files)


def test_jobs_select_tests_by_words_of_their_file() -> None:
    """If a word isn't in the file, pytest selects no test, and fails."""
    num_words = 0
    for job in JOBS:
        _, module, *options = job.arguments
        if module == "pytest":
            (tests,) = (part for part in options if ".py" in part)
            file, _, test = tests.partition("::")
            asked = [value for option, value in pairwise(options) if option in ("-k", "-m")]
            asked_for = re.sub(r"\b(not \w+|and)\b", "", " ".join([test, *asked]))
            words, text = re.findall(r"\w+", asked_for), Path(file).read_text()
            assert [word for word in words if word not in text] == [], job.name
            num_words += len(words)
    assert num_words > 15


def test_jobs_are_chosen_in_order_and_once() -> None:
    names = [job.name for job in jobs_named(["steps of two", "steps", "no such job"])]
    assert names == ["steps of two ranks", "steps of one rank"]


def test_the_page_says_what_ran_and_what_did_not() -> None:
    result = Result(
        name=JOBS[1].name,
        outcome=TIMED_OUT,
        seconds=20.0,
        exit_code=None,
        code="abc",
        commit="f00",
        card="NVIDIA H100",
        versions={"torch": "2.13.0"},
        started="2026-01-02T03:04:05",
        tests={"a": "passed", "b": "failed"},
    )
    again = replace(
        result, outcome=PASSED, started="2026-01-02T04", tests={"b": "passed"}, numbers={"x": 0.5}
    )
    older = replace(result, code="aaa", seconds=1000.0, numbers={"x": 7.0})
    on_cpu = replace(result, card="CPU", name="small")
    text = gpu_page.page([older, result, again, on_cpu], "\nrest\n")
    assert f"| {JOBS[1].name} | f00 | passed | 2, 0 | 40 |" in text
    assert "The last time 2026-01-02; torch 2.13.0." in text
    assert "Jobs that haven't run: faults (13), kernels (1), parity" in text
    assert "| x | 0.500 |" in text
    assert "small" not in text
    assert text.endswith("## Tried by hand\nrest\n")


def test_the_page_is_that_of_the_results() -> None:
    text = gpu_page.PAGE.read_text()
    results = read_results([gpu_page.RESULTS])
    assert gpu_page.page(results, text.partition("## Tried by hand")[2]) == text


@pytest.mark.parametrize("module", ["queue", "speed", "steps"])
def test_nothing_that_measures_interprets_kernels(module: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = f"import tests.gpu.{module}, triton; assert not triton.knobs.runtime.interpret"
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)


def test_the_speed_of_parts_is_measured_in_small(tmp_path: Path) -> None:
    job = next(job for job in JOBS if job.name.startswith("speed of parts, fp16"))
    (result,) = run_queue(tmp_path, [job], seconds=patient(120)).results
    assert result.outcome == PASSED, result.tail
    assert result.numbers["copy, share of copy"] == 1.0
    assert result.numbers["fused forward and backward, ms"] > 0
    assert result.numbers["distinct rows"] <= result.numbers["ids of a batch"]


def test_a_failed_rank_ends_the_others() -> None:
    code = "import os, time; os.environ['RANK'] == '1' and exit(7); time.sleep(1000)"
    command = ("-m", "tests.gpu.launch", "--ranks", "2", "-c", code)
    assert python(*command, timeout_s=60).returncode == 7


@pytest.mark.dealt_suite(seconds=20)
def test_kernels_compile_for_gpus(tmp_path: Path) -> None:
    environ = {"TRITON_CACHE_DIR": str(tmp_path)}
    shown = python("-m", "tests.support.compiled_kernels", env=environ)
    assert shown.stdout == "60 kernels compiled\n", shown.stderr


PTX, CUBIN = 1, 2
UNPACK = Path(bundle.__file__).with_name("unpack.py")


def container(*codes: tuple[int, int, bytes]) -> bytes:
    """Return GPU code as compilers embed it in libraries: kind, architecture and payload."""
    content = b""
    for kind, architecture, payload in codes:
        header = bundle._ENTRY.pack(kind, 0, 64, len(payload), 0, 0, 0, 0, architecture)
        content += header.ljust(64, b"h") + payload
    return bundle._CONTAINER.pack(bundle._MAGIC, 1, 16, len(content)) + content


def thinned(folder: Path, content: bytes, *gpus: int) -> bytes:
    """Thin a library's GPU code; return the library's content afterwards."""
    path = folder / "lib.so"
    path.write_bytes(content)
    num_bytes = thin(path, gpus)
    left = path.read_bytes()
    assert len(left) == len(content)
    assert num_bytes == sum(before != after for before, after in zip(content, left, strict=True))
    return left


ALL = ((CUBIN, 80, b"A" * 40), (CUBIN, 86, b"B" * 24), (CUBIN, 90, b"C" * 32), (PTX, 100, b"P" * 8))


@pytest.mark.parametrize(
    ("gpus", "needed"),
    [((90,), b"C"), ((80, 90), b"AC"), ((86,), b"B"), ((89,), b"B"), ((80,), b"A")],
)
def test_only_code_of_other_generations_is_lost(
    tmp_path: Path, gpus: tuple[int, ...], needed: bytes
) -> None:
    left = thinned(tmp_path, b"code" + container(*ALL) + b"more" + container(*ALL[:3]), *gpus)
    kept = {code for code in b"ABCP" if bytes([code]) * 8 in left}
    assert kept == {*needed}
    assert left.startswith(b"code")
    assert left.count(b"more") == 1


def test_text_is_kept_where_nothing_is_compiled_for_a_gpu(tmp_path: Path) -> None:
    codes = ((CUBIN, 80, b"A" * 8), (PTX, 80, b"P" * 8), (PTX, 89, b"Q" * 8), (PTX, 100, b"R" * 8))
    left = thinned(tmp_path, container(*codes), 90)
    assert [letter * 8 in left for letter in (b"A", b"P", b"Q", b"R")] == [
        False,
        False,
        True,
        False,
    ]


def test_what_no_gpu_could_run_is_left_as_it_is(tmp_path: Path) -> None:
    only_newer = container((CUBIN, 100, b"A" * 8))
    cut_off = container(*ALL)[:-1]
    for content in (only_newer, cut_off, bundle._MAGIC.to_bytes(4, "little"), b"no code"):
        assert thinned(tmp_path, content, 90) == content


@pytest.fixture
def pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pack an environment with a fake Python, and make libraries to link."""
    monkeypatch.setattr(bundle, "PIECE_BYTES", 1000)
    environment, folder = tmp_path / "environment", tmp_path / "pieces"
    site = environment / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (site / "numbers").write_bytes(Random(0).randbytes(9_000))
    (environment / "bin").mkdir()
    python = environment / "bin" / "python"
    python.write_text('#!/bin/sh\necho "proof for $PYTHONPATH in $PYTHONHOME"\n')
    python.chmod(0o755)
    (folder / "tools").mkdir(parents=True)
    shutil.copy2(shutil.which("zstd") or "", folder / "tools")
    pieces = bundle.pack(environment, folder, 1)
    assert len(pieces) > 1
    manifest = {"pieces": pieces, "linked": ["cu13"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "nvidia" / "cu13").mkdir(parents=True)
    shutil.rmtree(environment)
    return folder


def unpacked(pieces: Path) -> "subprocess.CompletedProcess[str]":
    libraries = ("--libraries", pieces.parent / "nvidia")
    return python(UNPACK, pieces.parent / "there", "--pieces", pieces, *libraries, timeout_s=60)


needs_zstd = pytest.mark.skipif(shutil.which("zstd") is None, reason="needs zstd")


@needs_zstd
def test_pieces_are_put_together_and_proved(pieces: Path) -> None:
    done = unpacked(pieces)
    there = pieces.parent / "there"
    assert done.returncode == 0, done.stderr
    assert f"proof for {bundle.ROOT} in {there}" in done.stdout
    site = there / "lib" / "python3.11" / "site-packages"
    assert (site / "numbers").stat().st_size == 9_000
    assert (site / "nvidia" / "cu13").resolve() == pieces.parent / "nvidia" / "cu13"


@needs_zstd
@pytest.mark.parametrize("harm", ["gone", "changed", "library"])
def test_what_is_missing_is_named(pieces: Path, harm: str) -> None:
    piece = pieces / "piece-01"
    if harm == "gone":
        piece.unlink()
    elif harm == "changed":
        piece.write_bytes(piece.read_bytes()[::-1])
    else:
        (pieces.parent / "nvidia" / "cu13").rmdir()
    done = unpacked(pieces)
    assert done.returncode == 1
    expected = "has no cu13; name the folder" if harm == "library" else f"{piece} is missing or not"
    assert expected in done.stderr
