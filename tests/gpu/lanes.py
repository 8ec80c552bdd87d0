"""Lanes in a GPU's queue: each runs one job at a time, beside other lanes' jobs.

Ranks that share a GPU take turns, unless an MPS server lets them run at once. A killed rank
also kills its server's other ranks, so each lane has its own server.
"""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
_PROBE_S = 60.0
_PROBE = """
import torch
x = torch.ones(256, 256, device="cuda")
assert (x @ x).sum().item() == 256.0**3
"""


def describe_machine() -> None:
    """Print the card and the installed versions, as JSON."""
    import torch
    from torch.cuda import nccl

    names = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu")
    versions = {"python": sys.version.split()[0]}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    card = "CPU"
    if torch.cuda.is_available():
        card = torch.cuda.get_device_name()
        versions["CUDA"] = str(torch.version.cuda)
        versions["NCCL"] = ".".join(map(str, nccl.version()))
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        versions["driver"] = answer[0] if answer else "unknown"
    print(json.dumps({"card": card, "versions": versions}))


class Lane:
    """A slot that runs one job at a time."""

    def __init__(self, number: int, folder: Path, *, has_gpu: bool) -> None:
        self.number = number
        self._folder, self._has_gpu = folder, has_gpu
        self._num_servers = 0
        self._server: Path | None = None
        self._begin_server()

    def environ(self, *, shares: bool) -> dict[str, str]:
        """Return a job's environment variables; ``shares`` if its ranks compute at once."""
        environ = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if self._has_gpu:
            # Else FBGEMM's import makes the GPU unusable in forks.
            environ |= {"TESTS_DEVICE": "cuda", "TRITON_INTERPRET": "0"}
            environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        return environ | (self._server_environ() if shares else {})

    def renew(self, *, is_sure: bool) -> bool:
        """Start another server after a job that ended badly; tell whether the GPU can be used.

        ``is_sure`` skips trying it.
        """
        self.close()
        self._begin_server()
        if is_sure or self._can_compute():
            return True
        self.close()  # It may still work without a server.
        return self._can_compute()

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._control(stdin="quit\n")
            self._server = None

    def _begin_server(self) -> None:
        if not self._has_gpu:
            return
        self._num_servers += 1
        self._server = self._folder / f"mps{self.number}-{self._num_servers}"
        self._server.mkdir()
        if not self._control("-d"):
            print(f"lane {self.number} has no MPS server: its ranks take turns", flush=True)
            self._server = None

    def _control(self, *arguments: str, stdin: str = "") -> bool:
        environ = os.environ | self._server_environ()
        try:
            answer = subprocess.run(
                [CONTROL, *arguments], env=environ, input=stdin, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return answer.returncode == 0

    def _server_environ(self) -> dict[str, str]:
        if self._server is None:
            return {}
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        return dict.fromkeys(names, str(self._server))

    def _can_compute(self) -> bool:
        environ = os.environ | self._server_environ()
        try:
            command = [sys.executable, "-c", _PROBE]
            return not subprocess.run(command, env=environ, timeout=_PROBE_S).returncode
        except subprocess.TimeoutExpired:
            return False
