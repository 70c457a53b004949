"""Containers of the manifests as processes, with the settings that the manifests give them.

Only what can't be had here is put in its place: ports of this machine for the pods' own, its loopback for their
addresses and names.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from links import hold_port
from manifests import Manifest, Workload, services

SERVING = health_pb2.HealthCheckResponse.SERVING
READY_S = 120.0
POLL_S = 0.1


class Pod:
    """One of a workload's containers as a process."""

    def __init__(self, workload: Workload, ports: Mapping[int, int], path: Path) -> None:
        """`ports`: this machine's for the container's. Beside `path` its files are made."""
        self.workload = workload
        self.ports = ports
        self.log = path.with_suffix(".log")
        self._path = path.with_suffix(".toml")
        self.process: subprocess.Popen[bytes] | None = None

    def address(self, port: int) -> str:
        """Where a port of the container's is."""
        return f"localhost:{self.ports[port]}"

    @property
    def metrics(self) -> str:
        """Where Prometheus asks."""
        (port,) = (port for name, port in self.workload.ports.items() if name.endswith("metrics"))
        return self.address(port)

    def start(self, addresses: Mapping[str, str], **changed: str) -> None:
        """`addresses` take the place of what settings say, `changed` that of variables."""
        command = list(self.workload.container["command"])
        path = command[command.index("--config") + 1]
        self._path.write_text(self._substituted(self.workload.file(path), addresses), encoding="utf-8")
        command = [
            sys.executable if word == "python" else str(self._path) if word == path else word for word in command
        ]
        own = {
            name: str(self.ports[int(text)]) if name.endswith("_PORT") else self._substituted(text, addresses)
            for name, text in self.workload.environment("127.0.0.1").items()
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--die-with-parent"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | own | changed,
            )

    def _substituted(self, text: str, addresses: Mapping[str, str]) -> str:
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
def pods_of(workloads: Mapping[str, Workload], directory: Path) -> Iterator[dict[str, Pod]]:
    """By the same names; none is started."""
    with ExitStack() as held:
        found = {}
        for name, workload in workloads.items():
            named = {int(text) for variable, text in workload.environment().items() if variable.endswith("_PORT")}
            holders = {port: held.enter_context(hold_port()) for port in {*workload.ports.values(), *named}}
            ports = {port: int(holder.getsockname()[1]) for port, holder in holders.items()}
            found[name] = Pod(workload, ports, directory / name)
            held.callback(found[name].end)
        yield found


def services_of(variant: str) -> dict[str, Workload]:
    """The services of one of VARIANTS, by role."""
    return {workload.role: workload for workload in services(variant)}


def addresses_of(pods: Mapping[str, Pod]) -> dict[str, str]:
    """For the names by which services of those roles are called."""
    return {f"pageferry-{role}:50051": pod.address(50051) for role, pod in pods.items() if 50051 in pod.ports}
