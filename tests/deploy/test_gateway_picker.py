"""The component gateway-picker: what kustomize makes of it is valid, and its parts agree with each other."""

import logging
from pathlib import Path
from typing import Any

import programs
import pytest
from manifests import Manifest, Workload, kustomized, matches, named, of_kind

from pageferry.core.config import Config
from pageferry.core.read_config import load_config

pytestmark = pytest.mark.slow
CUSTOM = ("InferencePool", "HTTPRoute", "PodMonitor", "PrometheusRule", "Certificate", "Issuer")
ROUTERS = (("pageferry-router", 0), ("pageferry-picker", 0), ("pageferry-decode", 1))


def objects() -> tuple[Manifest, ...]:
    own = "components/gateway-picker"
    others = ("../otel", "components/monitoring", "components/mtls", "components/tenants")
    return kustomized("gpu", (own, f"{own}/model-volume", *others))


def workload(name: str, number: int = 0) -> Workload:
    return Workload(named(objects(), "Deployment", name), objects(), number)


def config(name: str, tmp_path: Path, number: int = 0) -> Config:
    """What the service reads at its start."""
    one = workload(name, number)
    path = tmp_path / "pageferry.toml"
    path.write_text(one.file("/etc/pageferry/pageferry.toml"), encoding="utf-8")
    return load_config(path, one.environment(), {})


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_it_is_valid(version: str) -> None:
    kubernetes_validate = programs.module("kubernetes_validate")
    logging.getLogger("kubernetes-validate").setLevel(logging.ERROR)
    for item in objects():
        if item["kind"] not in CUSTOM:
            kubernetes_validate.validate(item, version, strict=True)


def test_the_pool_is_the_routers_beside_decode_workers_and_the_picker_knows_their_port(tmp_path: Path) -> None:
    pool: Any = named(objects(), "InferencePool", "pageferry")
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    spec = pool["spec"]
    selected = [item for item in of_kind(objects(), "Deployment") if _takes(spec["selector"], item)]
    assert [item["metadata"]["name"] for item in selected] == ["pageferry-decode"]
    beside = config("pageferry-decode", tmp_path, 1)
    picker = config("pageferry-picker", tmp_path)
    assert [port["number"] for port in spec["targetPorts"]] == [beside.server.http_port] == [picker.router.picker_port]
    assert beside.router.salt_key == picker.router.salt_key != ""
    assert beside.router.decode == (f"127.0.0.1:{config('pageferry-decode', tmp_path).server.port}",)
    assert beside.router.prefill == picker.router.prefill
    service = named(objects(), "Service", spec["endpointPickerRef"]["name"])
    assert _takes({"matchLabels": service["spec"]["selector"]}, named(objects(), "Deployment", "pageferry-picker"))
    assert spec["endpointPickerRef"]["port"]["number"] == service["spec"]["ports"][0]["port"] == picker.server.port


def test_every_service_finds_its_model(tmp_path: Path) -> None:
    for name, number in (("pageferry-picker", 0), ("pageferry-decode", 0), ("pageferry-decode", 1)):
        mount, volume = workload(name, number).mount_of(config(name, tmp_path, number).engine.model)
        assert mount["readOnly"] is True
        assert volume["persistentVolumeClaim"]["claimName"] == "pageferry-model"


def test_the_route_leads_to_the_pool() -> None:
    (rule,) = named(objects(), "HTTPRoute", "pageferry")["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert backend == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "pageferry"}
    assert rule["timeouts"] == {"request": "0s"}


def test_containers_of_a_pod_share_no_port_and_probes_ask_where_health_is(tmp_path: Path) -> None:
    worker, beside = (config("pageferry-decode", tmp_path, number) for number in (0, 1))
    servers = [worker.server.port, worker.server.health_port, worker.telemetry.metrics_port]
    servers += [beside.server.port, beside.server.health_port, beside.server.http_port, beside.telemetry.metrics_port]
    assert len(set(servers)) == len(servers)
    for name, number in (("pageferry-decode", 1), ("pageferry-picker", 0)):
        health_port = config(name, tmp_path, number).server.health_port
        assert {probe["grpc"]["port"] for _, probe in workload(name, number).probes} == {health_port}


@pytest.mark.parametrize(
    ("name", "number", "grace_s"),
    [("pageferry-decode", 0, 120), ("pageferry-decode", 1, 120), ("pageferry-picker", 0, 10)],
)
def test_a_pod_has_time_to_end_its_answers(name: str, number: int, grace_s: float, tmp_path: Path) -> None:
    assert config(name, tmp_path, number).server.drain_grace_s == grace_s
    hook = workload(name, number).container.get("lifecycle", {}).get("preStop", {"exec": {"command": ["sleep", "0"]}})
    before_s = float(hook["exec"]["command"][1])
    assert workload(name).pod["terminationGracePeriodSeconds"] >= before_s + grace_s + 15


def test_a_gateway_reaches_picker_and_pods_and_they_what_they_need() -> None:
    client = {"pageferry-client": "true"}
    roles = {name: workload(f"pageferry-{name}").labels for name in ("picker", "decode", "prefill", "collector")}
    for source, target, port in (
        (client, "picker", 50051),
        (client, "decode", 8080),
        (roles["picker"], "decode", 50051),
        (roles["picker"], "prefill", 50051),
        (roles["decode"], "prefill", 50051),
        (roles["picker"], "collector", 4317),
    ):
        assert _lets("ingress", "from", roles[target], source, port), (source, target, port)
        if source is not client:
            assert _lets("egress", "to", source, roles[target], port), (source, target, port)
    assert not _lets("ingress", "from", roles["decode"], client, 50051)


def test_all_routers_ask_for_the_same_keys_and_send_spans_to_the_collector(tmp_path: Path) -> None:
    for name, number in ROUTERS:
        mount, volume = workload(name, number).mount_of(config(name, tmp_path, number).security.tenants_file)
        assert mount["readOnly"] is True
        assert volume["secret"]["secretName"] == "pageferry-tenants"
        endpoint = workload(name, number).environment()["OTEL_EXPORTER_OTLP_ENDPOINT"]
        assert endpoint == "http://pageferry-collector:4317"


def test_prometheus_finds_each_router_once_under_its_job(tmp_path: Path) -> None:
    (monitor,) = of_kind(objects(), "PodMonitor")
    found = []
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        job = endpoint["relabelings"][-1]["replacement"]
        for name, number in (*ROUTERS, ("pageferry-prefill", 0), ("pageferry-decode", 0)):
            one = workload(name, number)
            if matches(monitor["spec"]["selector"], one.labels) and endpoint["port"] in one.ports:
                port = one.ports[endpoint["port"]]
                assert port == config(name, tmp_path, number).telemetry.metrics_port
                assert _lets_prometheus(one.labels, port), name
                found.append((name, job.replace("$1", one.role)))
    assert sorted(found) == [
        ("pageferry-decode", "pageferry-decode"),
        ("pageferry-decode", "pageferry-router"),
        ("pageferry-picker", "pageferry-picker"),
        ("pageferry-prefill", "pageferry-prefill"),
        ("pageferry-router", "pageferry-router"),
    ]


def _lets_prometheus(pod: Any, port: int) -> bool:
    return any(
        {"port": port} in rule["ports"]
        and {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}} in rule["from"]
        for policy in of_kind(objects(), "NetworkPolicy")
        if matches(policy["spec"]["podSelector"], pod)
        for rule in policy["spec"].get("ingress", [])
    )


def _takes(selector: Any, deployment: Manifest) -> bool:
    return matches(selector, deployment["spec"]["template"]["metadata"]["labels"])


def _lets(direction: str, peers: str, pod: Any, other: Any, port: int) -> bool:
    """Whether a network policy of the pod names the other and the port."""
    for policy in of_kind(objects(), "NetworkPolicy"):
        if matches(policy["spec"]["podSelector"], pod):
            for rule in policy["spec"].get(direction, []):
                selectors = [peer["podSelector"] for peer in rule.get(peers, []) if "podSelector" in peer]
                has_port = {"port": port} in rule["ports"]
                if has_port and any(matches(selector, other) for selector in selectors):
                    return True
    return False
