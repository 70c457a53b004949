"""Clients of a router that wants certificates, and what becomes of theirs when the files change."""

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import fake_frontend as fake
import pytest
from certificates import Authority, Identity
from fake_frontend import FakeFrontend
from fake_inference import FakeInference
from opentelemetry.trace import NoOpTracer

from pageferry.client import Client, SyncClient
from pageferry.core.config import ServerConfig
from pageferry.core.errors import CancelledError, InvalidArgumentError, UnavailableError
from pageferry.core.security import SecurityConfig
from pageferry.runtime.server import GrpcServer, ServerSecurity
from pageferry.runtime.tls import Certificates
from pageferry.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def serving(authority: Authority, *script: fake.Step) -> AsyncIterator[str]:
    """The address."""
    router = authority.issue("router")
    security = SecurityConfig(str(router.cert), str(router.key), str(authority.cert))
    served = ServerSecurity.of(security, Certificates.of(security), for_clients=True)
    async with GrpcServer(ServerConfig(), NoOpTracer(), served) as server:
        service = FakeInference(FakeFrontend(script or fake.HELLO))
        server.add(add_InferenceServiceServicer_to_server, service, "pageferry.v1.InferenceService")
        yield f"127.0.0.1:{await server.start()}"


def files_of(authority: Authority, identity: Identity) -> dict[str, str]:
    return {"ca": str(authority.cert), "cert": str(identity.cert), "key": str(identity.key)}


async def test_both_clients_show_their_certificate(authority: Authority) -> None:
    caller = authority.issue("caller")
    async with serving(authority) as address:
        async with Client(address, **files_of(authority, caller)) as client:
            assert (await client.generate("a").result()).text == "Hello"

        def ask() -> str:
            with SyncClient(address, **files_of(authority, caller)) as blocking:
                return blocking.generate("a").result().text

        assert await asyncio.to_thread(ask) == "Hello"
        async with Client(address, ca=str(authority.cert)) as nobody:
            with pytest.raises(UnavailableError):
                await nobody.generate("a").result()


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"ca": "{ca}", "cert": "{ca}"}, "key is ''"),
        ({"cert": "{ca}", "key": "{ca}"}, "cert is .* must not be given without ca"),
        ({"server_name": "router"}, "server_name is 'router', must not be given without ca"),
        ({"ca": "/no/such.pem"}, "/no/such.pem can't be used: No such file"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(authority: Authority, files: dict[str, str], named: str) -> None:
    given = {name: value.format(ca=authority.cert) for name, value in files.items()}
    for kind in (Client, SyncClient):
        with pytest.raises(InvalidArgumentError, match=named):
            kind("127.0.0.1:1", **given)


@pytest.mark.parametrize("end", ["read", "close"])
async def test_a_blocking_client_takes_new_files_for_new_calls(authority: Authority, end: str) -> None:
    gate = asyncio.Event()
    caller = authority.issue("caller")
    async with serving(authority, *fake.HELLO[:2], gate, *fake.HELLO[2:]) as address:
        loop = asyncio.get_running_loop()

        def use() -> None:
            with SyncClient(address, **files_of(authority, caller)) as client:
                old_channel = weakref.ref(client._channel)
                old = client.generate("a")
                reader = iter(old)
                assert next(reader).text == "Hel"
                caller.replace_by(authority.issue("caller-2"))
                assert client.models()[0].name == "tiny"
                assert client._channel is not old_channel()
                if end == "read":
                    loop.call_soon_threadsafe(gate.set)
                    assert [delta.text for delta in reader] == ["lo"]
                    return
            with pytest.raises(CancelledError):
                list(reader)

        await asyncio.to_thread(use)
