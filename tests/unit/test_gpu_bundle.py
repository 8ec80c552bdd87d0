"""A bundle's pieces are complete, and its libraries keep the GPU code that is needed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.gpu import bundle
from tests.gpu.bundle import thin
from tests.support.slices import patient

PTX, CUBIN = 1, 2
UNPACK = Path(bundle.__file__).with_name("unpack.py")


def container(*codes: tuple[int, int, bytes]) -> bytes:
    """Return GPU code as compilers put it into libraries: kind, architecture and payload."""
    content = b""
    for kind, architecture, payload in codes:
        header = bundle._ENTRY.pack(kind, 0, 64, len(payload), 0, 0, 0, 0, architecture)
        content += header.ljust(64, b"h") + payload
    return bundle._CONTAINER.pack(bundle._MAGIC, 1, 16, len(content)) + content


def thinned(folder: Path, content: bytes, *gpus: int) -> bytes:
    """Return what is left of a library."""
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
    """Pack an environment whose Python proves nothing, and make libraries to link."""
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
    folder = pieces.parent
    command = [sys.executable, UNPACK, folder / "there", "--pieces", pieces]
    command += ["--libraries", folder / "nvidia"]
    return subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)


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
