"""The manifests as kustomize renders them: valid for several versions of Kubernetes, and what must hold of them."""

import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import programs
import pytest
import yaml
from manifests import (
    DEPLOY,
    KUBERNETES,
    ROLES,
    VARIANTS,
    Manifest,
    Workload,
    build,
    matches,
    named,
    of_kind,
    render,
    services,
    workloads,
)

from pageferry.router.gateway import serving

pytestmark = pytest.mark.slow
VERSIONS = ("1.30", "1.32", "1.34", "1.37")
CUSTOM = ("ScaledObject", "PodMonitor", "PrometheusRule", "Certificate", "Issuer")
CLIENT = {"pageferry-client": "true"}
EDGE_CALLS = {("client", "edge", 8080), ("edge", "router", 50051), ("edge", "router", 8080)}
_AFTER_DRAIN_S = 15  # quiet, last messages, the engine's step, spans: see server.py, worker_process.py, telemetry.py
_SPANS_S = 5  # and the rest of it, in a router
_variants = pytest.mark.parametrize("variant", VARIANTS)


@pytest.mark.parametrize("version", VERSIONS)
@_variants
def test_each_variant_is_valid(variant: str, version: str) -> None:
    kubernetes_validate = programs.module("kubernetes_validate")
    logging.getLogger("kubernetes-validate").setLevel(logging.ERROR)
    if variant == "gpu+image" and version < "1.32":
        pytest.skip("image volumes came later")
    checked = [item for item in render(variant) if item["kind"] not in CUSTOM]
    assert len(checked) > 10
    for item in checked:
        kubernetes_validate.validate(item, version, strict=True)


def test_the_namespace_is_valid_and_strict() -> None:
    kubernetes_validate = programs.module("kubernetes_validate")
    (namespace,) = yaml.safe_load_all((KUBERNETES / "namespace.yaml").read_text(encoding="utf-8"))
    kubernetes_validate.validate(namespace, VERSIONS[-1], strict=True)
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {item["metadata"]["namespace"] for variant in VARIANTS for item in render(variant)} == {"pageferry"}


def test_every_component_is_in_some_variant() -> None:
    there = {f"components/{path.parent.name}" for path in (KUBERNETES / "components").glob("*/kustomization.yaml")}
    used = {component for variant in VARIANTS.values() for component in variant}
    assert there - used <= {"components/gateway-picker"}  # which has tests of its own
    assert (DEPLOY / "otel" / "kustomization.yaml").exists()


@_variants
def test_containers_may_do_nothing_and_have_limits(variant: str) -> None:
    for workload in workloads(variant):
        pod, container = workload.pod, workload.container
        assert pod["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": 10001}.items(), workload.name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, workload.name
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, workload.name
        assert pod["automountServiceAccountToken"] is False, workload.name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod), workload.name
        assert not any("hostPath" in volume for volume in pod["volumes"]), workload.name
        assert {"cpu", "memory"} <= set(container["resources"]["requests"]), workload.name
        assert "memory" in container["resources"]["limits"], workload.name
        assert not container["image"].endswith((":latest", ":")), workload.name
        assert ":" in container["image"], workload.name
        written = [mount for mount in container["volumeMounts"] if not mount.get("readOnly")]
        assert all("sizeLimit" in workload.mount_of(mount["mountPath"])[1]["emptyDir"] for mount in written)


@_variants
def test_no_variable_of_kubernetes_becomes_a_setting(variant: str) -> None:
    """It would set PAGEFERRY_ROUTER_PORT for the service pageferry-router."""
    for workload in workloads(variant):
        assert workload.pod["enableServiceLinks"] is False, workload.name


@_variants
def test_each_service_selects_pods_and_names_their_ports(variant: str) -> None:
    found = of_kind(render(variant), "Service")
    assert len(found) >= 4
    for service in found:
        selected = [w for w in workloads(variant) if matches({"matchLabels": service["spec"]["selector"]}, w.labels)]
        assert len(selected) == 1, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            assert selected[0].ports[port["targetPort"]] == port["port"], service["metadata"]["name"]


def replicated(variant: str) -> list[Workload]:
    return [workload for workload in workloads(variant) if workload.role != "collector"]


@_variants
def test_rollouts_and_drained_nodes_leave_workers(variant: str) -> None:
    budgets = of_kind(render(variant), "PodDisruptionBudget")
    for workload in replicated(variant):
        selected = [item for item in budgets if matches(item["spec"]["selector"], workload.labels)]
        assert [item["spec"]["maxUnavailable"] for item in selected] == [1], workload.name
        rolling = workload.manifest["spec"]["strategy"]["rollingUpdate"]
        assert rolling == {"maxUnavailable": 0, "maxSurge": 1}, workload.name
        for spread in workload.pod["topologySpreadConstraints"]:
            assert matches(spread["labelSelector"], workload.labels), workload.name
            assert spread["matchLabelKeys"] == ["pod-template-hash"], workload.name


@_variants
def test_a_rollout_is_given_up_no_sooner_than_its_pods(variant: str) -> None:
    """Routers are ready once workers are."""
    probes = [dict(workload.probes)["startupProbe"] for workload in services(variant)]
    longest_s = max(probe["periodSeconds"] * probe["failureThreshold"] for probe in probes)
    for workload in services(variant):
        assert workload.manifest["spec"]["progressDeadlineSeconds"] >= longest_s + 300, workload.name


@_variants
def test_each_service_reads_its_settings_and_listens_where_the_manifests_say(variant: str, tmp_path: Path) -> None:
    for workload in services(variant):
        config = workload.config(tmp_path)
        ports = {"grpc": config.server.port, "health": config.server.health_port}
        ports["metrics"] = config.telemetry.metrics_port
        if workload.role == "router":
            ports["http"] = config.server.http_port
            assert config.router.salt_key, "each router would draw its own"
        assert dict(workload.ports) == ports, workload.name
        assert config.server.host == "0.0.0.0"
        if workload.role == "decode":
            assert config.server.advertised_host == "10.0.0.7", workload.name
        for role in ("prefill", "decode"):
            (target,) = getattr(config.router, role)
            name, _, port = target.removeprefix("dns:///").rpartition(":")
            service = named(render(variant), "Service", name)["spec"]
            assert service["clusterIP"] == "None"
            assert service["publishNotReadyAddresses"] is True
            assert service["ports"][0]["port"] == int(port)


@_variants
def test_what_settings_name_is_mounted(variant: str, tmp_path: Path) -> None:
    for workload in services(variant):
        config = workload.config(tmp_path)
        paths = {config.security.cert_file, config.security.key_file, config.security.ca_file}
        paths |= {config.security.tenants_file, config.engine.model if "/" in config.engine.model else ""}
        for path in paths - {""}:
            mount, _ = workload.mount_of(path)
            assert mount["readOnly"] is True, path


@_variants
def test_a_drain_has_the_time_that_it_may_take(variant: str, tmp_path: Path) -> None:
    for workload in services(variant):
        hook = workload.container.get("lifecycle", {}).get("preStop", {"exec": {"command": ["sleep", "0"]}})
        word, seconds = hook["exec"]["command"]
        assert word == "sleep"
        needed = int(seconds) + workload.config(tmp_path).server.drain_grace_s + _AFTER_DRAIN_S
        assert workload.pod["terminationGracePeriodSeconds"] >= needed, workload.name
    assert serving.GRACE_S + _SPANS_S <= _AFTER_DRAIN_S


@_variants
def test_probes_ask_what_they_should(variant: str) -> None:
    for workload in services(variant):
        probes = dict(workload.probes)
        assert all(probe["grpc"]["port"] == workload.ports["health"] for probe in probes.values()), workload.name
        assert probes["livenessProbe"]["grpc"]["service"] == "liveness", workload.name
        assert "service" not in probes["readinessProbe"]["grpc"], workload.name
        # A router waits for workers as long as it must; a worker has its time to load.
        waits = probes["startupProbe"]["grpc"].get("service", "")
        assert waits == ("liveness" if workload.role == "router" else ""), workload.name
        patience = probes["livenessProbe"]["periodSeconds"] * probes["livenessProbe"]["failureThreshold"]
        assert patience >= 20, "a busy node is no reason to restart"


@_variants
def test_workers_have_whole_cores_and_gpus_are_limits(variant: str) -> None:
    for workload in services(variant):
        limits = workload.container["resources"]["limits"]
        if workload.role != "router":
            assert str(limits["cpu"]).isdecimal(), "they are the engine's threads"
            assert ("nvidia.com/gpu" in limits) == variant.startswith("gpu"), workload.name


def _allowed(objects: tuple[Manifest, ...], source: dict[str, str], target: dict[str, str], port: int) -> bool:
    """Whether both ends' policies let a pod of this namespace call another one."""

    def one_side(way: str, own: dict[str, str], peer: dict[str, str]) -> bool:
        held = [
            item["spec"]
            for item in of_kind(objects, "NetworkPolicy")
            if way.capitalize() in item["spec"]["policyTypes"] and matches(item["spec"]["podSelector"], own)
        ]
        rules = [rule for spec in held for rule in spec.get(way, [])]
        return not held or any(
            any(
                "podSelector" in side and matches(side["podSelector"], peer)
                for side in rule.get("from" if way == "ingress" else "to", [])
            )
            and any(item["port"] == port for item in rule["ports"])
            for rule in rules
        )

    return one_side("egress", source, target) and one_side("ingress", target, source)


@_variants
def test_pods_talk_to_whom_they_must_and_to_nobody_else(variant: str) -> None:
    objects = render(variant)
    pods: dict[str, dict[str, str]] = {w.role: dict(w.labels) for w in workloads(variant)}
    pods |= {"client": CLIENT, "stranger": {"app": "other"}}
    ports = {port for workload in workloads(variant) for port in workload.ports.values()} | {53}
    calls = {
        (source, target, port)
        for source, labels in pods.items()
        for target in {*pods} - {"client", "stranger"}
        for port in ports
        if _allowed(objects, labels, pods[target], port)
    }
    expected = {("client", "router", 50051), ("client", "router", 8080), ("prefill", "decode", 50051)}
    expected |= {("router", worker, 50051) for worker in ("prefill", "decode")}
    expected |= {(worker, "router", 50051) for worker in ("prefill", "decode")}  # spans
    if "collector" in pods:
        expected |= {(role, "collector", 4317) for role in (*ROLES, "edge") if role in pods}
    if "edge" in pods:
        expected |= EDGE_CALLS
    assert calls == expected


@_variants
def test_policies_name_ports_that_containers_have(variant: str) -> None:
    objects = render(variant)
    for policy in of_kind(objects, "NetworkPolicy"):
        selected = [w for w in workloads(variant) if matches(policy["spec"]["podSelector"], w.labels)]
        assert selected, policy["metadata"]["name"]
        for rule in policy["spec"].get("ingress", []):
            for port in rule["ports"]:
                assert any(port["port"] in w.ports.values() for w in selected), policy["metadata"]["name"]


@pytest.fixture
def edge() -> Workload:
    (found,) = [workload for workload in workloads("cpu+edge") if workload.role == "edge"]
    return found


def envoy_config(edge: Workload) -> Any:
    return yaml.safe_load(edge.file(edge.container["command"][-1]))


def test_the_edge_is_that_of_deploy_envoy(edge: Workload) -> None:
    assert envoy_config(edge) == yaml.safe_load((DEPLOY / "envoy" / "edge.yaml").read_text(encoding="utf-8"))
    (listener,) = envoy_config(edge)["static_resources"]["listeners"]
    assert edge.ports == {listener["name"]: listener["address"]["socket_address"]["port_value"]}


def test_the_edge_calls_services_by_names_and_ports_that_they_have(edge: Workload) -> None:
    calls = set()
    for cluster in envoy_config(edge)["static_resources"]["clusters"]:
        (group,) = cluster["load_assignment"]["endpoints"]
        (endpoint,) = group["lb_endpoints"]
        address = endpoint["endpoint"]["address"]["socket_address"]
        calls.add((address["address"], address["port_value"]))
        service = named(edge.objects, "Service", address["address"])["spec"]
        assert address["port_value"] in [port["port"] for port in service["ports"]]
        if "health_checks" in cluster:
            assert service["clusterIP"] == "None", "its health checks would be of any router"
    assert {port for _, port in calls} == {50051, 8080, 4317}


def test_the_edge_s_descriptors_are_made_where_it_reads_them(edge: Workload, tmp_path: Path) -> None:
    (first,) = edge.pod["initContainers"]
    python, script, made = first["command"]
    assert (python, first["image"]) == ("python", "pageferry"), "which overlays give a tag"
    assert first["securityContext"] == edge.container["securityContext"]
    text = str(envoy_config(edge))
    assert f"'proto_descriptor': '{made}'" in text
    mount, volume = edge.mount_of(made)
    assert "emptyDir" in volume
    assert {"name": mount["name"], "mountPath": mount["mountPath"]} in first["volumeMounts"]
    (tmp_path / "descriptors.py").write_text(edge.file(script), encoding="utf-8")
    (tmp_path / "descriptors.py").chmod(0o444)
    subprocess.run([sys.executable, tmp_path / "descriptors.py", tmp_path / "made"], check=True)
    assert b"InferenceService" in (tmp_path / "made").read_bytes()


def test_the_edge_ends_after_its_answers(edge: Workload) -> None:
    hook, admin, longest = edge.container["lifecycle"]["preStop"]["exec"]["command"]
    assert edge.file(hook) == (DEPLOY / "envoy" / "drain.sh").read_text(encoding="utf-8")
    assert edge.mount_of(hook)[1]["configMap"]["defaultMode"] & 0o111, "it can't be run"
    address = envoy_config(edge)["admin"]["address"]["socket_address"]
    assert admin == f"{address['address']}:{address['port_value']}"
    assert edge.pod["terminationGracePeriodSeconds"] >= int(longest) + _AFTER_DRAIN_S


def test_prometheus_reaches_metrics_where_it_is_told_to_find_them() -> None:
    for variant in ("gpu+all", "cpu+adapter"):
        policy = named(render(variant), "NetworkPolicy", "pageferry-metrics")["spec"]
        ports = [port["port"] for rule in policy["ingress"] for port in rule["ports"]]
        assert all(workload.ports["metrics"] in ports for workload in services(variant))
    for workload in services("cpu+adapter"):
        annotations: Any = workload.manifest["spec"]["template"]["metadata"]["annotations"]
        assert int(annotations["prometheus.io/port"]) == workload.ports["metrics"]


@pytest.mark.parametrize("file", ["edge.yaml", "edge-mtls.yaml"])
def test_the_edge_looks_up_names_that_are_there(file: str) -> None:
    text = (DEPLOY / "envoy" / file).read_text(encoding="utf-8")
    places = re.findall(r"address: (pageferry-[a-z]+), port_value: (\d+)", text)
    assert {name for name, _ in places} == {"pageferry-routers", "pageferry-collector"}
    for name, port in places:
        selector = named(render("gpu+all"), "Service", name)["spec"]["selector"]
        (selected,) = [w for w in workloads("gpu+all") if matches({"matchLabels": selector}, w.labels)]
        assert int(port) in selected.ports.values(), name
    assert (
        named(render("gpu+all"), "Service", "pageferry-routers")["spec"]["clusterIP"] == "None"
    )  # an address for each


def test_scaled_workers_have_no_fixed_number() -> None:
    for variant in ("gpu+all", "cpu+adapter"):
        scaled = [item for item in render(variant) if item["kind"] in ("ScaledObject", "HorizontalPodAutoscaler")]
        targets = {item["spec"]["scaleTargetRef"]["name"] for item in scaled}
        assert targets == {"pageferry-prefill", "pageferry-decode"}
        for workload in services(variant):
            assert ("replicas" in workload.manifest["spec"]) == (workload.name not in targets)


def test_the_guide_s_own_overlay_renders(tmp_path: Path) -> None:
    guide = (DEPLOY.parent / "docs" / "deploy.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(# kustomization.yaml\n.*?)```", guide, re.DOTALL)
    (tmp_path / "pageferry").symlink_to(DEPLOY.parent)
    (tmp_path / "kustomization.yaml").write_text(text, encoding="utf-8")
    objects = build(tmp_path)
    decode = named(objects, "Deployment", "pageferry-decode")["spec"]["template"]["spec"]["containers"][0]
    assert decode["image"] == "registry.example.org/pageferry:1-cuda"
    assert {"name": "PAGEFERRY_SCHEDULER_MAX_NUM_SEQS", "value": "128"} in decode["env"]
    maps = {item["metadata"]["name"] for item in of_kind(objects, "ConfigMap")}
    assert {source["configMapRef"]["name"] for source in decode["envFrom"]} <= maps
    listed = set(re.findall(r"^\| `([a-z-]+)` \|.*\|.*\|$", guide, re.MULTILINE))
    assert {path.parent.name for path in (KUBERNETES / "components").glob("*/kustomization.yaml")} <= listed


def test_links_of_alerts_begin_with_what_an_overlay_puts_there(tmp_path: Path) -> None:
    docs = DEPLOY.parent / "docs"
    (overlay,) = re.findall(r"```yaml\n(# kustomization.yaml\n.*?)```", (docs / "deploy.md").read_text(), re.DOTALL)
    (more,) = re.findall(r"```yaml\n(# into kustomization.yaml\n.*?)```", (docs / "operate.md").read_text(), re.DOTALL)
    (tmp_path / "pageferry").symlink_to(DEPLOY.parent)
    (tmp_path / "kustomization.yaml").write_text(overlay + more, encoding="utf-8")
    objects = build(tmp_path)
    assert "runbooks" not in {item["metadata"]["name"] for item in of_kind(objects, "ConfigMap")}
    (alerts,) = of_kind(objects, "PrometheusRule")
    rules = [rule for group in alerts["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    assert len(rules) > 20
    for rule in rules:
        link = f"https://docs.example.org/pageferry/operate.md#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook_url"] == link


def test_the_guide_s_settings_are_those_of_the_manifests(tmp_path: Path) -> None:
    guide = (DEPLOY.parent / "docs" / "deploy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+\.\w+)` \| ([^|]*) \|", guide, re.MULTILINE)
    assert len(rows) > 8
    read = [workload.config(tmp_path).describe() for variant in ("cpu", "gpu") for workload in services(variant)]
    for name, said in rows:
        values = {str(config[name]) for config in read} - {""}
        for value in values:
            assert re.search(rf"(?<![\w.]){re.escape(value.removesuffix('.0'))}(?!\w)", said), (name, said, value)
