"""Run a program on ranks that share a GPU: ``python -m tests.gpu.launch [--ranks 4] ARGUMENTS``.

Each rank claims to be on a separate host, so that NCCL agrees to share a GPU, and uses sockets.
Without a GPU all ranks are on one host.
"""

import os
import socket
import subprocess
import sys
import time

from tests.support.devices import device_env, on_gpus


def main(arguments: list[str]) -> int:
    """Run the ranks; once one fails, kill the others. Return the first nonzero exit code."""
    num_ranks = 4
    if arguments[:1] == ["--ranks"]:
        num_ranks, arguments = int(arguments[1]), arguments[2:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(num_ranks):
        place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if on_gpus() else {}
        environ = {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        environ = os.environ | environ | place | device_env(rank, is_measured=True)
        ranks.append(subprocess.Popen([sys.executable, *arguments], env=environ))
    codes: list[int | None] = [None]
    while None in codes and not any(codes):
        time.sleep(0.1)
        codes = [rank.poll() for rank in ranks]
    for rank in ranks if any(codes) else ():
        rank.kill()
        rank.wait()
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
