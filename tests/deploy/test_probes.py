"""Every probe and hook of the manifests, against services started with the settings that the manifests give them.

Only what can't be had here is put in its place: ports of this machine for the pods' own, its loopback for their
addresses and names.
"""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from cluster import pageferry
from grpc_health.v1 import health_pb2, health_pb2_grpc
from links import hold_port
from manifests import Manifest, Workload, services
from scaling import queries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SERVING = health_pb2.HealthCheckResponse.SERVING
READY_S = 120.0
POLL_S = 0.1


class Pod:
    """One of a workload's containers as a process."""

    def __init__(self, workload: Workload, ports: dict[int, int], directory: Path) -> None:
        """`ports`: this machine's for the container's."""
        self.workload = workload
        self.ports = ports
        self.log = directory / f"{workload.role}.log"
        self._path = directory / f"{workload.role}.toml"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, addresses: dict[str, str]) -> None:
        """`addresses` take the place of the names and ports of services."""
        command = list(self.workload.container["command"])
        path = command[command.index("--config") + 1]
        self._path.write_text(self._substituted(self.workload.file(path), addresses), encoding="utf-8")
        command = [
            sys.executable if word == "python" else str(self._path) if word == path else word for word in command
        ]
        own = {
            name: self._substituted(text, addresses) for name, text in self.workload.environment("127.0.0.1").items()
        }
        own["PAGEFERRY_SERVER_ADVERTISED_PORT"] = str(self.ports[self.workload.ports["grpc"]])
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--die-with-parent"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | own,
            )

    def _substituted(self, text: str, addresses: dict[str, str]) -> str:
        for name, address in addresses.items():
            text = text.replace(name, address)
        for port, here in self.ports.items():
            text = text.replace(f"port = {port}", f"port = {here}")
        return text.replace("0.0.0.0", "127.0.0.1")

    def passes(self, probe: Manifest, timeout_s: float = READY_S) -> bool:
        """What the kubelet would find. How long it takes here says more of the machine than of the service."""
        assert set(probe) & {"grpc", "httpGet", "exec", "tcpSocket"} == {"grpc"}, "not understood by this test"
        asked = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
        with grpc.insecure_channel(f"127.0.0.1:{self.ports[probe['grpc']['port']]}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                return bool(stub.Check(asked, timeout=timeout_s).status == SERVING)
            except grpc.RpcError as error:
                assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), error
                return False

    def probes(self) -> dict[str, bool]:
        return {name: self.passes(probe) for name, probe in self.workload.probes}

    def wait_for(self, name: str) -> None:
        """Until the probe passes, or longer than the manifest would wait."""
        probe = dict(self.workload.probes)[name]
        end = time.monotonic() + READY_S
        while not self.passes(probe):
            assert self.process is not None and self.process.poll() is None, self.said
            assert time.monotonic() < end, self.said
            time.sleep(POLL_S)

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-4000:]

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def pods_of(variant: str, directory: Path) -> Iterator[dict[str, Pod]]:
    """By role; none is started."""
    with ExitStack() as held:
        found = {}
        for workload in services(variant):
            holders = {port: held.enter_context(hold_port(0)) for port in workload.ports.values()}
            ports = {port: int(holder.getsockname()[1]) for port, holder in holders.items()}
            (directory / workload.role).mkdir()
            found[workload.role] = Pod(workload, ports, directory / workload.role)
        yield found
        for pod in found.values():
            pod.end()


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pod]]:
    with pods_of("cpu", tmp_path_factory.mktemp("pods")) as found:
        yield found


def addresses_of(pods: dict[str, Pod]) -> dict[str, str]:
    port = {role: pod.ports[pod.workload.ports["grpc"]] for role, pod in pods.items()}
    return {f"pageferry-{role}:50051": f"localhost:{port[role]}" for role in ("router", "prefill", "decode")}


def test_a_router_without_workers_is_started_and_alive_and_not_ready(pods: dict[str, Pod]) -> None:
    pods["router"].start(addresses_of(pods))
    pods["router"].wait_for("startupProbe")
    assert pods["router"].probes() == {"startupProbe": True, "readinessProbe": False, "livenessProbe": True}


def test_workers_are_alive_while_they_load_and_pass_every_probe_then(pods: dict[str, Pod]) -> None:
    for role in ("prefill", "decode"):
        pods[role].start(addresses_of(pods))
    for role in ("prefill", "decode"):
        pods[role].wait_for("livenessProbe")
        pods[role].wait_for("startupProbe")
        assert set(pods[role].probes().values()) == {True}, pods[role].said
    pods["router"].wait_for("readinessProbe")
    assert set(pods["router"].probes().values()) == {True}


def test_a_service_that_stands_still_is_found_out(pods: dict[str, Pod]) -> None:
    worker = pods["decode"]
    worker.signal(signal.SIGSTOP)
    probe = dict(worker.workload.probes)["livenessProbe"]
    try:
        assert not worker.passes(probe, probe["timeoutSeconds"])
    finally:
        worker.signal(signal.SIGCONT)
    worker.wait_for("livenessProbe")


def test_metrics_are_where_the_annotations_say_and_have_what_scales(pods: dict[str, Pod]) -> None:
    said = ""
    for workload in services("cpu+adapter"):
        annotations = workload.manifest["spec"]["template"]["metadata"]["annotations"]
        port = pods[workload.role].ports[int(annotations["prometheus.io/port"])]
        url = f"http://127.0.0.1:{port}{annotations['prometheus.io/path']}"
        with urllib.request.urlopen(url, timeout=READY_S) as answer:
            text = answer.read().decode()
        assert "pageferry_requests_total" in text
        said += text
    for name, query in queries().items():
        for metric in set(re.findall(r"pageferry_\w+", query)):
            assert f"\n{metric}" in said, f"{name}: nobody has {metric}"
        for states in re.findall(r'state=~"([^"]+)"', query):
            for state in states.split("|"):
                assert re.search(rf'\npageferry_pages{{[^}}]*state="{state}"', said), f"{name}: no pages are {state}"
    assert re.search(r'\npageferry_pages{[^}]*pool="', said)


def test_a_router_serves_while_its_hook_runs_and_ends_in_its_time(pods: dict[str, Pod]) -> None:
    router = pods["router"]
    router.wait_for("readinessProbe")
    hook = router.workload.container["lifecycle"]["preStop"]["exec"]["command"]
    before = time.monotonic()
    with subprocess.Popen(hook) as running:
        while running.poll() is None:
            assert router.passes(dict(router.workload.probes)["readinessProbe"]), router.said
            time.sleep(POLL_S)
    assert running.returncode == 0
    router.signal(signal.SIGTERM)
    assert router.process is not None
    allowed = router.workload.pod["terminationGracePeriodSeconds"] - (time.monotonic() - before)
    assert router.process.wait(allowed) == 0, router.said


def test_workers_end_in_their_time(pods: dict[str, Pod]) -> None:
    for role in ("prefill", "decode"):
        assert "lifecycle" not in pods[role].workload.container
        pods[role].signal(signal.SIGTERM)
    for role in ("prefill", "decode"):
        process, allowed = pods[role].process, pods[role].workload.pod["terminationGracePeriodSeconds"]
        assert process is not None
        assert process.wait(allowed) == 0, pods[role].said


def test_with_certificates_probes_need_none_and_calls_do(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with pods_of("cpu+mtls", tmp_path) as pods:
        for role, pod in pods.items():
            spiffe_id = f"spiffe://pageferry.internal/service/{role}"
            shown = authority.issue(f"{role}-tls", spiffe_id=spiffe_id, server_name="pageferry.internal")
            files = {"tls.crt": shown.cert, "tls.key": shown.key, "ca.crt": authority.cert}
            pod.start(addresses_of(pods) | {f"/etc/pageferry-tls/{name}": str(path) for name, path in files.items()})
        for role in ("prefill", "decode", "router"):
            for name, _ in pods[role].workload.probes:
                pods[role].wait_for(name)
        address = f"localhost:{pods['router'].ports[50051]}"
        assert pageferry("status", "--address", address).returncode != 0
        options = ("--ca", str(authority.cert), "--server-name", "pageferry.internal")
        shown = authority.issue("client", spiffe_id="spiffe://pageferry.internal/client/test")
        options += ("--cert", str(shown.cert), "--key", str(shown.key))
        done = pageferry("generate", "--address", address, *options, "--max-tokens", "4", "Hello")
        assert done.returncode == 0, done.stderr
