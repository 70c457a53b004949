"""Services that trust nobody without a certificate: what answers whom, and certificates that change under load."""

import asyncio
import ssl
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority, Identity
from cluster import generate, greedy, pageferry, running, wait_idle
from fake_engine import make_work
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import free_port
from opentelemetry.trace import NoOpTracer
from services import Deployment, Service
from traces import wait_trace

from pageferry.client import Client
from pageferry.core.errors import PermissionDeniedError
from pageferry.runtime.channels import open_channel
from pageferry.runtime.convert_work import work_to_proto
from pageferry.runtime.tls import Certificates, TlsFiles
from pageferry.v1 import decode_pb2 as pb, page_pb2
from pageferry.v1.decode_pb2_grpc import DecodeServiceStub
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub
from pageferry.v1.page_pb2_grpc import PageServiceStub

pytestmark = pytest.mark.timeout(300)
SERVICES_ID, CLIENT_ID = "spiffe://pageferry.test/services/tiny", "spiffe://pageferry.test/clients/tester"
OF_WORKERS = Counter({("kv.push", "CLIENT"): 1, ("kv.push", "SERVER"): 1, ("decode.generate", "INTERNAL"): 1})
# One of each service that is no health service, and what a probe would call.
METHODS = (
    "pageferry.v1.InferenceService/Generate",
    "pageferry.v1.InferenceService/GetStatus",
    "inference.GRPCInferenceService/ModelInfer",
    "pageferry.v1.PrefillService/Prefill",
    "pageferry.v1.DecodeService/Decode",
    "pageferry.v1.PageService/Push",
    "pageferry.v1.WorkerService/Watch",
    "pageferry.v1.AdminService/Drain",
    "opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "grpc.health.v1.Health/Check",
)


@dataclass
class Secured:
    """A deployment, who has signed its certificate, and what it reads of both."""

    deployment: Deployment
    authority: Authority
    services: Identity
    client: Identity
    trusted: Path  # by the services

    def files(self, identity: Identity | None = None, authority: Authority | None = None) -> dict[str, str]:
        """As the client library takes them; by default those of the client."""
        shown = identity or self.client
        return {"ca": str((authority or self.authority).cert), "cert": str(shown.cert), "key": str(shown.key)}

    def channel(self, service: Service, identity: Identity | None = None) -> grpc.aio.Channel:
        files = self.files(identity)
        return open_channel(service.address, NoOpTracer(), Certificates(TlsFiles(**files)))


def settings_of(directory: Path, services: Identity) -> dict[str, str]:
    return {
        "security.cert_file": str(services.cert),
        "security.key_file": str(services.key),
        "security.ca_file": str(directory / "trusted.pem"),
        "security.allowed_peers": "spiffe://pageferry.test/services/*",
    }


def secured(directory: Path, more: Mapping[str, str] | None = None) -> Secured:
    authority = Authority(directory)
    trusted = directory / "trusted.pem"
    trusted.write_bytes(authority.cert.read_bytes())
    services = authority.issue("services", spiffe_id=SERVICES_ID)
    deployment = Deployment(prefill=1, decode=1, settings=settings_of(directory, services) | dict(more or {}))
    for service in deployment.services:
        service.settings["server.health_port"] = str(free_port())
    return Secured(deployment, authority, services, authority.issue("client", spiffe_id=CLIENT_ID), trusted)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """For the tests that leave it as they found it."""
    made = secured(tmp_path_factory.mktemp("tls"), {"security.allowed_clients": CLIENT_ID})
    with made.deployment:
        yield made


async def code_of(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    call: Any = channel.unary_unary(f"/{method}")(b"", timeout=60)
    return await call.code()


async def test_all_that_services_tell_each_other_goes_over_connections_that_both_ends_have_proved(
    shared: Secured,
) -> None:
    router = shared.deployment.routers[0]
    async with shared.channel(router) as channel:
        answer = await generate(InferenceServiceStub(channel), greedy([5] * 40, 8))
        assert answer.finished is not None and answer.started is not None
        assert answer.finished.pages.shipped  # from prefill to decode
        await wait_trace(InferenceServiceStub(channel), answer.started.trace_id, OF_WORKERS, timeout_s=60)
    async with Client(router.address, **shared.files()) as client:
        assert (await client.generate([5] * 40, max_tokens=8, temperature=0, ignore_eos=True).result()).token_ids == (
            *answer.token_ids,
        )
    for service in shared.deployment.services:
        assert not [event for event in service.events() if event["event"] == "span_export_failing"]


async def test_without_a_certificate_nothing_but_health_answers(shared: Secured, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    impostor = stranger.issue("services", spiffe_id=SERVICES_ID)
    for service in shared.deployment.services:
        channels = (
            grpc.aio.insecure_channel(service.address),
            open_channel(service.address, NoOpTracer(), Certificates(TlsFiles(ca=str(shared.authority.cert)))),
            shared.channel(service, impostor),
        )
        for channel in channels:
            async with channel:
                codes = [await code_of(channel, method) for method in METHODS]
            assert codes == [grpc.StatusCode.UNAVAILABLE] * len(METHODS)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{service.settings['server.health_port']}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            health = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            codes = [await code_of(channel, method) for method in METHODS[:-1]]
            assert codes == [grpc.StatusCode.UNIMPLEMENTED] * len(codes)


async def test_who_has_a_certificate_may_call_what_its_id_is_listed_for(shared: Secured) -> None:
    (router,), (decode,) = shared.deployment.routers, shared.deployment.decode
    other = shared.authority.issue("other", spiffe_id="spiffe://pageferry.test/clients/other")
    for service, identity, method in (
        (decode, shared.client, "pageferry.v1.DecodeService/Decode"),
        (decode, shared.client, "pageferry.v1.PageService/Push"),
        (router, shared.client, "pageferry.v1.AdminService/Drain"),
        (router, shared.services, "pageferry.v1.InferenceService/Generate"),
        (router, other, "pageferry.v1.InferenceService/GetStatus"),
        (router, shared.services, "inference.GRPCInferenceService/ModelInfer"),
    ):
        async with shared.channel(service, identity) as channel:
            assert await code_of(channel, method) is grpc.StatusCode.PERMISSION_DENIED
    async with Client(router.address, **shared.files(other)) as client:
        with pytest.raises(PermissionDeniedError, match=r"clients/other is not in security\.allowed_clients"):
            await client.generate("a").result()


async def test_http_wants_the_same_certificates(shared: Secured) -> None:
    (router,) = shared.deployment.routers
    url = f"{router.http.replace('http:', 'https:')}/v1/models"

    def status(identity: Identity | None) -> int:
        cert, key = (str(identity.cert), str(identity.key)) if identity is not None else ("", "")
        context = Certificates(TlsFiles(cert, key, str(shared.authority.cert))).for_http_client()
        try:
            with urllib.request.urlopen(url, timeout=60, context=context) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert await asyncio.to_thread(status, shared.client) == 200
    assert await asyncio.to_thread(status, shared.services) == 403
    two_ids = shared.authority.issue("two", spiffe_id=f"{CLIENT_ID},URI:{SERVICES_ID}")
    assert await asyncio.to_thread(status, two_ids) == 403
    async with shared.channel(router, two_ids) as channel:
        assert await code_of(channel, METHODS[1]) is grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises((ssl.SSLError, urllib.error.URLError, ConnectionError)):
        await asyncio.to_thread(status, None)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        await asyncio.to_thread(urllib.request.urlopen, f"{router.http}/health", timeout=60)


async def test_a_ticket_of_another_request_is_refused(shared: Secured) -> None:
    (decode,) = shared.deployment.decode
    async with shared.channel(decode, shared.services) as channel:
        decodes, pages = DecodeServiceStub(channel), PageServiceStub(channel)
        calls = {
            name: decodes.Decode(
                pb.DecodeRequest(work=work_to_proto(make_work(name, [7] * 40)), source=pb.PROMPT_SOURCE_PUSHED)
            )
            for name in ("mine", "other")
        }
        reserved = {name: (await anext(aiter(call))).reserved for name, call in calls.items()}
        for request_id, reason in (("other", b"TICKET_OF_ANOTHER_REQUEST"), ("mine", None)):
            opening = page_pb2.Open(
                ticket=reserved["mine"].ticket, request_id=request_id, layout=reserved["mine"].layout
            )
            push = pages.Push(iter([page_pb2.PushRequest(open=opening)]))
            if reason is None:
                assert (await push.read()).HasField("opened")
                push.cancel()
                continue
            assert await push.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert reason in dict(await push.trailing_metadata())["grpc-status-details-bin"]
        for call in calls.values():
            call.cancel()
    async with shared.channel(shared.deployment.routers[0]) as channel:
        await wait_idle(InferenceServiceStub(channel), timeout_s=60)


async def test_certificates_and_their_authority_change_while_streams_go_on(tmp_path: Path) -> None:
    made = secured(tmp_path)
    (router,) = made.deployment.routers
    old = made.authority
    with made.deployment:
        pids = [service.pid for service in made.deployment.services]
        async with Client(router.address, **made.files()) as client:
            undisturbed = await client.generate([5] * 40, max_tokens=64, temperature=0, ignore_eos=True).result()
            streams = [client.generate([5] * 40, max_tokens=1500, temperature=0, ignore_eos=True) for _ in range(4)]
            readers = [aiter(stream) for stream in streams]
            for reader in readers:
                await anext(reader)
            new = Authority(tmp_path, "new-ca")
            made.trusted.write_bytes(old.cert.read_bytes() + new.cert.read_bytes())
            made.services.replace_by(new.issue("new-services", spiffe_id=SERVICES_ID))
            fresh = new.issue("new-client", spiffe_id=CLIENT_ID)
            made.trusted.write_bytes(new.cert.read_bytes())
            async with Client(router.address, **made.files(fresh, new)) as other:
                during = await other.generate([6] * 40, max_tokens=64, temperature=0, ignore_eos=True).result()
                assert during.pages.shipped  # the prefill worker has connected anew
                again = await other.generate([5] * 40, max_tokens=64, temperature=0, ignore_eos=True).result()
            assert again.token_ids == undisturbed.token_ids
            async with open_channel(
                router.address, NoOpTracer(), Certificates(TlsFiles(**made.files(fresh, new)))
            ) as channel:
                await wait_trace(InferenceServiceStub(channel), again.trace_id, OF_WORKERS, timeout_s=60)
            for stream, reader in zip(streams, readers, strict=True):
                assert [delta async for delta in reader]
                whole = await stream.result()
                assert whole.token_ids[:64] == undisturbed.token_ids and len(whole.token_ids) == 1500
        assert [service.pid for service in made.deployment.services] == pids
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # who still has the old certificates
            async with made.channel(router) as channel:
                await generate(InferenceServiceStub(channel), greedy([5] * 8, 1))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
def test_up_and_the_commands_with_certificates(tiny_model: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    (tmp_path / "trusted.pem").write_bytes(authority.cert.read_bytes())
    services = authority.issue("services", spiffe_id=SERVICES_ID)
    settings = settings_of(tmp_path, services) | {"router.local_prefill_tokens": "0"}
    with running("--model", str(tiny_model), settings=settings) as cluster:
        files = ("--ca", str(authority.cert), "--cert", str(services.cert), "--key", str(services.key))
        asked = pageferry("generate", "--raw", "--max-tokens", "4", "--address", cluster.address, *files, "Once upon")
        assert asked.returncode == 0, asked.stderr
        shown = pageferry("trace", "--address", cluster.address, *files)
        assert shown.returncode == 0, shown.stderr
        assert "kv.push" in shown.stdout
        load = ("--tokenizer", str(tiny_model), "--requests", "2")
        benched = pageferry("bench", "--target", cluster.address, *files, *load, timeout_s=200)
        assert benched.returncode == 0, benched.stderr
        for given, hint in (
            ((), "want a certificate: --ca, --cert and --key"),
            (files[:2], "want a certificate: --ca, --cert and --key"),
            (("--ca", str(Authority(tmp_path, "stranger").cert)), "is not signed by whom --ca names"),
            ((*files, "--server-name", "elsewhere.test"), "is for another name; see --server-name"),
        ):
            refused = pageferry("status", "--address", cluster.address, *given)
            assert refused.returncode == 1
            assert refused.stderr.startswith(f"error: no router answers at {cluster.address}: ")
            assert hint in refused.stderr
        drained = pageferry("drain", "--address", cluster.address, *files)
        assert drained.returncode == 0, drained.stderr
        halved = pageferry("status", "--address", cluster.address, *files[:4])
        assert halved.returncode == 1
        assert halved.stderr == "error: key is '', must be given where cert is, and only there\n"
