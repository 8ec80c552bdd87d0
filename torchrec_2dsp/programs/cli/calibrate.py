"""`calibrate`: measures the speed of the network and the machines, for the planner."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.cli.console import check_output, show_written, shown_errors
from torchrec_2dsp.report.table import MISSING, Table

if TYPE_CHECKING:
    from torchrec_2dsp.cost.calibration import Calibration, KernelCost
    from torchrec_2dsp.cost.collectives import CollectiveCost


_MAX_FOREIGN_LOAD = 0.5
"""More busy cores than this cause a warning."""


@shown_errors()
def calibrate(
    output: Annotated[
        Path,
        typer.Option(
            *("--output", "--out"), help="Write the calibration here, such as my_cluster.toml."
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="Name of this hardware.", show_default="the file's name")
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the tables: cpu or cuda.")] = "cpu",
) -> None:
    """Measure the cost of collectives and row operations on this cluster, in under 3 minutes.

    Start it on all hosts that a model will train on, or on two of them, with torchrun:

    torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp calibrate --output FILE

    Nothing else should run on these hosts meanwhile.
    """
    from torchrec_2dsp._compat.torchrec import get_local_size
    from torchrec_2dsp.comms.alarm import agreeing
    from torchrec_2dsp.comms.groups import world_group
    from torchrec_2dsp.cost.measuring.calibrate import calibrate as measure
    from torchrec_2dsp.cost.measuring.clock import CAREFUL
    from torchrec_2dsp.cost.measuring.fit import unexplained
    from torchrec_2dsp.errors import CalibrationError
    from torchrec_2dsp.programs.bench.machine import foreign_load_now
    from torchrec_2dsp.programs.launch import launched_world, quiet_upstream

    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r} is unknown; use cpu or cuda")
    quiet_upstream()
    with launched_world(device, "calibrate") as rank:
        import torch

        torch.set_num_threads(1)
        world = world_group()
        # If rank 0 can't write, all ranks raise.
        with agreeing(world):
            _check_output(None if rank else output)
        if world.size() == 1:
            raise CalibrationError(
                "one rank has no network to measure; start at least two, best on two hosts"
            )
        local_world_size = get_local_size(world.size())
        console = Console(quiet=rank != 0)
        _warn_of_load(foreign_load_now(world), console)
        with console.status("") as status:
            shown = set()

            def show(what: str) -> None:
                if console.is_terminal:
                    status.update(f"measuring {what}")
                elif what not in shown:
                    shown.add(what)
                    console.print(f"measuring {what}")

            calibration = measure(
                world, local_world_size=local_world_size, name=name or output.stem, progress=show
            )
        if error := unexplained(calibration, CAREFUL.tolerance):
            raise CalibrationError(error)
        if rank:
            return
        show_calibration(calibration, console)
        calibration.save(output)
        show_written(console, output)


def _check_output(output: Path | None) -> None:
    check_output(output, ".toml")
    if output is not None and output.exists() and b"[collectives" not in output.read_bytes():
        raise ConfigError(f"{output} is no calibration, and would be overwritten; use another name")


def _warn_of_load(num_cores: float, console: Console) -> None:
    if num_cores > _MAX_FOREIGN_LOAD:
        console.print(
            f"warning: other programs keep {num_cores:.1f} cores busy; constants will be wrong, or "
            "be refused at the end",
            style="yellow",
            soft_wrap=True,
        )


def show_calibration(calibration: "Calibration", console: Console) -> None:
    """Print the constants as times of one message, and bytes per second."""
    hardware = calibration.hardware
    console.print(
        f"{hardware.name}: {hardware.num_hosts} x {hardware.ranks_per_host} ranks (hosts x ranks "
        f"per host) on {hardware.device}, {hardware.processor}",
        soft_wrap=True,
    )
    collectives = [
        [name, *_collective_cells(cost)]
        for name, cost in calibration.collectives
        if cost is not None
    ]
    headings = ("collective", "shortest", "in a host", "host's link", "error", "largest")
    console.print(Table(headings, collectives, words={"collective"}))
    kernels = [
        [name, *_kernel_cells(cost)] for name, cost in calibration.kernels if cost is not None
    ]
    headings = ("work", "shortest", "ns per row", "bytes", "error", "largest")
    console.print(Table(headings, kernels, words={"work"}))
    for name in ("lookup", "update"):
        cost = getattr(calibration.kernels, name)
        console.print(
            f"{name}: in addition {_speed(cost.per_vector_byte_s)} of pooled vectors, and "
            f"{_speed(cost.per_row_byte_s)} of a batch's distinct rows.",
            soft_wrap=True,
        )
    console.print(
        f"Between two computations a collective takes {1e6 * calibration.turn_s:,.0f} us longer; "
        f"computing hides {calibration.hidden_share:.0%} of the communication beside it."
    )
    console.print(
        "Shortest: the time of the smallest message between two ranks, or of the smallest call. In "
        "a host: what a rank sends to its neighbours per second; host's link: what all ranks of a "
        "host send to other hosts. Error: the distance of these constants from the longer half of "
        "the measurements, in the median, and the largest."
    )


def _collective_cells(cost: "CollectiveCost") -> list[str]:
    return [
        f"{(cost.base_s + cost.per_peer_s) * 1e6:,.0f} us",
        _speed(cost.local_s_per_byte),
        _speed(cost.link_s_per_byte),
        f"{cost.median_error:.0%}",
        f"{cost.max_error:.0%}",
    ]


def _kernel_cells(cost: "KernelCost") -> list[str]:
    return [
        f"{cost.base_s * 1e6:,.0f} us",
        f"{cost.per_item_s * 1e9:,.1f}",
        _speed(cost.per_byte_s),
        f"{cost.median_error:.0%}",
        f"{cost.max_error:.0%}",
    ]


def _speed(s_per_byte: float | None) -> str:
    if s_per_byte is None:
        return MISSING
    if not s_per_byte:
        return "free"
    return f"{1e-6 / s_per_byte:,.0f} MB/s"
