"""Two results side by side: what differs in what was asked of the servers, and in what came of it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from pageferry.core.errors import InvalidArgumentError
from pageferry.loadgen.metrics import ALL, Metric
from pageferry.loadgen.result import BenchResult, Summary

EQUAL_WITHIN = 0.01  # ratios this near to 1 are no difference
_DRAWN = ("seed",)  # other prompts and arrivals of the same load


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of both; `ratio` is B by A, and `better` is empty where neither is."""

    metric: Metric
    a: float | None
    b: float | None
    ratio: float | None
    better: Literal["A", "B", "equal", ""]


def check_same_load(a: BenchResult, b: BenchResult) -> None:
    """Raises InvalidArgumentError naming each option that differs."""
    if differences := load_differences(a, b):
        raise InvalidArgumentError(
            f"the loads differ: {'; '.join(differences)}. With --across-loads they are compared all the same"
        )


def load_differences(a: BenchResult, b: BenchResult) -> list[str]:
    """E.g. `concurrency is 1 in A and 4 in B`."""
    names = [name for name in dict.fromkeys((*a.load, *b.load)) if name not in _DRAWN]
    pairs = ((name, _shown(a.load, name), _shown(b.load, name)) for name in names)
    return [f"{name} is {one} in A and {other} in B" for name, one, other in pairs if one != other]


def surroundings(a: BenchResult, b: BenchResult) -> list[str]:
    """Differences that are no part of the load, yet may explain what was measured."""
    pairs = (
        ("model", a.target.model, b.target.model),
        ("protocol", a.target.kind, b.target.kind),
        ("CPU", a.machine.cpu, b.machine.cpu),
        ("number of cores", a.machine.cores, b.machine.cores),
        ("memory", a.machine.memory_bytes, b.machine.memory_bytes),
        ("platform", a.machine.platform, b.machine.platform),
    )
    return [f"{name} is {one} in A and {other} in B" for name, one, other in pairs if one != other]


def notes(a: BenchResult, b: BenchResult) -> list[str]:
    """All that differs beside what was measured, as sentences."""
    loads = [f"Different load: {text}." for text in load_differences(a, b)]
    return loads + [f"Different surroundings: {text}." for text in surroundings(a, b)]


def rows(a: Summary, b: Summary) -> Iterator[Row]:
    """Every metric that either has."""
    for metric in ALL:
        one, other = metric.value(a), metric.value(b)
        if one is None and other is None:
            continue
        ratio = other / one if one and other is not None else None
        yield Row(metric, one, other, ratio, _better(metric, one, other, ratio))


def as_table(a: BenchResult, b: BenchResult) -> Table:
    """For a terminal; below it stands what else differs."""
    equal = f"Differences of at most {EQUAL_WITHIN:.0%} count as equal."
    caption = Text("\n".join([equal, *notes(a, b)]))
    table = Table(box=None, pad_edge=False, header_style="bold", caption=caption, caption_justify="left")
    table.add_column("")
    for heading in (f"A: {a.label or 'no label'}", f"B: {b.label or 'no label'}", "B/A"):
        table.add_column(Text(heading), justify="right", overflow="fold")
    table.add_column("better")
    group = ""
    for row in rows(a.summary, b.summary):
        metric = row.metric
        if metric.group != group:
            group = metric.group
            table.add_section()
            table.add_row(Text(group, style="bold"))
        values = (metric.text(a.summary), metric.text(b.summary), ratio_text(row.ratio))
        table.add_row(Text(f"  {metric.title}"), *values, row.better, style="" if row.better in ("A", "B") else "dim")
    return table


def ratio_text(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×" if ratio < 10 else f"{ratio:,.0f}×"


def _better(metric: Metric, a: float | None, b: float | None, ratio: float | None) -> Literal["A", "B", "equal", ""]:
    if not metric.better or a is None or b is None:
        return ""
    if a == b or (ratio is not None and abs(ratio - 1) <= EQUAL_WITHIN):
        return "equal"
    return "B" if (b > a) == (metric.better == "higher") else "A"


def _shown(load: Mapping[str, object], name: str) -> str:
    value = load.get(name)
    return "not given" if value is None else json.dumps(value, sort_keys=True, ensure_ascii=False)
