"""Results as one HTML file: no scripts, nothing to load, light and dark."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pageferry import __version__
from pageferry.loadgen import compare, metrics
from pageferry.loadgen.page_plots import plots
from pageferry.loadgen.result import BenchResult, Summary
from pageferry.loadgen.svg import FONT, palette_css

_FOREIGN_PERCENT = 10.0  # of the machine by others, from which a note says so


@dataclass(frozen=True, slots=True)
class Tile:
    """One of the numbers at the top."""

    name: str
    value: str
    unit: str


def render(result: BenchResult) -> str:
    """The page of one run."""
    return _page([result], notes=_notes("", result), rows=[])


def render_comparison(a: BenchResult, b: BenchResult) -> str:
    """The page of two, whose loads may differ; then it says so first."""
    notes = [*compare.notes(a, b), *_notes("A: ", a), *_notes("B: ", b)]
    return _page([a, b], notes=notes, rows=list(compare.rows(a.summary, b.summary)))


def _page(results: Sequence[BenchResult], notes: Sequence[str], rows: Sequence[compare.Row]) -> str:
    names = _names(results)
    drawn = plots(dict(zip(names, results, strict=True)))
    environment = Environment(
        loader=PackageLoader("pageferry.loadgen", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": metrics.number_text, "ratio": compare.ratio_text, "shown": _shown}
    return environment.get_template("page.html").render(
        version=__version__,
        style=Markup(f"{palette_css()}\n:root {{ --font: {FONT}; }}"),  # ours
        runs=list(zip("AB", names, results, strict=False)),
        notes=notes,
        rows=rows,
        tiles=_tiles(results[0].summary),
        metrics=metrics,
        equal_percent=100 * compare.EQUAL_WITHIN,
        plots=drawn,
        svgs=[Markup(plot.svg) for plot in drawn],  # written by an XML library
    )


def _names(results: Sequence[BenchResult]) -> list[str]:
    """What plots and tables call them: never twice the same."""
    labels = [result.label or result.target.model for result in results]
    return labels if len(results) == 1 else [f"{letter}: {label}" for letter, label in zip("AB", labels, strict=True)]


def _tiles(summary: Summary) -> list[Tile]:
    number = metrics.number_text
    tiles = [
        Tile("Output", number(summary.output_tokens_per_s), "tokens/s"),
        Tile("Requests", number(summary.requests_per_s), "per second"),
        Tile("First token p50", number(summary.ttft_ms.p50), "ms"),
        Tile("First token p99", number(summary.ttft_ms.p99), "ms"),
        Tile("Token gap p50", number(summary.itl_ms.p50), "ms"),
        Tile("Token gap p99", number(summary.itl_ms.p99), "ms"),
    ]
    if summary.goodput is not None:
        tiles.insert(2, Tile("Within the limits", number(100 * summary.goodput.share), "% of requests"))
    return tiles


def _notes(who: str, result: BenchResult) -> list[str]:
    """What one must know before believing the numbers."""
    summary, notes = result.summary, [f"{who}{note[:1].upper()}{note[1:]}." for note in result.notes]
    if summary.failed:
        notes.append(f"{who}{summary.failed} of {summary.requests} requests failed; times are those of the others.")
    if not summary.completed:
        notes.append(f"{who}No request completed.")
    if (foreign := summary.foreign_cpu_percent) is not None and foreign > _FOREIGN_PERCENT:
        notes.append(f"{who}Other processes took {foreign:.0f} % of the machine's CPU during the run.")
    return notes


def _shown(value: object) -> str:
    """An option's value as one may type it."""
    match value:
        case None:
            return "–"
        case str():
            return value
        case dict():
            return ", ".join(f"{name} {_shown(item)}" for name, item in value.items() if item is not None)
        case _:
            return json.dumps(value, ensure_ascii=False)
