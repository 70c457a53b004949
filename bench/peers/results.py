"""Where results lie, and figures out of them: OUT/LOAD/SYSTEM/ROUND.json, and OUT/run.json about all."""

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_DESCRIPTION = "run.json"
Summary = Mapping[str, Any]


def path_of(out: Path, load: str, system: str, number: int) -> Path:
    return out / load / system / f"{number}.json"


def dropped(path: Path, attempt: int) -> Path:
    """What a result is named that does not count, because others took the processor."""
    return path.with_suffix(f".dropped-{attempt}.json")


def write_description(out: Path, description: Mapping[str, Any]) -> None:
    """Over what an earlier, interrupted run has found of others."""
    path = out / _DESCRIPTION
    merged = dict(json.loads(path.read_text())) if path.exists() else {}
    for name, value in description.items():
        merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(merged, indent=2))


def read_description(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / _DESCRIPTION).read_text()))


def figure(summary: Summary, path: str) -> float:
    """NaN where there is none."""
    value: Any = summary
    for name in path.split("."):
        value = value[name]
    return float("nan") if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric of one system under one load, over its rounds."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Figure | None":
        """None without a value."""
        known = sorted(value for value in values if value == value)
        return cls(statistics.median(known), known[0], known[-1], len(known)) if known else None


def best(figures: Mapping[str, Figure], better: Literal["lower", "higher"]) -> str | None:
    """The name with the best median; None where there are none."""
    choose = min if better == "lower" else max
    return choose(figures, key=lambda name: figures[name].median) if figures else None


def read_load(out: Path, load: str) -> tuple[dict[str, list[dict[str, Any]]], dict[str, int]]:
    """Results that count, by system, and how many were dropped."""
    counted: dict[str, list[dict[str, Any]]] = {}
    num_dropped: dict[str, int] = {}
    for directory in sorted((out / load).glob("*")):
        paths = sorted(path for path in directory.glob("*.json") if path.stem.isdecimal())
        counted[directory.name] = [json.loads(path.read_text()) for path in paths]
        num_dropped[directory.name] = len(list(directory.glob("*.dropped-*.json")))
    return counted, num_dropped
