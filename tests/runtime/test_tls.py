"""Encrypted connections: who gets one, who may call what on it, and what happens when files change."""

import asyncio
import http.client
import socket
import ssl
import threading
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import SERVER_NAME, Authority, Identity
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import FakeDecode, free_port
from opentelemetry.trace import NoOpTracer

from pageferry.core.config import ServerConfig
from pageferry.core.errors import InvalidArgumentError, PermissionDeniedError
from pageferry.core.security import SecurityConfig
from pageferry.runtime import metrics
from pageferry.runtime.channels import open_channel
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.server import GrpcServer, ServerSecurity
from pageferry.runtime.tls import Certificates, TlsFiles
from pageferry.runtime.worker_metrics import WorkerMetrics
from pageferry.v1 import decode_pb2, decode_pb2_grpc

ROUTER_ID = "spiffe://pageferry.test/router"
TRACER = NoOpTracer()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def server_identity(authority: Authority) -> Identity:
    return authority.issue("server", spiffe_id="spiffe://pageferry.test/decode")


@pytest.fixture
def caller(authority: Authority) -> Identity:
    return authority.issue("caller", spiffe_id=ROUTER_ID)


def security_of(identity: Identity, authority: Authority | None, **more: Any) -> SecurityConfig:
    ca_file = str(authority.cert) if authority is not None else ""
    return SecurityConfig(cert_file=str(identity.cert), key_file=str(identity.key), ca_file=ca_file, **more)


def files_of(authority: Authority, identity: Identity | None = None, server_name: str = "") -> Certificates:
    cert, key = (str(identity.cert), str(identity.key)) if identity is not None else ("", "")
    return Certificates(TlsFiles(cert, key, str(authority.cert), server_name))


@asynccontextmanager
async def serving(
    security: SecurityConfig, *, for_clients: bool = False, gate: asyncio.Event | None = None, **config: int
) -> AsyncIterator[GrpcServer]:
    """A decode service whose answer is two messages, the second once the gate is open."""

    async def decode(request: Any, context: Any) -> AsyncIterator[Any]:
        yield decode_pb2.DecodeResponse()
        if gate is not None:
            await gate.wait()
        yield decode_pb2.DecodeResponse()

    served = ServerSecurity.of(security, Certificates.of(security), for_clients=for_clients)
    async with GrpcServer(ServerConfig(**config), TRACER, served) as server:
        register = decode_pb2_grpc.add_DecodeServiceServicer_to_server
        server.add(register, FakeDecode(decode), "pageferry.v1.DecodeService")
        server.add(lambda *_: None, None, "pageferry.v1.InferenceService")  # whose health clients of several look at
        await server.start()
        await server.set_serving(True)
        yield server


def channel_to(server: GrpcServer, certificates: Certificates | None) -> grpc.aio.Channel:
    return open_channel(f"127.0.0.1:{server.port}", TRACER, certificates)


async def ask(channel: grpc.aio.Channel) -> int:
    """How many messages came."""
    stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
    return len([message async for message in stub.Decode(decode_pb2.DecodeRequest(), timeout=60)])


async def error_of(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel)
    return caught.value


async def health_of(channel: grpc.aio.Channel) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)).status)


async def test_a_caller_with_a_certificate_is_served(
    authority: Authority, server_identity: Identity, caller: Identity
) -> None:
    async with serving(security_of(server_identity, authority, allowed_peers=(ROUTER_ID,))) as server:
        for server_name in ("", SERVER_NAME):
            async with channel_to(server, files_of(authority, caller, server_name)) as channel:
                assert await ask(channel) == 2


async def test_without_a_certificate_nothing_but_health_answers(
    authority: Authority, server_identity: Identity, tmp_path: Path
) -> None:
    health_port = free_port()
    stranger = Authority(tmp_path, "stranger")
    async with serving(security_of(server_identity, authority), health_port=health_port) as server:
        for certificates in (None, files_of(authority), files_of(authority, stranger.issue("caller"))):
            error = await error_of(channel_to(server, certificates))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError):
                async with channel_to(server, certificates) as channel:
                    await health_of(channel)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{health_port}") as channel:
            assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING
            await server.set_serving(False)
            assert await health_of(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(channel)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_server_that_others_have_signed_is_not_talked_to(
    authority: Authority, caller: Identity, tmp_path: Path
) -> None:
    stranger = Authority(tmp_path, "stranger")
    async with serving(security_of(stranger.issue("server"), authority)) as server:
        error = await error_of(channel_to(server, files_of(authority, caller)))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
    async with serving(security_of(authority.issue("elsewhere", address="192.0.2.1"), authority)) as server:
        error = await error_of(channel_to(server, files_of(authority, caller)))
        assert error.code() is grpc.StatusCode.UNAVAILABLE  # the certificate is another host's
        async with channel_to(server, files_of(authority, caller, SERVER_NAME)) as channel:
            assert await ask(channel) == 2


@pytest.mark.parametrize(
    ("spiffe_id", "allowed", "is_served"),
    [
        (ROUTER_ID, ("spiffe://pageferry.test/*",), True),
        (ROUTER_ID, ("spiffe://pageferry.test/prefill", ROUTER_ID), True),
        (ROUTER_ID + "2", (ROUTER_ID,), False),
        (ROUTER_ID, ("spiffe://pageferry.test/prefill",), False),
        ("spiffe://pageferry.test.evil/router", ("spiffe://pageferry.test/*",), False),
        ("", ("spiffe://pageferry.test/*",), False),
        ("", (), True),
    ],
)
async def test_who_may_call_a_worker_is_in_its_list(
    authority: Authority, server_identity: Identity, spiffe_id: str, allowed: tuple[str, ...], is_served: bool
) -> None:
    identity = authority.issue("someone", spiffe_id=spiffe_id)
    async with serving(security_of(server_identity, authority, allowed_peers=allowed)) as server:
        if is_served:
            async with channel_to(server, files_of(authority, identity)) as channel:
                assert await ask(channel) == 2
            return
        error = from_rpc_error(await error_of(channel_to(server, files_of(authority, identity))))
        assert isinstance(error, PermissionDeniedError)
        assert error.reason == "NOT_ALLOWED"
        assert f"{spiffe_id or 'without a SPIFFE id'}" in error.message and "allowed_peers" in error.message
        async with channel_to(server, files_of(authority, identity)) as channel:
            assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING


async def test_where_clients_need_none_peers_services_still_want_one(
    authority: Authority, server_identity: Identity
) -> None:
    security = security_of(server_identity, authority, client_certs=False)
    async with serving(security, for_clients=True) as server:
        error = from_rpc_error(await error_of(channel_to(server, files_of(authority))))
        assert error.reason == "NO_CERTIFICATE"
        async with channel_to(server, files_of(authority)) as channel:
            assert await health_of(channel) == health_pb2.HealthCheckResponse.SERVING


async def test_a_changed_certificate_is_shown_to_the_next_connection_while_streams_go_on(
    authority: Authority, server_identity: Identity, caller: Identity, tmp_path: Path
) -> None:
    gate, other = asyncio.Event(), Authority(tmp_path, "other")
    both = tmp_path / "both.pem"
    both.write_bytes(authority.cert.read_bytes())
    security = SecurityConfig(str(server_identity.cert), str(server_identity.key), str(both))
    trusting = Certificates(TlsFiles(str(caller.cert), str(caller.key), str(both)))
    async with serving(security, gate=gate) as server, channel_to(server, trusting) as channel:
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        stream = stub.Decode(decode_pb2.DecodeRequest())
        await anext(stream)
        both.write_bytes(authority.cert.read_bytes() + other.cert.read_bytes())  # both are trusted, for a while
        server_identity.replace_by(other.issue("new-server"))
        caller.replace_by(other.issue("new-caller"))
        both.write_bytes(other.cert.read_bytes())
        gate.set()
        assert await ask(channel) == 2  # on a connection on which all are new
        assert [message async for message in stream]  # the old one has gone on
        async with channel_to(server, files_of(other, caller)) as channel_of_new:
            assert await ask(channel_of_new) == 2
        error = await error_of(channel_to(server, files_of(authority, caller)))
        assert error.code() is grpc.StatusCode.UNAVAILABLE  # who trusts the old authority alone


async def test_a_connection_with_old_certificates_is_closed_after_its_last_call(
    authority: Authority, server_identity: Identity, caller: Identity
) -> None:
    gate = asyncio.Event()
    async with serving(security_of(server_identity, authority), gate=gate) as server:
        channel: Any = channel_to(server, files_of(authority, caller))
        async with channel:
            stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
            stream = stub.Decode(decode_pb2.DecodeRequest())
            await anext(stream)
            secure = channel._inner
            old = secure._current.channel
            caller.replace_by(authority.issue("caller-2"))
            next_stream = stub.Decode(decode_pb2.DecodeRequest())
            await anext(next_stream)
            assert secure._current.channel is not old
            assert [retired.channel for retired in secure._retired] == [old]
            assert old.get_state() is grpc.ChannelConnectivity.READY
            gate.set()
            assert [message async for message in stream]
            async with asyncio.timeout(60):
                while secure._retired or secure._closing:  # noqa: ASYNC110 - until the call's end is told
                    await asyncio.sleep(0)
            assert old.get_state() is grpc.ChannelConnectivity.SHUTDOWN
            assert [message async for message in next_stream]


async def test_stubs_of_one_method_read_answers_each_in_their_way(
    authority: Authority, server_identity: Identity, caller: Identity
) -> None:
    async with (
        serving(security_of(server_identity, authority)) as server,
        channel_to(server, files_of(authority, caller)) as channel,
    ):
        path, asked = "/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest()
        read = health_pb2.HealthCheckResponse.FromString
        reading = channel.unary_unary(path, health_pb2.HealthCheckRequest.SerializeToString, read)
        passing = channel.unary_unary(path, health_pb2.HealthCheckRequest.SerializeToString)
        assert await reading(asked) == read(await passing(asked))


async def test_several_addresses_need_a_name_of_their_own(
    authority: Authority, server_identity: Identity, caller: Identity
) -> None:
    security = security_of(server_identity, authority)
    async with serving(security) as first, serving(security) as second:
        address = f"127.0.0.1:{first.port},127.0.0.1:{second.port}"
        with pytest.raises(InvalidArgumentError, match="server_name is '', must be set where several"):
            open_channel(address, TRACER, files_of(authority, caller))
        async with open_channel(address, TRACER, files_of(authority, caller, SERVER_NAME)) as channel:
            assert await ask(channel) == 2


async def test_behind_a_name_the_certificate_has_the_name_and_not_the_address(
    authority: Authority, caller: Identity
) -> None:
    pod = authority.issue("pod", address="10.9.8.7")  # for SERVER_NAME, too
    async with serving(security_of(pod, authority)) as server:
        address = f"127.0.0.1:{server.port}"
        for files_name, name, is_taken in (
            ("", SERVER_NAME, True),
            (SERVER_NAME, "pageferry-decode", True),  # what the files say goes first
            ("", "pageferry-decode", False),
            ("", "", False),
        ):
            async with open_channel(address, TRACER, files_of(authority, caller, files_name), name=name) as channel:
                if is_taken:
                    assert await ask(channel) == 2
                else:
                    assert "Hostname Verification" in str(await error_of(channel)) or "verif" in str(
                        await error_of(channel)
                    )


def test_metrics_are_for_who_has_a_certificate(
    authority: Authority, server_identity: Identity, caller: Identity, tmp_path: Path
) -> None:
    port, other = free_port(), Authority(tmp_path, "other")
    WorkerMetrics().serve("127.0.0.1", port, files_of(authority, server_identity))

    def fetch(trusted: Authority, identity: Identity | None) -> bytes:
        context = files_of(trusted, identity).for_http_client()
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/metrics", context=context, timeout=60) as answer:
            return bytes(answer.read())

    with socket.create_connection(("127.0.0.1", port)):  # says nothing, and holds up nobody
        assert b"pageferry_pages" in fetch(authority, caller)
        with pytest.raises((OSError, http.client.HTTPException)):
            fetch(authority, None)
        with pytest.raises((OSError, http.client.HTTPException)):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)
        server_identity.replace_by(other.issue("new-server"))
        assert b"pageferry_pages" in fetch(other, caller)


@pytest.mark.parametrize("encrypted", [False, True])
def test_silent_connections_to_metrics_are_closed(
    authority: Authority,
    server_identity: Identity,
    encrypted: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(metrics, "SILENCE_S", 0.05)
    port = free_port()
    WorkerMetrics().serve("127.0.0.1", port, files_of(authority, server_identity) if encrypted else None)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as silent:
        assert silent.recv(1) == b""
    assert capfd.readouterr().err == ""


def test_no_session_outlives_the_authority_that_let_it_in(
    authority: Authority, server_identity: Identity, caller: Identity, tmp_path: Path
) -> None:
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.cert.read_bytes())
    certificates = Certificates(TlsFiles(str(server_identity.cert), str(server_identity.key), str(trusted)))
    serving = certificates.for_http(require_clients=True)
    asking = files_of(authority, caller).for_http_client()

    def connect(session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bytes]:
        ours, theirs = socket.socketpair()

        def answer() -> None:
            with suppress(OSError), serving.wrap_socket(theirs, server_side=True) as connection:
                connection.sendall(connection.recv(1))

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            with asking.wrap_socket(ours, server_hostname="127.0.0.1", session=session) as connection:
                connection.sendall(b"x")
                return connection.session, connection.recv(1)
        finally:
            answering.join()

    session, answered = connect(None)
    assert answered == b"x"
    trusted.write_bytes(Authority(tmp_path, "other").cert.read_bytes())
    with pytest.raises(OSError):
        connect(session)
    asking.maximum_version = ssl.TLSVersion.TLSv1_2
    trusted.write_bytes(authority.cert.read_bytes())
    with pytest.raises(OSError):
        connect(None)


def test_files_that_can_not_be_used_are_named(
    authority: Authority, server_identity: Identity, caller: Identity
) -> None:
    cert, key, ca = str(server_identity.cert), str(server_identity.key), str(authority.cert)
    for files, named in (
        (TlsFiles("/no/such.pem", key, ca), "/no/such.pem"),
        (TlsFiles(cert, str(caller.key), ca), str(caller.key)),
        (TlsFiles(cert, cert, ca), cert),
        (TlsFiles(cert, key, key), key),
    ):
        with pytest.raises(InvalidArgumentError, match=f"{named} .*can't be used"):
            Certificates(files)


def test_a_broken_new_file_leaves_the_old_one_in_use(
    authority: Authority, server_identity: Identity, capsys: pytest.CaptureFixture[str]
) -> None:
    certificates = files_of(authority, server_identity)
    before = certificates.now
    good = server_identity.cert.read_bytes()
    server_identity.cert.write_bytes(good[:100])
    assert certificates.now is before
    server_identity.cert.unlink()
    assert certificates.now is before
    server_identity.cert.write_bytes(good)
    assert certificates.now is not before
    assert certificates.now.cert == good


async def test_http_shows_what_the_files_hold_and_takes_whom_they_trust(
    authority: Authority, server_identity: Identity, caller: Identity, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other")
    both = tmp_path / "both.pem"
    both.write_bytes(authority.cert.read_bytes())
    certificates = Certificates(TlsFiles(str(server_identity.cert), str(server_identity.key), str(both)))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    context = certificates.for_http(require_clients=True)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]

    async def connects(trusted: Authority, identity: Identity | None) -> bool:
        asking = files_of(trusted, identity).for_http_client()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=asking)
            writer.write(b"hello\n")
            line = await reader.readline()
            writer.close()
        except (ssl.SSLError, ConnectionError):
            return False
        return line == b"hello\n"

    async with server:
        assert await connects(authority, caller)
        assert not await connects(authority, None)
        new = other.issue("new-caller")
        assert not await connects(authority, new)
        server_identity.replace_by(other.issue("new-server"))
        both.write_bytes(other.cert.read_bytes())
        assert await connects(other, new)
        assert not await connects(other, caller)
        assert not await connects(authority, new)
