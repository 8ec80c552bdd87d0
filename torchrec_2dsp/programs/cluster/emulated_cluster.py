"""`EmulatedCluster`: several hosts with several ranks each, on one Linux machine."""

import atexit
import itertools
import signal
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from torchrec_2dsp.programs.cluster import launch
from torchrec_2dsp.programs.cluster.errors import ClusterConfigError, ClusterError
from torchrec_2dsp.programs.cluster.kernel import CONGESTION_CONTROL, probe
from torchrec_2dsp.programs.cluster.launch import RunResult
from torchrec_2dsp.programs.cluster.link import Link
from torchrec_2dsp.programs.cluster.network import InterfaceBytes, Network, remove_orphans


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP came: what is open is closed, as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        self.number = number
        """The signal's."""
        super().__init__(signal.Signals(number).name)


class EmulatedCluster:
    """``hosts`` x ``ranks_per_host`` ranks; ranks of two hosts share a link of limited rate.

    Nothing is left behind, however the caller ends: after an exception, Ctrl-C or SIGTERM the
    cluster is removed at once. After SIGKILL its processes die at once, and the next cluster
    on this machine removes its namespaces.

    Example:
        >>> from torchrec_2dsp.programs.cluster.emulated_cluster import EmulatedCluster
        >>> with EmulatedCluster(2, 2, link="1gbit") as cluster:  # doctest: +SKIP
        ...     result = cluster.run(["-m", "torchrec_2dsp", "train", "--config", "x.toml"])
    """

    def __init__(
        self, hosts: int, ranks_per_host: int, link: str = "1gbit", *, delay_ms: float = 0.0
    ) -> None:
        """``link`` is the rate of each host in each direction: "200mbit", "1gbit", "none"."""
        for name, value in (("hosts", hosts), ("ranks_per_host", ranks_per_host)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ClusterConfigError(f"{name}={value!r} is not a positive integer")
        self.hosts = hosts
        """How many there are."""
        self.ranks_per_host = ranks_per_host
        """How many ranks share a host."""
        self.link = Link.parse(link, delay_ms)
        """What joins the hosts."""
        self._network = Network(hosts, self.link)
        self._run_numbers = itertools.count()

    def run(self, command: Sequence[str], *, timeout_s: float = 600) -> RunResult:
        """Run a Python command on every rank, through torchrun, one at a time.

        What rank 0 prints is printed; the end of every rank's output is in the result.

        Args:
            command: a script, or "-m" and a module; then its arguments.
            timeout_s: when to give up and show where each rank is.
        """
        launch.check_command(command)
        self._check_is_up()
        return launch.run(
            self._network,
            self.ranks_per_host,
            command,
            launch.rank_environment(self.describe(), self.launcher()),
            self.folder / f"run{next(self._run_numbers)}",
            timeout_s,
        )

    def interface_bytes(self, host: int) -> InterfaceBytes:
        """What a host has sent and received so far."""
        self._check_is_up()
        return self._network.interface_bytes(host)

    @property
    def folder(self) -> Path:
        """All hosts see it, and `run` keeps every rank's output here. It goes with the cluster."""
        return self._network.folder

    def describe(self) -> str:
        """The cluster in words, for reports. Ranks find it in ``EMULATED_CLUSTER``."""
        kernel = probe()
        if self.link.delay_ms:
            delay = f"{self.link.delay_ms:g} ms of delay one way"
        else:
            delay = "no delay" if kernel.can_delay else "no delay (this kernel has no netem)"
        rate = "no limit" if self.link.bits_per_s is None else f"{self.link} each way"
        control = CONGESTION_CONTROL
        if not kernel.can_choose_congestion_control:
            control = "the kernel's default"
        return (
            f"{self.hosts} x {self.ranks_per_host} ranks (hosts x ranks per host), emulated on one "
            f"machine; per host {rate}, {delay}, congestion control {control}"
        )

    def launcher(self) -> str:
        """The command line that makes such a cluster. Ranks find it in
        ``EMULATED_CLUSTER_LAUNCHER``."""
        delay = f" --delay-ms {self.link.delay_ms:g}" if self.link.delay_ms else ""
        return (
            f"torchrec-2dsp cluster --hosts {self.hosts} --ranks-per-host {self.ranks_per_host} "
            f"--link {self.link.rate}{delay} --"
        )

    def close(self) -> None:
        """Stop what runs and remove the network. Does nothing the second time."""
        if self in _open_clusters and self._network.name.is_mine():
            self._network.take_down()
            _open_clusters.discard(self)
            if not _open_clusters:
                _restore_signals()

    def __enter__(self) -> "EmulatedCluster":
        _close_at_exit()
        remove_orphans()
        _open_clusters.add(self)
        try:
            _catch_signals()
            self._network.set_up()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_is_up(self) -> None:
        if self not in _open_clusters:
            raise ClusterError("the cluster isn't up; use it inside `with EmulatedCluster(...)`")


_open_clusters: set[EmulatedCluster] = set()
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@cache
def _close_at_exit() -> None:
    """Once, arrange that no cluster outlives the program."""
    atexit.register(_close_all)


def _close_all() -> None:
    for cluster in list(_open_clusters):
        cluster.close()


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(number)


def _catch_signals() -> None:
    """By default these end a Python process without any cleaning up."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _terminate)


def _restore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is _terminate:
                signal.signal(number, signal.SIG_DFL)
