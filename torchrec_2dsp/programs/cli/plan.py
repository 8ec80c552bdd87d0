"""`plan` and `simulate`: what would be trained how, on machines that needn't be there."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from torchrec_2dsp.programs.cli.console import check_writable, shown_errors
from torchrec_2dsp.report.table import MISSING, Table

if TYPE_CHECKING:
    from torchrec_2dsp.planner.dense_search import DenseChoices
    from torchrec_2dsp.planner.explanation import Explanation

_Config = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="Model and machines: plan or another config that ships, or a TOML file.",
    ),
]
_Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY.SUB=VALUE",
        help="Change a value of the file, such as batch_size=4096 or machines.num_ranks=64. Can "
        "be repeated.",
    ),
]


def plan(
    config: _Config,
    overrides: _Overrides = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the plan here, for torchrec_2dsp.plan.serialize.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with plots here, which needs plotly.")
    ] = None,
) -> None:
    """Plan the tables of a model by predicted cost, and say why each is sharded as it is.

    Neither the machines nor the model's weights have to be there.
    """
    with shown_errors():
        _plan(config, overrides or [], json, html)


def _plan(name: str, overrides: list[str], json: Path | None, html: Path | None) -> None:
    from torchrec_2dsp.plan.serialize import save
    from torchrec_2dsp.programs.config.config_file import load_config
    from torchrec_2dsp.programs.launch import quiet_upstream
    from torchrec_2dsp.programs.plan import PlanConfig, planning
    from torchrec_2dsp.report.page import graph_objects

    quiet_upstream()
    check_writable(json)
    check_writable(html)
    if html is not None:
        graph_objects()  # Said before the search if it is missing.
    work = planning(load_config(PlanConfig, name, overrides))
    console = Console()
    with console.status("searching"):
        plan = work.planner.plan(work.model, work.sharders)
    # As it is: a log file is as wide as a terminal.
    explained = work.explained()
    typer.echo(str(explained))
    if work.dense is not None:
        typer.echo(f"\nThe dense part, by predicted time; the first is best.\n\n{work.dense}")
    if json is not None:
        save(plan, json)
    if html is not None:
        explained.write_html(html, f"Why this plan: {Path(name).name}")
    for written in (json, html):
        if written is not None:
            console.print(f"wrote {written}", soft_wrap=True)


def simulate(
    config: _Config,
    ranks: Annotated[str, typer.Option(help="Sizes of the world, such as 256,512,1024,2048,4096.")],
    overrides: _Overrides = None,
) -> None:
    """Predict the best plan's step on worlds of several sizes."""
    with shown_errors():
        _simulate(config, ranks, overrides or [])


def _simulate(name: str, ranks: str, overrides: list[str]) -> None:
    from torchrec_2dsp.errors import ConfigError
    from torchrec_2dsp.programs.config.config_file import load_config
    from torchrec_2dsp.programs.launch import quiet_upstream
    from torchrec_2dsp.programs.plan import PlanConfig, planning

    quiet_upstream()
    sizes = ranks.replace(" ", "").split(",")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise ConfigError(f"--ranks {ranks}: give sizes of worlds, such as 256,512")
    console = Console()
    simulated: list[tuple[int, Explanation, DenseChoices | None]] = []
    for size in sorted(map(int, sizes)):
        with console.status(f"searching for {size:,} ranks"):
            work = planning(
                load_config(PlanConfig, name, [*overrides, f"machines.num_ranks={size}"])
            )
            work.planner.search(work.model, work.sharders)
        simulated.append((size, work.planner.explain(), work.dense))
    show_simulated(simulated, console)


def show_simulated(
    simulated: "list[tuple[int, Explanation, DenseChoices | None]]", console: Console
) -> None:
    """Print each world's step, efficiency, memory, mesh, and best way to run its dense part."""
    rows = []
    first_s = simulated[0][1].cost.total_s
    for size, explanation, _ in simulated:
        seconds = explanation.cost.total_s
        samples = size * explanation.setting.workload.batch_size
        rows.append(
            [
                f"{size:,}",
                f"{1e3 * seconds:,.2f}",
                f"{samples / seconds:,.0f}" if seconds else MISSING,
                f"{first_s / seconds:.1%}" if seconds else MISSING,
                f"{explanation.bytes_by_rank.max(initial=0.0) / 1e9:,.2f}",
                explanation.where,
            ]
        )
    headings = ("ranks", "step ms", "samples/s", "efficiency", "GB per rank", "mesh")
    console.print(Table(headings, rows, words={"mesh"}))
    if any(dense is not None for _, _, dense in simulated):
        _show_dense(simulated, console)
    hardware = simulated[0][1].setting.calibration.hardware
    console.print(
        f"Predicted, not measured, from {hardware.name} (measured: {hardware.measured}). "
        f"Efficiency: samples per second and rank, compared with {simulated[0][0]:,} ranks."
    )


def _show_dense(
    simulated: "list[tuple[int, Explanation, DenseChoices | None]]", console: Console
) -> None:
    """Print the best way to run each world's dense part."""
    console.print(
        "The steps above have the computing of the dense part, but not what it sends. By itself it "
        "is run best so:"
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
