"""What the page on a training run shows, for tests to look at."""

import re
from pathlib import Path
from typing import Any

from torchrec_2dsp.programs.run_report.contents import RunContents
from torchrec_2dsp.programs.run_report.page import run_page
from torchrec_2dsp.report.page import Page


def page_of(folder: Path) -> Page:
    """The page on the runs of a folder."""
    return run_page(RunContents.read(folder))


def words_of(page: Page) -> str:
    """The page without scripts and tags."""
    html = re.sub(r"(?s)<(script|style).*?</\1>", "", page.html())
    return re.sub(r"<[^>]*>", " ", html)


def headings_of(page: Page) -> list[str]:
    """The headings of the parts of a page."""
    return re.findall("<h2>(.*?)</h2>", page.html())


def figure(page: Page, heading: str) -> dict[str, Any]:
    """What plotly draws under a heading: the drawn things by name, and all of them."""
    html = page.html()
    number = re.compile('id="plot-([0-9]+)"').search(html, html.index(f"<h2>{heading}</h2>"))
    assert number is not None
    drawn: Any = page.figures[int(number[1]) - 1].data
    return {trace.name or f"mark {place}": trace for place, trace in enumerate(drawn)}
