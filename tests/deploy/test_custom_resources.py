"""Objects of KEDA, the Prometheus operator and cert-manager, and the adapter's values, as far as can be told here.

Their schemas are not at hand, so fields are checked that must be there, against names that must agree.
"""

import re
import subprocess
from pathlib import Path
from typing import Any

import programs
import pytest
import yaml
from manifests import DEPLOY, Manifest, matches, named, of_kind, render, services
from scaling import ALL, adapter_rules, queries

from pageferry.core.security import is_allowed

pytestmark = pytest.mark.slow


def test_queries_parse(tmp_path: Path) -> None:
    rules = [{"record": f"q:{index}", "expr": query} for index, query in enumerate(queries().values())]
    assert len(rules) == 8
    promtool("check", {"groups": [{"name": "scaling", "rules": rules}]}, tmp_path)


QUEUED = 'pageferry_queued_requests{namespace="pageferry",pod="pageferry-router-0"}'
PAGES = 'pageferry_pages{namespace="pageferry",pod="pageferry-decode-0",state="%s"}'


@pytest.mark.parametrize("name", ["pageferry-prefill 1", "pageferry_prefill_queue"])
@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({QUEUED: 8, PAGES % "resident": 9, PAGES % "free": 9}, [8]),
        ({QUEUED: 8, PAGES % "resident": 9, PAGES % "free": 1}, [0]),
        ({QUEUED: 8}, []),
    ],
    ids=("room", "none", "unknown"),
)
def test_queued_requests_ask_for_prefill_workers_only_where_decode_workers_have_room(
    name: str, known: dict[str, int], expected: list[int], tmp_path: Path
) -> None:
    """Nothing, unlike 0, takes no worker away."""
    samples = [{"labels": "{}", "value": value} for value in expected]
    test = {
        "interval": "1m",
        "input_series": [{"series": series, "values": str(value)} for series, value in known.items()],
        "promql_expr_test": [{"expr": queries()[name], "eval_time": "0m", "exp_samples": samples}],
    }
    promtool("test", {"rule_files": [], "tests": [test]}, tmp_path)


def promtool(verb: str, document: Manifest, directory: Path) -> None:
    """Have it `check` rules, or `test` them."""
    path = directory / "rules.yml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    command = [programs.find("promtool"), verb, "rules", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_metric_that_scales_by_kubernetes_is_one_that_the_adapter_makes() -> None:
    made = {rule.get("name", {}).get("as", re.split(r"\W", rule["seriesQuery"])[0]) for rule in adapter_rules()}
    asked = set()
    for item in of_kind(render("cpu+adapter"), "HorizontalPodAutoscaler"):
        for metric in item["spec"]["metrics"]:
            asked.add(metric[metric["type"].lower()]["metric"]["name"])
    assert asked == made


def test_scaled_objects_have_what_keda_needs() -> None:
    for item in of_kind(render(ALL), "ScaledObject"):
        spec = item["spec"]
        assert item["apiVersion"] == "keda.sh/v1alpha1"
        assert named(render(ALL), "Deployment", spec["scaleTargetRef"]["name"])
        assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
        for trigger in spec["triggers"]:
            assert trigger["type"] == "prometheus"
            assert set(trigger["metadata"]) == {"serverAddress", "ignoreNullValues", "query", "threshold"}
            assert trigger["metadata"]["ignoreNullValues"] == "false", "else nothing is 0, and workers are taken away"
            assert float(trigger["metadata"]["threshold"]) > 0
            assert isinstance(trigger["metadata"]["threshold"], str)


def test_the_monitor_finds_each_service_and_its_port() -> None:
    (monitor,) = of_kind(render(ALL), "PodMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    endpoint, _ = monitor["spec"]["podMetricsEndpoints"]  # the other one is in test_gateway_picker.py
    for workload in services(ALL):
        assert matches(monitor["spec"]["selector"], workload.labels)
        assert endpoint["port"] in workload.ports


def test_the_operator_gets_the_same_alerts() -> None:
    (rule,) = of_kind(render(ALL), "PrometheusRule")
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    assert rule["spec"] == yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text(encoding="utf-8")), (
        "run make metrics"
    )


def test_alerts_find_the_jobs_that_the_monitor_makes() -> None:
    (monitor,) = of_kind(render(ALL), "PodMonitor")
    (relabelling,) = monitor["spec"]["podMetricsEndpoints"][0]["relabelings"]
    made = {relabelling["replacement"].replace("$1", workload.role) for workload in services(ALL)}
    (rule,) = of_kind(render(ALL), "PrometheusRule")
    asked = set(re.findall(r'job="([\w-]+)"', yaml.safe_dump(rule, width=10_000)))
    assert asked
    assert asked <= made


def certificates() -> dict[str, Manifest]:
    """By the secret that each is kept in."""
    found = {item["spec"]["secretName"]: item["spec"] for item in of_kind(render(ALL), "Certificate")}
    issuers = {item["metadata"]["name"]: item["spec"] for item in of_kind(render(ALL), "Issuer")}
    for spec in found.values():
        assert spec["issuerRef"]["name"] in issuers
    assert issuers["pageferry"]["ca"]["secretName"] in found, "nobody makes the authority"
    return found


def test_services_have_certificates_that_each_other_believes(tmp_path: Path) -> None:
    for workload in services(ALL):
        security = workload.config(tmp_path).security
        _, volume = workload.mount_of(security.cert_file)
        certificate = certificates()[volume["secret"]["secretName"]]
        assert security.server_name in certificate["dnsNames"], workload.name
        assert is_allowed(certificate["uris"], security.allowed_peers), workload.name
        assert {"server auth", "client auth"} <= set(certificate["usages"]), workload.name
        names = {Path(path).name for path in (security.cert_file, security.key_file, security.ca_file)}
        assert names == {"tls.crt", "tls.key", "ca.crt"}, "as cert-manager names them"


def test_prometheus_has_a_certificate_of_its_own() -> None:
    (monitor,) = of_kind(render(ALL), "PodMonitor")
    endpoint, _ = monitor["spec"]["podMetricsEndpoints"]
    shown: Any = endpoint["tlsConfig"]
    assert endpoint["scheme"] == "https"
    assert shown["keySecret"]["name"] == shown["cert"]["secret"]["name"] == shown["ca"]["secret"]["name"]
    assert shown["keySecret"]["name"] in certificates()
