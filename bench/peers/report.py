"""Renders what run.py has measured as tables: python bench/peers/report.py OUT --out bench/RESULTS.md.

What follows from them, and what other scripts have measured, is written by hand in notes.md and stands behind them.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from peers import results
from peers.loads import Load, Metric, loads
from peers.results import Figure
from peers.system import System
from peers.systems import SYSTEMS

_INTRODUCTION = """# Pageferry beside its peers

The same weights on the same cores: one GGUF file, and what `bench/peers/weights.py` makes from it for each. The same
client, `pageferry bench`, from the same cores. Systems take turns under a load (A B C A B C); a figure is the median of
its rounds, with the lowest and highest in brackets. Runs in which other processes took more than a few percent of the
machine are dropped and repeated.
"""


_NOTES = Path(__file__).with_name("notes.md")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Pageferry's figure divided by another's, and whether that keeps the target."""

    system: str
    metric: Metric
    other: str
    ratio: float
    limit: float

    @property
    def kept(self) -> bool:
        return self.ratio <= self.limit if self.metric.better == "lower" else self.ratio >= self.limit


Figures = Mapping[str, Mapping[str, Figure]]  # by metric's path, then system


def figures_of(out: Path, load: Load) -> dict[str, dict[str, Figure]]:
    counted, _ = results.read_load(out, load.name)
    found: dict[str, dict[str, Figure]] = {}
    for metric in load.metrics:
        values = {
            name: Figure.of(results.figure(run["summary"], metric.path) for run in runs)
            for name, runs in counted.items()
        }
        found[metric.path] = {name: value for name, value in values.items() if value is not None}
    return found


def compare(load: Load, figures: Mapping[str, Figures]) -> Iterator[Comparison]:
    """Every target of the load, for each of Pageferry's systems; `figures` are by load."""
    for metric in load.metrics:
        of_load = figures[load.name][metric.path]
        ours = [name for name in of_load if _is_ours(name)]
        peers = {name: value for name, value in of_load.items() if not _is_ours(name)}
        peer = results.best(peers, metric.better)
        for name in ours:
            if metric.limit is not None and peer is not None:
                yield Comparison(name, metric, peer, of_load[name].median / peers[peer].median, metric.limit)
            if metric.own_limit is not None and name in figures[metric.own_load][metric.path]:
                own = figures[metric.own_load][metric.path][name].median
                other = f"itself under {metric.own_load}"
                yield Comparison(name, metric, other, of_load[name].median / own, metric.own_limit)


def render(out: Path, known: Mapping[str, Load]) -> Iterator[str]:
    description = results.read_description(out)
    yield _INTRODUCTION
    figures = {load.name: figures_of(out, load) for load in known.values()}
    yield from _machine(out, known, description)
    for load in known.values():
        if any(figures[load.name].values()):
            yield from _load_section(out, load, figures)
    yield _NOTES.read_text(encoding="utf-8")
    yield from _systems_section(description)


def _machine(out: Path, known: Mapping[str, Load], description: Mapping[str, Any]) -> Iterator[str]:
    runs = [run for name in known for of in results.read_load(out, name)[0].values() for run in of]
    if runs:
        machine = max(runs, key=lambda run: run["started"])["machine"]
        gigabytes = machine["memory_bytes"] / 1e9
        yield f"{machine['cpu']}, {machine['cores']} cores, {gigabytes:.0f} GB, {machine['platform']}, "
        yield f"Python {machine['python']}. {min(run['started'] for run in runs)[:10]}.\n"
    yield f"```console\n$ python bench/peers/run.py --setup\n$ {description['command']}\n```\n"


def _load_section(out: Path, load: Load, figures: Mapping[str, Figures]) -> Iterator[str]:
    counted, dropped = results.read_load(out, load.name)
    yield f"## {load.title}\n"
    example = ["pageferry bench --url URL", *load.options]
    yield f"    {' '.join(example)}"
    if load.background:
        yield f"    {' '.join(['pageferry bench --url URL', *load.background])}"
    yield ""
    yield _row("", *(metric.title for metric in load.metrics), "rounds")
    yield _row("---", *("---:" for _ in load.metrics), "---:")
    for name in (name for name in SYSTEMS if counted.get(name)):
        cells = [_cell(figures[load.name][metric.path].get(name)) for metric in load.metrics]
        rounds = f"{len(counted[name])}" + (f", {dropped[name]} dropped" if dropped[name] else "")
        yield _row(SYSTEMS[name].title, *cells, rounds)
    yield ""
    yield from _notes(load, counted)
    comparisons = list(compare(load, figures))
    if comparisons:
        yield _row("", "figure", "divided by that of", "ratio", "target", "kept")
        yield _row("---", "---", "---", "---:", "---:", "---")
        for item in comparisons:
            sign = "≤" if item.metric.better == "lower" else "≥"
            other = SYSTEMS[item.other].title if item.other in SYSTEMS else item.other
            target, kept = f"{sign} {item.limit}", "yes" if item.kept else "**no**"
            yield _row(SYSTEMS[item.system].title, item.metric.title, other, f"{item.ratio:.2f}", target, kept)
        yield ""


def _notes(load: Load, counted: Mapping[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Answers of another length than was asked for, and what the client found worth saying."""
    wanted = int(load.options[load.options.index("--output-tokens") + 1])
    for name, runs in counted.items():
        lengths = {request["output_tokens"] for run in runs for request in run["requests"] if not request["error"]}
        if lengths and lengths != {wanted}:
            span = f"{min(lengths)} to {max(lengths)}"
            yield f"* {SYSTEMS[name].title}: answers of {span} tokens where {wanted} were asked for"
        for note in sorted({note for run in runs for note in run["notes"]}):
            yield f"* {SYSTEMS[name].title}: {note}"
    yield ""


def _systems_section(description: Mapping[str, Any]) -> Iterator[str]:
    yield "## Systems and settings\n"
    yield "Commands are those for 8 streams.\n"
    ours = description["answers"].get("pageferry", "")
    for name, told in description["systems"].items():
        system = SYSTEMS[name]
        yield f"### {system.title}\n"
        if told["versions"]:
            yield ", ".join(f"{package} {version}" for package, version in told["versions"].items()) + "\n"
        yield f"```console\n$ {told['command']}\n```\n"
        yield from _settings(system)
        if (answer := description["answers"].get(name)) is not None:
            same = "the same" if answer == ours else f"the first {_common(answer, ours)} characters the same"
            yield f"After `{description['prompt']}` it says `{' '.join(answer.split())}`: {same} as Pageferry.\n"


def _settings(system: System) -> Iterator[str]:
    for item in system.settings:
        reason = f": {item.reason}" if item.reason else ""
        yield f"* {item.setting}{reason} ({item.source})"
    if system.settings:
        yield ""


def _common(first: str, second: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _is_ours(name: str) -> bool:
    return not SYSTEMS[name].environment


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "—"
    spread = f" ({_number(figure.low)}–{_number(figure.high)})" if figure.rounds > 1 else ""
    return f"{_number(figure.median)}{spread}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="what run.py was given as --out")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="default: print it")
    parser.add_argument("--quick", action="store_true", help="of the loads of run.py --quick")
    arguments = parser.parse_args()
    text = "\n".join(render(arguments.results, loads(quick=arguments.quick)))
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text.rstrip() + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
