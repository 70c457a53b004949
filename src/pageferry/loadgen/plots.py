"""Plots as SVG text: lines in one panel or several, distributions, bars. `standalone` in `svg` makes files of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from pageferry.loadgen.svg import INK, LIGHT, legend_text, printable, render, styled

_POINTS_PER_INCH = 72
_WIDTH, _HEIGHT = 540, 290  # of one plot, in the SVG's units
_LEGEND_LINE, _LEGEND_CHARACTER = 50, 6.5  # widths of an entry's parts
_PANEL_HEIGHT = 130  # of each of several
_CDF_POINTS = 400
_DOTS = 2000
_TICKS = 16  # that fit side by side
_FEW_BARS = 5  # categories, of which fewer get no wider bars
_LOG_TICKS: tuple[tuple[float, tuple[float, ...]], ...] = (  # by decades below which they fit; none: evenly spaced
    (0.3, ()),
    (1.1, (1, 1.5, 2, 3, 4, 5, 7)),
    (3.5, (1, 2, 5)),
)
_LEAST = 1e-3  # what a logarithmic axis shows of zero
_MARKED = (50, 90, 99)  # percentiles with a dot on a distribution


Mark = Literal["line", "steps", "dots"]


@dataclass(frozen=True, slots=True)
class Frame:
    """What all plots have: `name` starts the ids in the SVG and is unique on a page, `alt` says what is seen.

    `marks` are values of x with a line and a text, e.g. a limit.
    """

    name: str
    alt: str
    x_label: str
    log_x: bool = False
    marks: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    mark: Mark = "line"

    @classmethod
    def of(cls, label: str, points: Sequence[tuple[float, float]], mark: Mark = "line") -> "Series":
        return cls(label, [x for x, _ in points], [y for _, y in points], mark)


@dataclass(frozen=True, slots=True)
class Panel:
    """One vertical axis, from zero unless logarithmic, with what it measures."""

    y_label: str
    series: Sequence[Series]
    log_y: bool = False
    y_max: float | None = None
    limit: float | None = None  # a horizontal line


def lines(frame: Frame, *panels: Panel, width: int = _WIDTH) -> str:
    """Series over x; several panels stand one above the other over the same x. One without points keeps its colour."""
    height = _HEIGHT if len(panels) == 1 else _PANEL_HEIGHT * len(panels) + 30
    with styled():
        figure = _figure(width, height)
        all_axes: list[Axes] = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0].tolist()
        for axes, panel in zip(all_axes, panels, strict=True):
            _draw_panel(axes, panel, width)
        _finish(frame, all_axes)
        figure.align_ylabels()
        return render(figure, frame.name, frame.alt)


def cdf(frame: Frame, values: Mapping[str, Sequence[float]]) -> str:
    """The share of each series' values up to x, with dots at the median, p90 and p99; without values there is none."""
    with styled():
        figure = _figure(_WIDTH, _HEIGHT)
        axes = figure.subplots()
        for label, series in values.items():
            if not series:
                axes.plot([], [])  # so that those after it have the colours that they have in other plots
                continue
            ordered = np.sort(np.asarray(series, dtype=np.float64)).clip(_LEAST if frame.log_x else -np.inf)
            shares = np.linspace(0, 100, min(_CDF_POINTS, max(len(ordered), 2)))
            (line,) = axes.plot(np.percentile(ordered, shares), shares, label=legend_text(label))
            axes.plot(np.percentile(ordered, _MARKED), _MARKED, "o", markersize=4, color=line.get_color())
        axes.set(ylabel="share of values", ylim=(0, 102))
        axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
        axes.set_yticks([0, 25, 50, 75, 90, 100])
        _legend(axes, _WIDTH, len(values))
        _finish(frame, [axes])
        return render(figure, frame.name, frame.alt)


def bars(frame: Frame, y_label: str, categories: Sequence[str], values: Mapping[str, Sequence[float]]) -> str:
    """Bars of each series side by side in each category, in the order given; a series may have none at all."""
    places = np.arange(len(categories))
    width = 0.8 / max(len(values), 1)
    with styled():
        figure = _figure(_WIDTH, _HEIGHT)
        axes = figure.subplots()
        for number, (label, heights) in enumerate(values.items()):
            offset = (number - (len(values) - 1) / 2) * width
            colour = LIGHT[number % len(LIGHT)]
            if heights:
                axes.bar(places + offset, heights, width * 0.92, label=legend_text(label), color=colour)
        axes.set_ylabel(y_label)
        shown = slice(None, None, -(-len(categories) // _TICKS) or 1)
        axes.set_xticks(places[shown], [printable(category, 16) for category in categories[shown]])
        room = max(0.0, _FEW_BARS - len(categories)) / 2 + 0.5
        axes.set_xlim(-room, len(categories) - 1 + room)
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_formatter(FuncFormatter(number_text))
        _legend(axes, _WIDTH, len(values))
        _finish(frame, [axes])
        return render(figure, frame.name, frame.alt)


def number_text(value: float, _position: object = None) -> str:
    """E.g. `0.25`, `1,500`: as ticks show it."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width / _POINTS_PER_INCH, height / _POINTS_PER_INCH), layout="constrained")
    figure.patch.set_alpha(0)
    return figure


def _draw_panel(axes: Axes, panel: Panel, width: float) -> None:
    for series in panel.series:
        label = legend_text(series.label) if series.x else None
        match series.mark:
            case "line":
                axes.plot(series.x, series.y, label=label, marker="o" if len(series.x) < 30 else "", markersize=4)
            case "steps":
                axes.step(series.x, series.y, where="post", label=label)
            case "dots":
                every = slice(None, None, -(-len(series.x) // _DOTS) or 1)
                axes.plot(
                    series.x[every], series.y[every], "o", label=label, markersize=5, alpha=0.6, markeredgewidth=0
                )
    if panel.limit is not None:
        axes.axhline(panel.limit, color=INK, linewidth=1, linestyle=":")
    axes.set_ylabel(panel.y_label)
    if panel.log_y:
        _log_ticks(axes, "y")
    else:
        axes.set_ylim(0, panel.y_max)
        axes.yaxis.set_major_formatter(FuncFormatter(number_text))
        whole = all(float(y).is_integer() for series in panel.series for y in series.y)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=whole))
    _legend(axes, width, len(panel.series))


def _finish(frame: Frame, all_axes: Sequence[Axes]) -> None:
    last = all_axes[-1]
    last.set_xlabel(frame.x_label)
    if frame.log_x:
        _log_ticks(last, "x")
    for axes in all_axes:
        axes.patch.set_alpha(0)
        axes.set_axisbelow(True)
        for text, x in (frame.marks or {}).items():
            _mark(axes, text, x)


def _mark(axes: Axes, text: str, x: float) -> None:
    """The text stands on the side where there is more room."""
    axes.axvline(x, color=INK, linewidth=1, linestyle=":")
    place, _ = axes.transAxes.inverted().transform(axes.transData.transform((x, axes.get_ylim()[0])))
    offset, side = (-5, "right") if place > 0.5 else (5, "left")
    axes.annotate(
        printable(text),
        (x, 0.04),
        xycoords=("data", "axes fraction"),
        xytext=(offset, 0),
        textcoords="offset points",
        horizontalalignment=side,
    )


def _legend(axes: Axes, width: float, num_series: int) -> None:
    """Above the axes, where it hides nothing, in as many columns as fit; only where there is more than one series."""
    _, labels = axes.get_legend_handles_labels()
    if num_series > 1 and labels:
        columns = int(width / (_LEGEND_LINE + _LEGEND_CHARACTER * max(map(len, labels))))
        axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.99), ncols=max(columns, 1), borderaxespad=0)


def _log_ticks(axes: Axes, which: Literal["x", "y"]) -> None:
    """At 1, 2 and 5 times powers of ten; closer ones over less than a decade, evenly spaced over much less."""
    if which == "x":
        axes.set_xscale("log")
        axis: Axis = axes.xaxis
        low, high = axes.get_xlim()
    else:
        axes.set_yscale("log")
        axis = axes.yaxis
        low, high = axes.get_ylim()
    decades = np.log10(high / low) if low > 0 else 1
    subs = next((subs for limit, subs in _LOG_TICKS if decades < limit), (1,))
    axis.set_major_locator(LogLocator(subs=subs) if subs else MaxNLocator(5))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(number_text))
