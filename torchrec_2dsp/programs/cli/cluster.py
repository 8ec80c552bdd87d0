"""`cluster`: runs a command on an emulated cluster, or measures the cluster's links."""

import re
import signal
import sys
from typing import Annotated, NoReturn

import typer

_TOO_LATE = 124
"""The exit code that `timeout` has, too."""


def cluster(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After `--`: a script, or -m and a module; then its arguments."),
    ] = None,
    hosts: Annotated[int, typer.Option(help="Number of hosts.")] = 2,
    ranks_per_host: Annotated[int, typer.Option(help="Number of ranks per host.")] = 2,
    link: Annotated[str, typer.Option(help="Each host's rate: 200mbit, 1gbit, none.")] = "1gbit",
    delay_ms: Annotated[
        float, typer.Option(help="One-way delay in ms, if the kernel supports it.")
    ] = 0.0,
    processor_per_rank: Annotated[
        bool,
        typer.Option(
            "--processor-per-rank",
            help="Slow time down, so that each rank seems to have a processor of its own.",
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(help="Deadline of the command, in seconds.")] = 3600.0,
    check: Annotated[bool, typer.Option("--check", help="Measure the links first.")] = False,
    if_permitted: Annotated[
        bool,
        typer.Option(
            "--if-permitted", help="Where no cluster can be emulated, say why and succeed."
        ),
    ] = False,
) -> None:
    """Run a Python command on hosts emulated by network namespaces, one torchrun on each.

    It needs Linux and root, and leaves nothing behind:

    torchrec-2dsp cluster --hosts 2 --link 1gbit -- -m torchrec_2dsp train --config FILE
    """
    from torchrec_2dsp.programs.cluster.emulated_cluster import EmulatedCluster, Terminated
    from torchrec_2dsp.programs.cluster.kernel import ClusterError, CommandFailed, available
    from torchrec_2dsp.programs.cluster.self_check import check_links

    _check_work(bool(command) or check, timeout)
    if if_permitted and (refusal := available()):
        print(f"skipped, because no cluster can be emulated here: {refusal}", file=sys.stderr)
        return
    try:
        with EmulatedCluster(
            hosts,
            ranks_per_host,
            link,
            delay_ms=delay_ms,
            processor_per_rank=processor_per_rank,
        ) as emulated:
            print(emulated.describe(), file=sys.stderr)
            if check:
                check_links(emulated)  # Rank 0 prints a table.
            if command:
                emulated.run(command, timeout_s=timeout)
    except CommandFailed as error:
        _fail(str(error), next((code for code in error.exit_codes if code), _TOO_LATE))
    except ClusterError as error:
        # Arguments are named as options, such as --ranks-per-host=0.
        text = re.sub(r"^\w+=", lambda name: "--" + name[0].replace("_", "-"), str(error))
        _fail(text, 2)
    except Terminated as error:
        _fail(str(error), 128 + error.number)
    except KeyboardInterrupt:
        _fail("interrupted", 128 + signal.SIGINT)


def _check_work(has_work: bool, timeout_s: float) -> None:
    if not has_work:
        _fail("nothing to do; give a command after `--`, or --check", 2)
    if not timeout_s > 0:
        _fail(f"--timeout={timeout_s:g} leaves no time; give seconds above 0", 2)


def _fail(message: str, exit_code: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(exit_code)
