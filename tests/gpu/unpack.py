"""Check and unpack a bundle's pieces: ``python3 tests/gpu/unpack.py DEST``.

Runs with the machine's own Python, whose torch has CUDA's libraries. Afterwards
``. DEST/env.sh`` makes ``python`` the unpacked one, with this project on its path.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROOF = """
import torch, fbgemm_gpu, torchrec, tests.support.preloaded, torchrec_2dsp._compat.triton
print("torch", torch.__version__, "for CUDA", torch.version.cuda, "torchrec", torchrec.__version__)
if torch.cuda.is_available():
    ids = torch.tensor([3, 1, 3], device="cuda")
    print(torch.cuda.get_device_name(), torch.ops.fbgemm.asynchronous_complete_cumsum(ids).tolist())
    print("Triton runs:", torchrec_2dsp._compat.triton.runs_triton(ids.device))
else:
    print("no GPU")
"""


def unpack(folder: Path, destination: Path, libraries: Path) -> None:
    """Unpack the pieces in a folder, and link CUDA's libraries."""
    manifest = json.loads((folder / "manifest.json").read_text())
    destination.mkdir(parents=True)
    environ = {**os.environ, "LD_LIBRARY_PATH": str(folder / "tools")}
    zstd = subprocess.Popen(
        [folder / "tools" / "zstd", "-d", "--long=27", "--stdout"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
    )
    tar = subprocess.Popen(["tar", "-x", "-C", destination], stdin=zstd.stdout)
    assert zstd.stdin is not None
    for piece in manifest["pieces"]:
        path = folder / piece["name"]
        content = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(content).hexdigest() != piece["sha256"]:
            zstd.kill()
            sys.exit(f"error: {path} is missing or not as the manifest says; send it again")
        zstd.stdin.write(content)
    zstd.stdin.close()
    if zstd.wait() or tar.wait():
        sys.exit("error: the pieces could not be unpacked")
    (site,) = destination.glob("lib/python3*/site-packages")
    for name in manifest["linked"]:
        if not (libraries / name).is_dir():
            sys.exit(f"error: {libraries} has no {name}; name the folder that has: --libraries")
        (site / "nvidia").mkdir(exist_ok=True)
        (site / "nvidia" / name).symlink_to(libraries / name)


def write_env(destination: Path) -> Path:
    """Write the shell settings that the unpacked Python needs."""
    places = {
        "PATH": f"{destination / 'bin'}:$PATH",
        "LD_LIBRARY_PATH": str(destination / "lib"),
        "PYTHONHOME": str(destination),
        "PYTHONPATH": str(ROOT),
    }
    if driver := driver_folder():
        places["TRITON_LIBCUDA_PATH"] = driver
    path = destination / "env.sh"
    lines = [f"export {name}={shlex.quote(value)}" for name, value in places.items()]
    lines[0] = f'export PATH="{destination / "bin"}:$PATH"'
    path.write_text("\n".join([*lines, "unset PYTHONDONTWRITEBYTECODE", ""]))
    return path


def driver_folder() -> str:
    """Return the GPU driver's folder, which Triton finds only through ldconfig's cache."""
    places = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    places += ["/usr/local/nvidia/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64"]
    return next((place for place in places if place and Path(place, "libcuda.so.1").exists()), "")


def own_libraries() -> Path:
    """Return the running Python's folder with CUDA's libraries."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else Path("nvidia")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--pieces", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--libraries", type=Path, help="the folder that has cu13, cudnn, ...")
    options = parser.parse_args()
    start = time.monotonic()
    destination = options.destination.resolve()
    unpack(options.pieces.resolve(), destination, options.libraries or own_libraries())
    path = write_env(destination)
    print(f"unpacked in {time.monotonic() - start:.1f} s; the first import takes a while")
    command = f". {shlex.quote(str(path))} && exec python -c {shlex.quote(PROOF)}"
    failed = subprocess.run(["bash", "-c", command], check=False).returncode
    print(f"proved in {time.monotonic() - start:.1f} s; now: . {path}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
