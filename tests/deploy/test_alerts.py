"""Alerts: each is explained, each is tested both ways, and Prometheus's own tool takes them all."""

import re
import subprocess
from pathlib import Path

import programs
import pytest
import yaml
from prometheus_client import generate_latest
from promql import RULES, Alert, alerts, problems, rules, series_of

from pageferry.router.metrics import RouterMetrics
from pageferry.runtime.worker_metrics import WorkerMetrics

PROMETHEUS = RULES.parent
ROOT = Path(__file__).parents[2]
OPERATE = ROOT / "docs" / "operate.md"
BASE = "https://docs.example.org/pageferry/operate.md"  # in docs/operate.md
# What must not go unseen.
WANTED = ("Saturated", "BurnsFast", "BurnsSlow", "PageLeak", "TransfersStalled", "EngineWedged", "LayoutMismatch")


def test_there_is_an_alert_for_each_thing_that_must_not_go_unseen() -> None:
    names = [alert.name for alert in alerts()]
    assert len(set(names)) == len(names)
    for part in WANTED:
        assert any(part in name for name in names), part


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_each_alert_is_explained_where_it_says(alert: Alert) -> None:
    path, _, anchor = alert.annotations["runbook_url"].partition("#")
    assert ROOT / path == OPERATE
    text = OPERATE.read_text(encoding="utf-8")
    assert anchor == alert.name.lower()
    section = re.search(rf"^### {alert.name}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, f"docs/operate.md has no section {alert.name}"
    for word in ("**Means.**", "**Do.**"):
        assert word in section[1], f"docs/operate.md, {alert.name}: no {word}"
    assert alert.labels["severity"] in ("page", "ticket")


def test_links_to_sections_begin_with_what_the_guide_s_command_puts_there(tmp_path: Path) -> None:
    (tmp_path / RULES.name).write_bytes(RULES.read_bytes())
    (command,) = re.findall(r"^\$ (sed .* rules\.yml)$", OPERATE.read_text(encoding="utf-8"), re.MULTILINE)
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    changed = re.findall(r"runbook_url: (.*)", (tmp_path / RULES.name).read_text(encoding="utf-8"))
    assert changed == [f"{BASE}#{alert.name.lower()}" for alert in alerts()]


def test_no_section_is_of_an_alert_that_is_not_there() -> None:
    sections = re.findall(r"^### (Pageferry\w+)$", OPERATE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sections == [alert.name for alert in alerts()]


def test_each_alert_is_tested_where_it_fires_and_where_it_does_not() -> None:
    tests = yaml.safe_load((PROMETHEUS / "rules_test.yml").read_text(encoding="utf-8"))["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    for alert in alerts():
        expected = [bool(check["exp_alerts"]) for check in checks if check["alertname"] == alert.name]
        assert sorted(set(expected)) == [False, True], alert.name


def test_rules_name_metrics_that_the_services_have() -> None:
    """Labels are compared where there is a deployment, in test_dashboard.py."""
    texts = (generate_latest(metrics.registry).decode() for metrics in (RouterMetrics(), WorkerMetrics()))
    names = set(series_of(*texts))
    known = {name.removesuffix("_total") for name in names} | {
        str(name) for metrics in (RouterMetrics(), WorkerMetrics()) for name in metrics.registry._names_to_collectors
    }
    for rule in rules():
        for name in re.findall(r"\bpageferry_\w+", rule["expr"]):
            assert name.removesuffix("_total") in known, f"{rule.get('alert') or rule['record']}: {name}"
    assert list(problems("pageferry_no_such_metric", {})) == ["no metric pageferry_no_such_metric"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "check rules rules.yml",
        "test rules rules_test.yml",
        "check config prometheus.yml",
    ],
)
def test_promtool_is_content(command: str) -> None:
    done = subprocess.run(
        [programs.find("promtool"), *command.split()], cwd=PROMETHEUS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCESS" in done.stdout + done.stderr
