"""What `kubectl kustomize` makes of deploy/kubernetes, and what its services are given there."""

import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import programs
import yaml

from pageferry.core.config import Config
from pageferry.core.read_config import load_config

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
ROLES = ("router", "prefill", "decode")
# Overlays, and the components that a test adds; each component is in one at least.
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "cpu": (),
    "gpu": (),
    "cpu+adapter": ("components/scrape-annotations", "components/autoscaling"),
    "gpu+all": ("../otel", "components/monitoring", "components/keda", "components/mtls", "components/tenants"),
    "cpu+mtls": ("components/mtls",),
    "gpu+image": ("components/model-image",),
    "cpu+edge": ("../otel", "components/monitoring", "components/edge"),
    "cpu+edge+mtls": ("components/monitoring", "components/edge", "components/mtls"),
}
Manifest = dict[str, Any]


def render(variant: str) -> tuple[Manifest, ...]:
    """The objects of one of VARIANTS; callers change nothing in them."""
    return kustomized(variant.partition("+")[0], VARIANTS[variant])


@cache
def kustomized(overlay: str, components: tuple[str, ...]) -> tuple[Manifest, ...]:
    """The objects of an overlay with components, of which callers change nothing."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name).resolve()
        parts = [KUBERNETES / component for component in components]
        kustomization = {
            "namespace": "pageferry",
            "resources": [os.path.relpath(KUBERNETES / "overlays" / overlay, directory)],
            "components": [os.path.relpath(part.resolve(), directory) for part in parts],
        }
        (directory / "kustomization.yaml").write_text(yaml.safe_dump(kustomization), encoding="utf-8")
        return build(directory)


def build(directory: Path) -> tuple[Manifest, ...]:
    """What a directory's kustomization.yaml makes."""
    command = [programs.find("kubectl"), "kustomize", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, f"kustomize warns: {done.stderr}"
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(objects: Iterable[Manifest], *kinds: str) -> list[Manifest]:
    return [item for item in objects if item["kind"] in kinds]


def named(objects: Iterable[Manifest], kind: str, name: str) -> Manifest:
    (found,) = [item for item in of_kind(objects, kind) if item["metadata"]["name"] == name]
    return found


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes these labels; an empty one takes all."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}, selector
    wanted = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In", expression
        wanted = wanted and labels.get(expression["key"]) in expression["values"]
    return wanted


@dataclass(frozen=True)
class Workload:
    """A Deployment with one of its containers."""

    manifest: Manifest
    objects: tuple[Manifest, ...] = field(repr=False)
    number: int = 0

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def labels(self) -> Mapping[str, str]:
        return dict(self.manifest["spec"]["template"]["metadata"]["labels"])

    @property
    def role(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def pod(self) -> Manifest:
        return dict(self.manifest["spec"]["template"]["spec"])

    @property
    def container(self) -> Manifest:
        return dict(self.pod["containers"][self.number])

    @property
    def ports(self) -> Mapping[str, int]:
        """By name."""
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def probes(self) -> Iterator[tuple[str, Manifest]]:
        """Each probe with its name."""
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            yield name, self.container[name]

    def environment(self, pod_ip: str = "10.0.0.7") -> dict[str, str]:
        """As a pod at this address gets it; secrets hold the word "secret"."""
        found: dict[str, str] = {}
        for entry in self.container.get("env", []):
            assert entry["name"] not in found, f"{entry['name']} is set twice"
            found[entry["name"]] = entry["value"] if "value" in entry else self._value(entry["valueFrom"], pod_ip)
        for source in self.container.get("envFrom", []):
            found = named(self.objects, "ConfigMap", source["configMapRef"]["name"])["data"] | found
        return found

    def _value(self, source: Manifest, pod_ip: str) -> str:
        match source:
            case {"fieldRef": {"fieldPath": "status.podIP"}}:
                return pod_ip
            case {"resourceFieldRef": {"resource": "limits.cpu"}}:
                return str(self.container["resources"]["limits"]["cpu"])
            case {"secretKeyRef": _}:
                return "secret"
        raise AssertionError(f"not understood: {source}")

    def file(self, path: str) -> str:
        """What a mounted ConfigMap holds at a path in the container."""
        mount, volume = self.mount_of(path)
        data = named(self.objects, "ConfigMap", volume["configMap"]["name"])["data"]
        return str(data[path.removeprefix(mount["mountPath"]).lstrip("/")])

    def mount_of(self, path: str) -> tuple[Manifest, Manifest]:
        """The mount that a path lies in, and its volume."""
        mounts = [item for item in self.container["volumeMounts"] if Path(path).is_relative_to(item["mountPath"])]
        assert mounts, f"{self.name}: nothing is mounted for {path}"
        volumes = {volume["name"]: volume for volume in self.pod["volumes"]}
        return mounts[0], volumes[mounts[0]["name"]]

    def config(self, tmp_path: Path) -> Config:
        """What the service reads at its start."""
        command = self.container["command"]
        path = tmp_path / "pageferry.toml"
        path.write_text(self.file(command[command.index("--config") + 1]), encoding="utf-8")
        return load_config(path, self.environment(), {})


def workloads(variant: str) -> list[Workload]:
    objects = render(variant)
    return [Workload(item, objects) for item in of_kind(objects, "Deployment")]


def services(variant: str) -> list[Workload]:
    """The workloads that are Pageferry's own."""
    return [workload for workload in workloads(variant) if workload.role in ROLES]
