"""Show the gain: how many times as fast as TorchRec's fastest, by a benchmark in the folder."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchrec_2dsp.programs.bench.results import BenchResult, ContestantResult
from torchrec_2dsp.programs.bench.statistics import CONFIDENCE, fastest, median_s, speedup
from torchrec_2dsp.programs.run_report.contents import RunContents
from torchrec_2dsp.report.charts import PALETTE, BarChart, Bars
from torchrec_2dsp.report.page import Page
from torchrec_2dsp.report.table import MISSING, Table


@dataclass(frozen=True, kw_only=True)
class Contenders:
    """A benchmark's fastest contestants; `None` where no such contestant was measured."""

    stock_exact: ContestantResult | None
    """TorchRec's fastest that trains as one table would, within float rounding."""

    stock: ContestantResult | None
    """TorchRec's fastest of any precision, such as with INT8 on the wire."""

    own_exact: ContestantResult | None
    """This package's fastest that trains as one table would."""

    own: ContestantResult | None
    """This package's fastest of any precision."""

    @classmethod
    def of(cls, result: BenchResult) -> "Contenders":
        """Choose them among the measured contestants."""
        stock = result.stock()
        own = [each for each in result.measured() if each.kind not in ("stock", "ceiling")]
        return cls(
            stock_exact=fastest(filter(_is_exact, stock)),
            stock=fastest(stock),
            own_exact=fastest(filter(_is_exact, own)),
            own=fastest(own),
        )

    def distinct(self) -> list[ContestantResult]:
        """Return each of them once, TorchRec's first."""
        ordered = (self.stock_exact, self.stock, self.own_exact, self.own)
        return list({contestant.name: contestant for contestant in ordered if contestant}.values())

    def comparisons(self) -> Iterator[tuple[ContestantResult, ContestantResult, str]]:
        """Yield pairs to compare: this package's, TorchRec's, and the latter's description."""
        if self.own_exact and self.stock:
            yield self.own_exact, self.stock, "TorchRec's fastest"
        if self.own and self.stock and self.own is not self.own_exact:
            yield self.own, self.stock, "TorchRec's fastest"
        if self.own_exact and self.stock_exact and self.stock is not self.stock_exact:
            yield self.own_exact, self.stock_exact, "its fastest that trains exactly"


def _is_exact(contestant: ContestantResult) -> bool:
    """Tell whether a contestant's losses were compared step by step with one table's."""
    return contestant.loss_bound is not None


def add_gain(page: Page, contents: RunContents) -> None:
    """Add each benchmark's gain, or say how to measure it."""
    for text in _stock_runs(contents):
        page.add_text(text)
    if not contents.benches:
        page.add_text(
            "How fast this is beside TorchRec's best wasn't measured. Begin this page with it by "
            "torchrun --standalone --nproc-per-node 4 -m torchrec_2dsp bench --config bench "
            f"--output {contents.folder / 'gain.md'}"
        )
    for result in contents.benches:
        _add_bench(page, result)


def _stock_runs(contents: RunContents) -> Iterator[str]:
    """Compare finished runs with TorchRec alone, where the program trained it, too."""
    records = [(run, run.record) for run in contents.runs if run.record is not None]
    for stock, base in records:
        if stock.config.get("stock") and len(records) > 1:
            factors = ", ".join(
                f"{run.name} {record.samples_per_s / base.samples_per_s:.2f}"
                for run, record in records
                if run is not stock
            )
            yield (
                f"Samples per second in units of {stock.name}'s, which is TorchRec alone: "
                f"{factors}. The runs were trained one after the other."
            )


def _add_bench(page: Page, result: BenchResult) -> None:
    setting, contenders = result.setting, Contenders.of(result)
    numbers = [
        (f"{factor.factor:.2f} x", f"as fast as {base.name}, {what}: by {own.name}, {_how(own)}")
        for own, base, what in contenders.comparisons()
        if (factor := speedup(own, base))
    ]
    page.add_numbers(numbers)
    if not numbers:
        page.add_text("No contestant of this package and none of TorchRec's can be compared.")
    rounds = max((len(contestant.blocks) for contestant in result.measured()), default=0)
    where = setting.cluster or setting.network
    page.add_text(
        f"{setting.title}, on {setting.hosts} x {setting.ranks_per_host} ranks (hosts x ranks per "
        f"host), {where}; medians of {rounds} rounds, in each of which every contestant "
        "trained. Exactly: as one table would on the global batch, within float rounding."
    )
    shown = [contestant for contestant in result.measured() if contestant.kind != "ceiling"]
    if shown:
        page.add_bars("Time of a step", _times_chart(shown))
        table = _contestants_table(result, shown, contenders)
        page.add_table(f"All contestants of {setting.title}", table, is_folded=True)


def _how(contestant: ContestantResult) -> str:
    return "exactly" if _is_exact(contestant) else "rounded or late"


def _times_chart(contestants: Sequence[ContestantResult]) -> BarChart:
    """Draw each contestant's median step."""
    bars = [
        Bars(
            name=name,
            values={
                contestant.name: 1e3 * median_s(contestant)
                for contestant in contestants
                if (contestant.kind == "stock") is is_stock
            },
            colour=colour,
        )
        for name, is_stock, colour in (
            ("TorchRec", True, PALETTE[3]),
            ("torchrec_2dsp", False, PALETTE[2]),
        )
    ]
    places = [contestant.name for contestant in contestants]
    return BarChart([each for each in bars if each.values], places=places, title="median ms")


def _contestants_table(
    result: BenchResult, contestants: Sequence[ContestantResult], contenders: Contenders
) -> Table:
    """Return a row for each contestant: its step, and how it compares with TorchRec's fastest."""
    bases = [base for base in (contenders.stock_exact, contenders.stock) if base is not None]
    bases = bases[:1] if bases[1:] == bases[:1] else bases
    rows = []
    for contestant in contestants:
        gap = contestant.ne_gap
        rows.append(
            [
                contestant.name,
                _how(contestant),
                f"{1e3 * median_s(contestant):,.1f}",
                *(str(speedup(contestant, base) or MISSING) for base in bases),
                MISSING if gap is None or contestant.name == result.reference else f"{gap:+.3%}",
                contestant.description,
            ]
        )
    factors = [f"x {base.name} [{CONFIDENCE:.0%} interval]" for base in bases]
    headings = ("contestant", "trains", "median ms", *factors, "NE gap", "what it is")
    return Table(headings, rows, words=("contestant", "trains", "what it is"))
