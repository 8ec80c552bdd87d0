"""`plan` and `simulate`: plan training for machines that needn't be present."""

from pathlib import Path
from shlex import quote
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from torchrec_2dsp.errors import ConfigError
from torchrec_2dsp.programs.cli.console import (
    ReadingProgress,
    check_output,
    set_option,
    show_written,
    shown_errors,
)
from torchrec_2dsp.report.table import MISSING, Table

if TYPE_CHECKING:
    from torchrec_2dsp.planner.dense_search import DenseChoices
    from torchrec_2dsp.planner.explanation import Explanation

_Config = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help=r"A config for train, or one with a model and \[machines]: a TOML file, or one that "
        "ships, such as demo or plan.",
    ),
]
_Only = Annotated[
    str,
    typer.Option(
        "--only",
        metavar="RUN",
        help="Plan this run of a train config.",
        show_default="the only run, or else every choice left to the planner",
    ),
]
_Calibration = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="The machines: a file from calibrate, or one that ships, such as emulated_1gbit.",
        show_default="the config's",
    ),
]
_RanksPerHost = Annotated[
    int | None, typer.Option(min=1, help="Ranks per host.", show_default="as calibrated")
]
_Overrides = Annotated[list[str] | None, set_option("batch_size=512 or machines.slower.link=2")]


@shown_errors()
def plan(
    config: _Config,
    overrides: _Overrides = None,
    only: _Only = "",
    calibration: _Calibration = "",
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks.", show_default="as calibrated")
    ] = None,
    ranks_per_host: _RanksPerHost = None,
    output: Annotated[
        Path | None,
        typer.Option(
            *("--output", "--json"), help="Write the plan here; a run with `plan = FILE` uses it."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write an HTML page with plots here; needs plotly.")
    ] = None,
) -> None:
    """Plan a model's tables by predicted cost, and explain each choice.

    It needs neither the machines nor the model's weights:

    torchrec-2dsp plan --config demo --calibration emulated_1gbit
    """
    from torchrec_2dsp.plan.serialize import save
    from torchrec_2dsp.programs.launch import quiet_upstream
    from torchrec_2dsp.programs.plan import OPEN_RUN, of_training, planning, to_plan
    from torchrec_2dsp.report.page import graph_objects

    quiet_upstream()
    check_output(output, ".json")
    check_output(html, ".html")
    if html is not None:
        graph_objects()  # Reports a missing package before the search.
    console = Console()
    changes = _with_machines(overrides, calibration, ranks_per_host, world_size)
    with ReadingProgress(console) as progress:
        source = to_plan(config, changes, run=only, progress=progress.show)
    work = planning(source)
    with console.status("searching"):
        planned = work.planner.plan(work.model, work.sharders)
    # As it is: a log file is as wide as a terminal.
    explained = work.explained()
    typer.echo(f"{fill(work.title, 100)}\n\n{explained}" if work.title else str(explained))
    if work.dense is not None:
        typer.echo(f"\nWays to run the dense part, by predicted time:\n\n{work.dense}")
    if output is not None:
        save(planned, output)
    if html is not None:
        explained.write_html(html, f"Why this plan: {Path(config).name}")
    show_written(console, output, html)
    if output is not None and work.title:
        values = [*of_training(changes), f"runs.{OPEN_RUN}.plan={output}"]
        sets = " ".join(f"--set {quote(value)}" for value in values)
        machines = source.machines
        is_one_host = machines.num_ranks <= machines.ranks_per_host
        ranks = f"--standalone --nproc-per-node {machines.num_ranks}" if is_one_host else "..."
        how = f"train --config {quote(config)} {sets} --only {OPEN_RUN}"
        text = f"to train by it: torchrun {ranks} -m torchrec_2dsp {how}"
        console.print(Text(text), soft_wrap=True)


def _with_machines(
    overrides: list[str] | None,
    calibration: str,
    ranks_per_host: int | None,
    world_size: int | None = None,
) -> list[str]:
    """Return the overrides, with the machine options added as more overrides."""
    options = {
        "calibration": calibration,
        "ranks_per_host": ranks_per_host,
        "num_ranks": world_size,
    }
    machines = [f"machines.{name}={value}" for name, value in options.items() if value]
    return [*(overrides or []), *machines]


@shown_errors()
def simulate(
    config: _Config,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, such as 256,512,1024,2048,4096.")],
    overrides: _Overrides = None,
    only: _Only = "",
    calibration: _Calibration = "",
    ranks_per_host: _RanksPerHost = None,
) -> None:
    """Predict the best plan's step time for several numbers of ranks.

    The global batch of a train config is the same for all of them:

    torchrec-2dsp simulate --config demo --calibration emulated_1gbit --ranks 4,8,16
    """
    from torchrec_2dsp.programs.launch import quiet_upstream
    from torchrec_2dsp.programs.plan import on_ranks, planning, to_plan

    quiet_upstream()
    sizes = ranks.replace(" ", "").split(",")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise ConfigError(f"--ranks {ranks}: give numbers of ranks, such as 256,512")
    console = Console()
    changes = _with_machines(overrides, calibration, ranks_per_host)
    with ReadingProgress(console) as progress:
        source = to_plan(config, changes, run=only, progress=progress.show)
    simulated: list[tuple[int, Explanation, DenseChoices | None]] = []
    # All are checked before the first search.
    sources = {size: on_ranks(source, size) for size in sorted(map(int, sizes))}
    for size, sized in sources.items():
        with console.status(f"searching for {size:,} ranks"):
            work = planning(sized)
            work.planner.search(work.model, work.sharders)
        simulated.append((size, work.planner.explain(), work.dense))
    show_simulated(simulated, console)


def show_simulated(
    simulated: "list[tuple[int, Explanation, DenseChoices | None]]", console: Console
) -> None:
    """Print each world's step, efficiency, memory, imbalance, mesh, and best dense part."""
    rows = []
    first_s = simulated[0][1].cost.total_s
    for size, explanation, _ in simulated:
        seconds = explanation.cost.total_s
        samples = size * explanation.setting.workload.batch_size
        ids = explanation.ids_by_rank
        rows.append(
            [
                f"{size:,}",
                f"{explanation.setting.workload.batch_size:,}",
                f"{1e3 * seconds:,.2f}",
                f"{samples / seconds:,.0f}" if seconds else MISSING,
                f"{first_s / seconds:.1%}" if seconds else MISSING,
                f"{explanation.bytes_by_rank.max(initial=0.0) / 1e9:,.2f}",
                f"{ids.max() / ids.mean():.2f}" if ids.any() else MISSING,
                explanation.where,
            ]
        )
    headings = (
        *("ranks", "batch", "step ms", "samples/s", "efficiency", "GB per rank", "imbalance"),
        "mesh",
    )
    console.print(Table(headings, rows, words={"mesh"}))
    if any(dense is not None for _, _, dense in simulated):
        _show_dense(simulated, console)
    hardware = simulated[0][1].setting.calibration.hardware
    console.print(
        f"Predicted, not measured, from {hardware.name} (measured: {hardware.measured}). "
        "Batch: a rank's samples per step. Efficiency: samples per second and rank, compared with "
        f"world size {simulated[0][0]:,}. Imbalance: the busiest rank's lookups over the mean."
    )


def _show_dense(
    simulated: "list[tuple[int, Explanation, DenseChoices | None]]", console: Console
) -> None:
    """Print the best way to run each world's dense part."""
    console.print(
        "The steps above include the dense part's computation, but not its communication. The best "
        "way to run it alone:"
    )
    rows = [
        [
            f"{size:,}",
            f"{1e3 * dense.best.cost.total_s:,.2f}",
            f"{dense.best.cost.busy_share:.0%}",
            f"{dense.best.memory_bytes / 1e9:,.2f}",
            str(dense.best.plan),
        ]
        for size, _, dense in simulated
        if dense is not None
    ]
    headings = ("ranks", "ms", "busy", "GB per rank", "dense part")
    console.print(Table(headings, rows, words={"dense part"}))
