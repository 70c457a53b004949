"""The collector's configuration hangs together, and with the Deployment that mounts it; no collector is here to ask."""

from typing import Any

import pytest
import yaml
from manifests import Workload, workloads

from pageferry.core.config import TelemetryConfig

pytestmark = pytest.mark.slow


@pytest.fixture
def collector() -> Workload:
    (found,) = [workload for workload in workloads("gpu+all") if workload.role == "collector"]
    return found


@pytest.fixture
def config(collector: Workload) -> dict[str, Any]:
    (argument,) = collector.container["args"]
    return dict(yaml.safe_load(collector.file(argument.removeprefix("--config="))))


def test_pipelines_are_of_parts_that_are_there_and_every_part_is_used(config: dict[str, Any]) -> None:
    used: dict[str, set[str]] = {"receivers": set(), "processors": set(), "exporters": set()}
    for pipeline in config["service"]["pipelines"].values():
        for kind in used:
            used[kind] |= set(pipeline.get(kind, []))
    connectors = set(config["connectors"])
    assert used["receivers"] == set(config["receivers"]) | connectors
    assert used["exporters"] == set(config["exporters"]) | connectors
    assert used["processors"] == set(config["processors"])
    assert config["service"]["extensions"] == list(config["extensions"])


def test_memory_is_looked_at_first_and_batches_are_made_last(config: dict[str, Any]) -> None:
    for name, pipeline in config["service"]["pipelines"].items():
        order = pipeline["processors"]
        if name.startswith("traces"):
            assert order[0] == "memory_limiter", name
        assert "batch" not in order[:-1], name


def test_slow_and_failed_requests_are_kept_as_the_router_keeps_them(config: dict[str, Any]) -> None:
    policies = {policy["type"]: policy for policy in config["processors"]["tail_sampling"]["policies"]}
    assert policies["latency"]["latency"]["threshold_ms"] == TelemetryConfig().slow_request_s * 1000
    assert policies["status_code"]["status_code"]["status_codes"] == ["ERROR"]
    assert all(name in policy for name, policy in policies.items())


def test_it_listens_where_the_manifests_say_and_is_called_there(collector: Workload, config: dict[str, Any]) -> None:
    def port(address: str) -> int:
        return int(address.rpartition(":")[2])

    own = config["service"]["telemetry"]["metrics"]["readers"][0]["pull"]["exporter"]["prometheus"]
    assert collector.ports == {
        "otlp": port(config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]),
        "metrics": own["port"],
        "span-metrics": port(config["exporters"]["prometheus"]["endpoint"]),
        "health": port(config["extensions"]["health_check"]["endpoint"]),
    }
    assert {probe["httpGet"]["port"] for _, probe in collector.probes} == {collector.ports["health"]}
    assert config["exporters"]["otlp"]["endpoint"] == "${env:PAGEFERRY_TRACES_ENDPOINT}"
    assert "PAGEFERRY_TRACES_ENDPOINT" in collector.environment()
    for workload in workloads("gpu+all"):
        if workload is not collector and workload.role != "collector":
            assert workload.environment()["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://pageferry-collector:4317"
