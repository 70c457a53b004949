"""What is in this project's Prometheus and Grafana files, and the series that their expressions name."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus" / "rules.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboard.json"
PROMETHEUS_OWN = ("job", "instance")  # labels that scraping adds
_SELECTOR = re.compile(r"\b((?:pageferry|process)_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_BY = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
Series = dict[str, list[dict[str, str]]]  # labels of each series, by the sample's name


@dataclass(frozen=True)
class Alert:
    name: str
    expression: str
    labels: dict[str, str]
    annotations: dict[str, str]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[Alert]:
    return [
        Alert(rule["alert"], rule["expr"], rule["labels"], rule["annotations"]) for rule in rules() if "alert" in rule
    ]


def dashboard_expressions() -> dict[str, str]:
    """By panel and letter, with the variables as "all" of each."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    named = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    }
    named |= {annotation["name"]: annotation["expr"] for annotation in dashboard["annotations"]["list"]}
    values = {"$__rate_interval": "1m", "$instance": ".*", "$profile": ".*"}
    for variable, value in values.items():
        named = {name: expression.replace(variable, value) for name, expression in named.items()}
    return named


def series_of(*texts: str) -> Series:
    """What scrapes have given."""
    found: Series = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


def problems(expression: str, series: Series, absent: Iterable[str] = ()) -> Iterator[str]:
    """What the expression names, and no series has. `absent` are metrics that need what is not here."""
    labels: set[str] = set(PROMETHEUS_OWN)
    for name, matchers in _SELECTOR.findall(expression):
        if name in absent:
            return
        if name not in series:
            yield f"no metric {name}"
            continue
        labels |= {label for one in series[name] for label in one}
        for label, operator, value in _MATCHER.findall(matchers):
            if label not in PROMETHEUS_OWN and not _is_met(series[name], label, operator, value):
                yield f"no series of {name} has {label} {operator} {value!r}"
    for group in _BY.findall(expression):
        for label in filter(None, (part.strip() for part in group.split(","))):
            if label not in labels:
                yield f"no label {label} to group by"


def _is_met(series: list[dict[str, str]], label: str, operator: str, value: str) -> bool:
    """Whether a series has the label, and each value that the matcher names."""
    values = {one[label] for one in series if label in one}
    if "~" in operator and re.fullmatch(r"[\w|]+", value):
        return all(part in values for part in value.split("|"))
    return bool(values) and ("~" in operator or value in values)
