"""deploy/prometheus/cluster.yml in the real Prometheus: which containers it asks, and what it calls them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifests import DEPLOY, Workload, kustomized, of_kind
from prometheus import running

pytestmark = pytest.mark.slow
META = "__meta_kubernetes_"


def discovered() -> Iterator[dict[str, Any]]:
    """What its discovery of pods tells of each port of each container, with one pod of each Deployment, none ready."""
    objects = kustomized("cpu", ("components/gateway-picker", "../otel", "components/edge"))
    for index, deployment in enumerate(of_kind(objects, "Deployment")):
        for number in range(len(deployment["spec"]["template"]["spec"]["containers"])):
            workload = Workload(deployment, objects, number)
            labels = {f"{META}namespace": "pageferry", f"{META}pod_name": f"{workload.name}-0"}
            labels |= {f"{META}pod_phase": "Running", f"{META}pod_ready": "false"}
            for key, value in workload.labels.items():
                labels[f"{META}pod_label_{key.translate(str.maketrans('./-', '___'))}"] = value
            for name, port in workload.ports.items():
                yield {
                    "targets": [f"127.0.1.{index}:{port}"],
                    "labels": labels | {f"{META}pod_container_port_name": name},
                }


def test_each_container_with_metrics_is_asked_under_its_job(tmp_path: Path) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "cluster.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    # Debian's Prometheus can't ask Kubernetes; what it would be told stands in its place.
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod", "namespaces": {"names": ["pageferry"]}}]
    job["static_configs"] = [*discovered()]
    with running(yaml.safe_dump(config), tmp_path) as prometheus:
        prometheus.wait("count(up) == 5")
        found = {
            (one["labels"]["job"], one["labels"]["pod"], int(one["labels"]["instance"].rpartition(":")[2]))
            for one in prometheus.ask("targets")["activeTargets"]
        }
        assert {one["metric"]["namespace"] for one in prometheus.query("up")} == {"pageferry"}
    assert found == {
        ("pageferry-router", "pageferry-router-0", 9090),
        ("pageferry-router", "pageferry-decode-0", 9091),
        ("pageferry-picker", "pageferry-picker-0", 9090),
        ("pageferry-prefill", "pageferry-prefill-0", 9090),
        ("pageferry-decode", "pageferry-decode-0", 9090),
    }
