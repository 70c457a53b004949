"""The dashboard and the metrics' page are what the code gives, and name what running services have."""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import programs
import pytest
import yaml
from cluster import generate, greedy
from loopback import free_port
from prometheus import scraping
from promql import DASHBOARD, DEPLOY, Series, dashboard_expressions, problems, rules, series_of
from services import Deployment

ROOT = DEPLOY.parent
# Of a GPU, and of profiles with objectives, which the default ones have none of.
ABSENT = ("pageferry_gpu_memory_bytes", "pageferry_gpu_utilisation_ratio")
# Panels that show nothing where all is well, and there is no GPU.
SILENT = ("GPU memory A", "GPU busy A", "Restarts")
PROFILES = "[profiles.strict]\nttft_slo_ms = 0.001\ntoken_slo_ms = 3_600_000\n"


def printed(script: Path) -> str:
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize(
    ("script", "made"),
    [
        (DEPLOY / "grafana" / "dashboard.py", DASHBOARD),
        (ROOT / "docs" / "generate" / "metrics.py", ROOT / "docs" / "metrics.md"),
    ],
)
def test_what_is_made_from_the_code_is_current(script: Path, made: Path) -> None:
    assert printed(script) == made.read_text(encoding="utf-8"), "run `make metrics`"


def test_panels_have_numbers_titles_and_places_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        taken |= cells


def test_an_expression_that_names_what_is_not_there_is_found() -> None:
    series = {"pageferry_x_total": [{"kind": "a"}]}
    assert list(problems('sum by (kind, job) (pageferry_x_total{kind="a"})', series)) == []
    for wrong in (
        "pageferry_y",
        'pageferry_x_total{kind="b"}',
        'pageferry_x_total{kind=~"a|b"}',
        "sum by (no) (pageferry_x_total)",
    ):
        assert len(list(problems(wrong, series))) == 1


@dataclass(frozen=True)
class Running:
    """A router and two workers, and where their metrics are."""

    deployment: Deployment
    targets: Mapping[str, str]  # by job


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """They have handed over, drafted, and met and missed objectives."""
    profiles = tmp_path_factory.mktemp("profiles") / "profiles.toml"
    profiles.write_text(PROFILES, encoding="utf-8")
    ports = {role: str(free_port()) for role in ("prefill", "decode")}
    of_role = {role: {"telemetry.metrics_port": port} for role, port in ports.items()}
    of_role["router"] = {"router.profiles_file": str(profiles)}
    with Deployment(prefill=1, decode=1, of_role=of_role, settings={"engine.speculation": "lookup"}) as deployment:
        asyncio.run(load(deployment))
        workers = {f"pageferry-{role}": f"127.0.0.1:{port}" for role, port in ports.items()}
        yield Running(deployment, {"pageferry-router": deployment.routers[0].http.removeprefix("http://")} | workers)


@pytest.fixture(scope="module")
def scraped(running: Running) -> Series:
    return series_of(*(httpx.get(f"http://{address}/metrics", timeout=60).text for address in running.targets.values()))


async def load(deployment: Deployment) -> None:
    async with deployment.stub() as stub:
        for profile in ("strict", "interactive"):
            request = greedy([*range(5, 100)], 20)
            request.profile = profile
            await generate(stub, request)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*dashboard_expressions(), *(rule.get("alert") or rule["record"] for rule in rules())])
def test_expressions_name_series_of_running_services(name: str, scraped: Series) -> None:
    expressions = dashboard_expressions() | {rule.get("alert") or rule["record"]: rule["expr"] for rule in rules()}
    assert list(problems(expressions[name], scraped, ABSENT)) == []


@pytest.mark.slow
def test_every_metric_of_running_services_is_in_the_reference(scraped: Series) -> None:
    told = set(re.findall(r"`((?:pageferry|process)_\w+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    metrics = {re.sub(r"_(bucket|sum|count)$", "", name) for name in scraped if not name.startswith("python")}
    assert metrics - {name.removesuffix("_total") for name in told} <= told


@pytest.mark.slow
def test_prometheus_parses_every_query(tmp_path: Path) -> None:
    queries = list(dashboard_expressions().values())
    made = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": made}]}), encoding="utf-8")
    done = subprocess.run(
        [programs.find("promtool"), "check", "rules", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(queries)} rules found" in done.stdout


@pytest.mark.slow
def test_prometheus_has_an_answer_to_every_query(running: Running, tmp_path: Path) -> None:
    """As configured in deploy/prometheus: it finds all services, each panel shows something, and no alert fires."""
    with scraping(running.targets, tmp_path) as prometheus:
        prometheus.wait('count(sum_over_time(up{job=~"pageferry-.+"}[1m]) >= 3) == 3')
        asyncio.run(load(running.deployment))
        queries = dashboard_expressions()
        assert queries.keys() >= set(SILENT)
        for name, query in queries.items():
            if name in SILENT:
                assert prometheus.query(query) == [], name
            else:
                prometheus.wait(query)
        rules_seen = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        assert len(rules_seen) == len(rules())
        assert {rule["health"] for rule in rules_seen} <= {"ok", "unknown"}
        firing = {rule["name"] for rule in rules_seen if rule.get("state") == "firing"}
        assert firing <= {"PageferryObjectiveBurnsFast"}, "half of these few miss an objective that nobody can meet"
        exemplars = prometheus.ask(
            "query_exemplars",
            query="pageferry_time_to_first_token_seconds_bucket",
            start=str(time.time() - 600),
            end=str(time.time() + 60),
        )
        assert any(series["exemplars"] for series in exemplars)
