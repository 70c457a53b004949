"""Certificates from both sides behind Envoy: those of the services themselves, and those of their sidecars."""

import asyncio
import contextlib
import os
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import programs
import pytest
from certificates import SERVER_NAME, Authority, Identity
from cluster import generate, greedy
from envoys import ADMIN, SHIPPED, Envoy, Places, edge_places, place_tls, shipped
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import free_port
from moments import until
from service import Role, Service, Settings
from services import QUICK, Deployment
from streams import prompt_of

from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ID = "spiffe://pageferry.internal/service"  # as deploy/envoy/tls-trusted.yaml has it
ROLES: tuple[Role, ...] = ("router", "prefill", "decode")
BODY = {"model": "tiny", "prompt": [5] * 40, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def without_tls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_tls(inner) for key, inner in value.items() if key != "transport_socket"}
    return [without_tls(item) for item in value] if isinstance(value, list) else value


def test_the_edge_with_certificates_is_the_edge_but_for_these() -> None:
    assert without_tls(shipped("edge-mtls")) == shipped("edge")


async def assert_answers(edge: Envoy, authority: Authority) -> None:
    """Over gRPC and HTTP, to clients that check the edge's certificate."""
    address = edge.address("edge")
    credentials = grpc.ssl_channel_credentials(authority.cert.read_bytes())
    async with grpc.aio.secure_channel(address, credentials) as channel:
        answer = await generate(InferenceServiceStub(channel), greedy(prompt_of(1, 100), 8))
        assert answer.finished is not None and answer.finished.pages.shipped
    context = ssl.create_default_context(cafile=str(authority.cert))
    async with httpx.AsyncClient(base_url=f"https://{address}", verify=context, timeout=60) as http:
        reply = await http.post("/v1/completions", json=BODY)
        assert reply.status_code == 200, reply.text


async def test_services_with_certificates_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    services = authority.issue("services", spiffe_id=f"{ID}/services")
    edge_identity = authority.issue("edge", spiffe_id=f"{ID}/edge")
    settings = {
        "security.cert_file": str(services.cert),
        "security.key_file": str(services.key),
        "security.ca_file": str(authority.cert),
        "security.allowed_peers": f"{ID}/services",
        "security.allowed_clients": f"{ID}/edge",
    }
    with Deployment(prefill=1, decode=1, settings=settings, model=tiny_model) as deployment:
        (router,) = deployment.routers
        places = edge_places([router.address], [router.http.removeprefix("http://")])
        tls = place_tls(authority.secret(tmp_path / "edge", edge_identity))
        with Envoy("edge-mtls", {**places, **tls}) as edge:
            edge.wait_healthy("routers-grpc", 1)
            edge.wait_healthy("routers-http", 1)
            await assert_answers(edge, authority)
            # Another certificate in the same files is shown from the next connection on.
            updates = "cluster.routers-grpc.client_ssl_socket_factory.ssl_context_update_by_sds"
            before = edge.stat(updates)
            shown = Identity(tmp_path / "edge" / "tls.crt", tmp_path / "edge" / "tls.key")
            shown.replace_by(authority.issue("renewed", spiffe_id=f"{ID}/edge"))
            await until(lambda: edge.stat(updates) > before, "the certificate is read again")
            await assert_answers(edge, authority)
        other = authority.issue("stranger", spiffe_id=f"{ID}/else")
        stranger = place_tls(authority.secret(tmp_path / "stranger", other))
        with Envoy("edge-mtls", {**places, **stranger}) as edge, pytest.raises(grpc.aio.AioRpcError) as caught:
            await assert_answers(edge, authority)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


class Pods:
    """Network namespaces that reach each other, and this one, over a bridge; none has a way out."""

    def __init__(self, names: Sequence[str]) -> None:
        self._tag = f"pf{os.getpid() % 100_000}"
        self._net = f"10.231.{os.getpid() % 250 + 1}"
        self._names = names

    def address(self, name: str) -> str:
        return f"{self._net}.{self._names.index(name) + 2}"

    def inside(self, name: str) -> tuple[str, ...]:
        return (programs.find("ip"), "netns", "exec", self._tag + name)

    def __enter__(self) -> "Pods":
        with ExitStack() as undone:
            self._make(undone)
            self._undone = undone.pop_all()
        return self

    def _make(self, undone: ExitStack) -> None:
        self._ip("link", "add", self._tag, "type", "bridge")
        undone.callback(self._ip, "link", "del", self._tag)
        self._ip("addr", "add", f"{self._net}.1/24", "dev", self._tag)
        self._ip("link", "set", self._tag, "up")
        for name in self._names:
            space, outer = self._tag + name, f"{self._tag}{name[:2]}"
            self._ip("netns", "add", space)
            undone.callback(self._ip, "netns", "del", space)
            self._ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            self._ip("link", "set", outer, "master", self._tag, "up")
            self._ip("-n", space, "link", "set", "lo", "up")
            self._ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            self._ip("-n", space, "link", "set", "eth0", "up")

    def __exit__(self, *_: object) -> None:
        self._undone.close()

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run([programs.find("ip"), *arguments], check=True)


@pytest.fixture
def pods() -> Iterator[Pods]:
    if os.geteuid():
        programs.lack("network namespaces are for root")
    programs.find("iptables")
    with Pods(ROLES) as made:
        yield made


class Pod:
    """A service that knows no TLS, with its sidecar, in a namespace of its own."""

    def __init__(self, pods: Pods, role: Role, settings: Settings, port: int, tls: Places) -> None:
        self.service = Service(role, port, settings | {"server.advertised_host": pods.address(role)})
        self.address = f"{pods.address(role)}:{self.service.port}"
        self.http = self.service.http.rpartition(":")[2] if role == "router" else "1"
        self.service.command_prefix = pods.inside(role)
        redirect = (str(SHIPPED / "redirect.sh"), str(self.service.port), self.http)
        subprocess.run([*pods.inside(role), *redirect], check=True)
        places = {place: place for place in ("0.0.0.0:15006", "0.0.0.0:15007", "127.0.0.1:15001")}
        places |= {"127.0.0.1:50051": self.service.address, "127.0.0.1:8080": f"127.0.0.1:{self.http}"}
        places |= {ADMIN: f"{pods.address(role)}:0"}
        group = ("setpriv", "--regid", "1337", "--clear-groups")
        self.sidecar = Envoy("sidecar-mtls", {**places, **tls}, command_prefix=(*pods.inside(role), *group))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self.sidecar:
            self.service.start()
            try:
                yield
            finally:
                self.service.kill()
                self.service.close()


async def test_services_that_know_no_tls_behind_sidecars_that_do(tiny_model: Path, tmp_path: Path, pods: Pods) -> None:
    authority, port = Authority(tmp_path), free_port()
    address = {role: f"{pods.address(role)}:{port}" for role in ROLES}
    settings = {**QUICK, "engine.model": str(tiny_model), "telemetry.otlp_endpoint": address["router"]}
    settings |= {f"router.{role}": address[role] for role in ("prefill", "decode")}
    with ExitStack() as stack:
        made = {}
        for role in ROLES:
            identity = authority.issue(role, spiffe_id=f"{ID}/{role}")
            made[role] = Pod(pods, role, settings, port, place_tls(authority.secret(tmp_path / role, identity)))
            stack.enter_context(made[role].running())
        router = made["router"]
        for role in reversed(ROLES):
            await asyncio.to_thread(made[role].service.wait_ready)
        places = edge_places([router.address], [f"{pods.address('router')}:{router.http}"])
        identity = authority.issue("edge", spiffe_id=f"{ID}/edge")
        tls = place_tls(authority.secret(tmp_path / "edge", identity))
        edge = stack.enter_context(Envoy("edge-mtls", {**places, **tls}))
        edge.wait_healthy("routers-grpc", 1)
        edge.wait_healthy("routers-http", 1)
        await assert_answers(edge, authority)
        handshakes = {role: made[role].sidecar.stat("listener.0.0.0.0_15006.ssl.handshake") for role in ROLES}
        assert handshakes["prefill"] >= 1 and handshakes["decode"] >= 2  # of the router, and of the prefill worker
        stranger = Authority(tmp_path, "stranger").issue("prefill2", spiffe_id=f"{ID}/prefill")
        other = authority.issue("other", spiffe_id="spiffe://example.org/elsewhere")
        for role in ROLES:
            assert not await is_served(grpc.aio.insecure_channel(made[role].address))
            for identity in (stranger, other):
                assert not await is_served(channel_of(made[role].address, authority, identity))
            mine = authority.issue(f"{role}-client", spiffe_id=f"{ID}/probe")
            assert await is_served(channel_of(made[role].address, authority, mine))


def channel_of(address: str, authority: Authority, identity: Identity) -> grpc.aio.Channel:
    files = (authority.cert.read_bytes(), identity.key.read_bytes(), identity.cert.read_bytes())
    options = (("grpc.ssl_target_name_override", SERVER_NAME),)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*files), options=options)


async def is_served(channel: grpc.aio.Channel) -> bool:
    """Whether the service's health answers."""
    async with channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return False
        return True
