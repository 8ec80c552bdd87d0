"""Slow down everything that ranks do, so that a few cores behave like a processor for each rank.

Where N ranks share c cores, a rank that waits lends its core to another: bubbles cost nothing, and
balance gains nothing. `torchrec-2dsp cluster --processor-per-rank` makes every link ``2N/c`` times
slower, and starts this module on each rank, which runs a command in equally slow time:

    computes 5 ms | sleeps 15 ms | a collective, 4 times slower | computes ...     (2N/c = 4)

Half of the cores are idle then, so a rank seldom waits for one. A rank sleeps before it issues a
collective, before it waits for one, before a step of an optimizer, and before it reads a clock:
``time.perf_counter`` and ``time.time`` count the cluster's seconds, so nothing that programs
measure has to be converted; ``time.monotonic``, and with it every deadline, counts real ones.
Gloo's own threads and the kernel aren't slowed down.
"""

import os
import runpy
import sys
import threading
import time
import timeit
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import record_function

from torchrec_2dsp._compat.c10d import make_gloo_by
from torchrec_2dsp.comms.full_duplex import (
    OPERATIONS,
    FullDuplexGroup,
    GlooGroup,
    full_duplex_backend,
)
from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.traces import PAYING

VARIABLE = "TORCHREC_2DSP_DILATION"
"""The environment variable that tells a cluster's ranks how much slower time passes."""

_MOST_CREDIT_S = 0.001
"""The most seconds by which a rank that slept too long shortens its next sleep."""

_TASKS = Path("/proc/self/task")
_now_s, _date_s, _sleep = time.perf_counter, time.time, time.sleep


def dilation_for(num_ranks: int) -> float:
    """Return the factor by which time has to slow down for this many ranks here; 1 for none."""
    return max(1.0, 2.0 * num_ranks / len(os.sched_getaffinity(0)))


class _Bill(threading.local):
    """A thread's debt of sleep: its wall time is to be ``factor`` times its processor time.

    The main thread also pays for all threads that issue no collectives, except gloo's.
    """

    factor = 1.0
    """The factor by which time passes slower, for all threads."""

    paying: tuple[int, ...] = ()
    """The threads that pay for themselves."""

    def __init__(self) -> None:
        self._beside_s: dict[int, float] = {}
        self.start()

    def start(self) -> None:
        """Owe nothing, as a new thread or the first one of a fork."""
        _Bill.paying = (*_Bill.paying, threading.get_native_id())
        self._is_main = threading.current_thread() is threading.main_thread()
        self._num_threads = 0
        self._computed_beside_s()
        self._paid_s, self._at_s = time.thread_time(), _now_s()

    def pay(self) -> None:
        """Sleep until the wall time is long enough."""
        computed_s = time.thread_time() - self._paid_s
        # Threads other than the main one are often idle, which pays for nothing.
        spent_s = computed_s
        if self._is_main:
            computed_s += self._computed_beside_s()
            spent_s = _now_s() - self._at_s
        owed_s = self.factor * computed_s - spent_s
        if owed_s > 0.0:
            with record_function(PAYING) if self._is_main else nullcontext():
                _sleep(owed_s)
        self._at_s = max(self._at_s + spent_s + owed_s, _now_s() - _MOST_CREDIT_S)
        self._paid_s = time.thread_time()

    def wait(self, wait: Callable[..., Any], *arguments: Any) -> Any:
        """Pay, then wait; waiting pays for nothing."""
        self.pay()
        start_s = _now_s()
        try:
            return wait(*arguments)
        finally:
            waited_s = _now_s() - start_s
            self._at_s = _now_s() if waited_s > _MOST_CREDIT_S else self._at_s + waited_s

    def _computed_beside_s(self) -> float:
        """Return the processor time of threads that don't pay, since the last call."""
        num_threads = _TASKS.stat().st_nlink
        if num_threads != self._num_threads:
            self._num_threads = num_threads
            threads = {int(name) for name in os.listdir(_TASKS)}.difference(self.paying)
            self._beside_s = {
                thread: self._beside_s.get(thread, 0.0)
                for thread in threads
                if not _is_gloo(thread)
            }
        grown_s = 0.0
        for thread, before_s in self._beside_s.items():
            with suppress(OSError):  # It has ended.
                # Linux numbers the clocks of threads like this.
                self._beside_s[thread] = time.clock_gettime((~thread << 3) | 6)
                grown_s += self._beside_s[thread] - before_s
        return grown_s


def _is_gloo(thread: int) -> bool:
    try:
        return "gloo" in (_TASKS / str(thread) / "comm").read_text()
    except OSError:
        return True  # It has ended.


_BILL = _Bill()


def dilation() -> float:
    """Return the factor by which time passes slower in this process; 1 unless a cluster set it."""
    return _Bill.factor


class _PaidWork(dist.Work):
    """A collective for which a rank pays before it waits."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return _BILL.wait(self._work.wait, timeout)

    def get_future(self) -> torch.futures.Future[Any]:
        return self._work.get_future()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()


class _PaidGloo(GlooGroup):
    """Gloo, with a rank that pays before each collective."""

    @property
    def options(self) -> Any:
        """Gloo's own options."""
        return self._gloo.options

    def _set_sequence_number_for_group(self) -> None:
        """Let gloo number its collectives, as torch asks of each group."""
        self._gloo._set_sequence_number_for_group()


class _PaidFullDuplex(FullDuplexGroup):
    """The full-duplex all-to-all, with a rank that pays before each collective."""


def _paid(issue: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    def operation(self: GlooGroup, *arguments: Any, **options: Any) -> dist.Work:
        _BILL.pay()
        return _PaidWork(issue(self, *arguments, **options))

    return operation


for _kind in (_PaidGloo, _PaidFullDuplex):
    for _name in OPERATIONS:
        setattr(_kind, _name, _paid(getattr(_kind, _name)))


def _clock(real_s: Callable[[], float]) -> Callable[[], float]:
    """Return a clock that runs as slowly as the cluster's time."""
    start_s = real_s()

    def seconds() -> float:
        _BILL.pay()
        return start_s + (real_s() - start_s) / _Bill.factor

    return seconds


def _sleep_slowly(seconds: float) -> None:
    _BILL.wait(_sleep, _Bill.factor * seconds)


def dilate(factor: float) -> None:
    """Let time pass ``factor`` times slower in this process and its forks, from now on.

    Groups that exist already, and clocks that were imported by name, stay as they are.
    """
    _Bill.factor = factor
    gloo = dist.ProcessGroupGloo
    make_gloo_by(lambda *arguments, **options: _PaidGloo(gloo(*arguments, **options)))
    full_duplex_backend(lambda *arguments: _PaidFullDuplex(gloo(*arguments)))
    register_optimizer_step_pre_hook(lambda *arguments: _BILL.pay())
    os.register_at_fork(after_in_child=_BILL.start)
    time.sleep = _sleep_slowly
    time.time, time.perf_counter = _clock(_date_s), _clock(_now_s)
    time.perf_counter_ns = lambda: round(1e9 * time.perf_counter())
    timeit.default_timer = time.perf_counter
    _BILL.start()


def run(command: Sequence[str]) -> None:
    """Run a rank's command in slower time: a script, or -m and a module; then its arguments.

    Raises:
        ConfigError: the environment doesn't say how much slower.
    """
    try:
        factor = float(os.environ[VARIABLE])
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{VARIABLE} is not set to a number; use torchrec-2dsp cluster --processor-per-rank"
        ) from error
    dilate(factor)
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path.insert(0, str(Path(command[0]).parent.resolve()))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    from torchrec_2dsp.programs import dilation as this_module  # not the copy that is run

    this_module.run(sys.argv[1:])
