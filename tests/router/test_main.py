"""The router's main function over fake workers: both servers, health, traces, and the drain."""

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import asking
import grpc
import httpx
import pytest
from answer import Answer
from ext_proc import MODE, Told, body_of, headers_of
from fake_workers import LAYOUT, MODEL, Rig, Script
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from loopback import free_port
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from pageferry.client.request import credentials
from pageferry.core.config import Config, EngineConfig, RouterConfig, ServerConfig, TelemetryConfig
from pageferry.core.errors import InvalidArgumentError, UnavailableError
from pageferry.core.security import SecurityConfig
from pageferry.core.tenants import key_digest
from pageferry.ext_proc.external_processor_pb2_grpc import ExternalProcessorStub
from pageferry.oip import open_inference_pb2 as oip
from pageferry.oip.open_inference_pb2_grpc import GRPCInferenceServiceStub
from pageferry.router import record
from pageferry.router.__main__ import main
from pageferry.router.gateway import bodies
from pageferry.router.oip import OIP_SERVICE
from pageferry.runtime import access
from pageferry.runtime.convert import layout_to_proto
from pageferry.runtime.errors import from_rpc_error
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.admin_pb2 import DrainRequest
from pageferry.v1.admin_pb2_grpc import AdminServiceStub
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

SERVING = health_pb2.HealthCheckResponse.SERVING
ask = partial(asking.ask, prompt="Say something.", request_id="r-1", max_tokens=3)


def config_for(router: Rig, **server: object) -> Config:
    return Config(
        server=ServerConfig(port=free_port(), **server),
        engine=EngineConfig(model=router.model_dir),
        router=RouterConfig(
            prefill=tuple(prefill.address for prefill in router.prefills),
            decode=tuple(decode.address for decode in router.decodes),
            local_prefill_tokens=0,
        ),
    )


@asynccontextmanager
async def running(config: Config, stop: asyncio.Event) -> AsyncIterator[grpc.aio.Channel]:
    """The router with its health at SERVING; stopped in the end, and found to end well."""
    process = asyncio.create_task(main(config, stop))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{config.server.port}") as channel:
        try:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            async with asyncio.timeout(60):
                while (await watch.read()).status != SERVING:
                    assert not process.done(), process.result()
            watch.cancel()
            yield channel
        finally:
            stop.set()
            async with asyncio.timeout(60):
                assert await process == 0


@pytest.fixture
async def workers(tiny_model: Path) -> AsyncIterator[Rig]:
    named = tiny_model.parent / MODEL
    async with Rig(str(named), Script([4 + byte for byte in b"abcdef"])) as router:
        yield router


async def test_grpc_and_http_serve_the_same(workers: Rig) -> None:
    config = config_for(workers, http_port=free_port())
    async with running(config, asyncio.Event()) as channel, httpx.AsyncClient() as http:
        stub = InferenceServiceStub(channel)
        answer = await Answer().read(stub.Generate(ask()))
        assert answer.text == "abc"
        response = await stub.GetTrace(pb.GetTraceRequest(id="r-1"))
        assert response.trace_id == answer.started.trace_id
        spans = [
            span.name
            for group in TracesData.FromString(response.traces_data).resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        assert {"pageferry.request", "queue", "route", "pageferry.v1.DecodeService/Decode"} <= set(spans)
        url = f"http://127.0.0.1:{config.server.http_port}"
        body = {"model": MODEL, "prompt": "Say something.", "max_tokens": 3}
        reply = await http.post(f"{url}/v1/completions", json=body)
        assert reply.json()["choices"][0]["text"] == "abc"
        assert (await http.get(f"{url}/health")).status_code == 200
        metrics = (await http.get(f"{url}/metrics")).text
        assert 'pageferry_requests_total{outcome="length"} 2.0' in metrics
        told = (await http.get(f"{url}/pageferry/v1/requests")).json()["requests"]
        assert (await http.get(url)).status_code == 200 and told[1]["request_id"] == "r-1"
        trace = (await http.get(f"{url}/pageferry/v1/traces/{told[0]['trace_id']}")).json()
        assert trace["spans"][0]["name"] == "pageferry.request"
        status = (await http.get(f"{url}/pageferry/v1/status")).json()
        assert (status["model"], status["keeps_traces"], status["num_requests"]) == (MODEL, True, 2)


async def test_bodies_of_http_and_of_gateways_are_bounded_together(
    workers: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_BYTES", 1000)
    config = config_for(workers, http_port=free_port())
    config = replace(config, router=replace(config.router, picker_port=1))
    async with running(config, asyncio.Event()) as channel, httpx.AsyncClient() as http, asyncio.timeout(60):
        call, told = ExternalProcessorStub(channel).Process(), Told()
        await call.write(headers_of(body_mode=MODE.FULL_DUPLEX_STREAMED))
        await call.write(body_of(b"x" * 600, end_of_stream=False))
        reading = asyncio.create_task(call.read())
        url = f"http://127.0.0.1:{config.server.http_port}"
        body = {"model": MODEL, "prompt": "Say something.", "max_tokens": 3, "user": "y" * 600}
        while not reading.done():  # it may come before the other one has
            assert (await http.post(f"{url}/v1/completions", json=body)).status_code == 200
        told.take(await reading)
        assert (told.status, told.error["code"]) == (503, "bodies_full")
        metrics = (await http.get(f"{url}/metrics")).text
        assert 'pageferry_rejections_total{reason="BODIES_FULL"} 1.0' in metrics
        assert 'pageferry_requests_total{outcome="unavailable"} 1.0' in metrics


async def test_the_page_can_be_turned_off(workers: Rig) -> None:
    config = config_for(workers, http_port=free_port(), page=False)
    async with running(config, asyncio.Event()), httpx.AsyncClient() as http:
        url = f"http://127.0.0.1:{config.server.http_port}"
        assert (await http.get(f"{url}/health")).status_code == 200
        for path in ("", "/pageferry/v1/status"):
            assert (await http.get(url + path)).status_code == 404


async def test_points_are_noted_while_the_router_runs(workers: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "INTERVAL_S", 0.01)
    config = config_for(workers, http_port=free_port())
    async with running(config, asyncio.Event()), httpx.AsyncClient() as http, asyncio.timeout(60):
        url = f"http://127.0.0.1:{config.server.http_port}/pageferry/v1/status"
        while not (await http.get(url)).json()["history"]["points"]:
            pass


async def test_clients_of_other_protocols_find_theirs(workers: Rig) -> None:
    async with running(config_for(workers), asyncio.Event()) as channel:
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        answer = await reflection.ServerReflectionInfo(asked).read()
        assert OIP_SERVICE in {service.name for service in answer.list_services_response.service}
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(service=OIP_SERVICE))).status == SERVING
        request = oip.ModelInferRequest(model_name=MODEL)
        request.parameters["max_tokens"].int64_param = 3
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"Say it.")
        response = await GRPCInferenceServiceStub(channel).ModelInfer(request)
        assert list(response.outputs[0].contents.bytes_contents) == [b"abc"]


async def test_no_trace_is_kept_where_a_collector_gets_them(workers: Rig) -> None:
    config = replace(config_for(workers), telemetry=TelemetryConfig(otlp_endpoint="127.0.0.1:1"))
    async with running(config, asyncio.Event()) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="traces go to a collector"):
            await InferenceServiceStub(channel).GetTrace(pb.GetTraceRequest())


async def test_a_drain_lets_a_live_stream_end(workers: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def logged(event: str) -> list[dict[str, object]]:
        return [record.pageferry_fields for record in caplog.records if record.message == event]

    caplog.set_level("INFO", "pageferry")
    gate = workers.decode.pause_at[1] = asyncio.Event()
    stop = asyncio.Event()
    async with running(config_for(workers, drain_grace_s=60), stop) as channel:
        stub = InferenceServiceStub(channel)
        call = stub.Generate(ask())
        answer = Answer()
        for _ in range(2):  # Started and the first token
            answer.take(await call.read())
        stop.set()
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status == SERVING:
            pass
        watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError, match="draining"):
            await stub.Generate(ask()).read()
        assert logged("draining") == [{"grace_s": 60, "open_calls": 1}]  # as it begins, and once
        gate.set()
        while (event := await call.read()) is not grpc.aio.EOF:
            answer.take(event)
        assert (answer.text, answer.reason) == ("abc", "length")
    assert len(logged("draining")) == len(logged("drained")) == 1


async def test_no_body_that_is_half_sent_holds_up_the_end(workers: Rig) -> None:
    config, stop = config_for(workers, http_port=free_port()), asyncio.Event()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n"
    async with running(config, stop), asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", config.server.http_port)
        writer.write(head + b"expect: 100-continue\r\n\r\n{")
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
        stop.set()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503") and b'"code":"draining"' in answer
        writer.close()


async def test_only_an_admin_may_drain_a_router_that_knows_its_callers(workers: Rig, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    keys = {name: f"{name}-{'k' * 32}" for name in ("boss", "acme")}
    lines = [
        f'[[tenant]]\nname = "{name}"\nkey_sha256 = ["{key_digest(key)}"]\nadmin = {str(name == "boss").lower()}\n'
        for name, key in keys.items()
    ]
    tenants.write_text("".join(lines), encoding="utf-8")
    config = replace(config_for(workers), security=SecurityConfig(tenants_file=str(tenants)))
    async with running(config, asyncio.Event()) as channel:
        admin = AdminServiceStub(channel)
        for key, code in (("", "UNAUTHENTICATED"), (keys["acme"], "PERMISSION_DENIED")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await admin.Drain(DrainRequest(), metadata=credentials(key)).read()
            assert caught.value.code().name == code
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == SERVING
        told = [message async for message in admin.Drain(DrainRequest(), metadata=credentials(keys["boss"]))]
        assert told[-1].HasField("drained")
        assert (await health.Check(health_pb2.HealthCheckRequest())).status != SERVING


async def test_a_router_that_knows_its_callers_takes_spans_from_its_own_machine_only(
    workers: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("", encoding="utf-8")
    config = replace(config_for(workers), security=SecurityConfig(tenants_file=str(tenants)))
    async with running(config, asyncio.Event()) as channel:
        stub = TraceServiceStub(channel)
        assert await stub.Export(ExportTraceServiceRequest()) == ExportTraceServiceResponse()
        monkeypatch.setattr(access, "_LOOPBACK", ("ipv4:192.0.2.",))  # as if it came from elsewhere
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Export(ExportTraceServiceRequest())
        assert from_rpc_error(caught.value).reason == "NOT_LOCAL"


@pytest.mark.parametrize("problem", ["no chat template", "error in line 1"])
@pytest.mark.field("vllm-project/vllm#18140", "vllm-project/vllm#39279")
async def test_a_model_without_a_usable_chat_template_is_told_at_the_start_and_completes(
    workers: Rig, tmp_path: Path, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    model = Path(shutil.copytree(workers.model_dir, tmp_path / MODEL))
    tokenizer_config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    del tokenizer_config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    if problem != "no chat template":
        (model / "chat_template.jinja").write_text("{% for %}", encoding="utf-8")
    config = replace(config_for(workers, http_port=free_port()), engine=EngineConfig(model=str(model)))
    async with running(config, asyncio.Event()) as channel, httpx.AsyncClient() as http:
        (logged,) = [record for record in caplog.records if record.message == "no_chat_template"]
        assert problem in logged.pageferry_fields["problem"]
        chat = ask()
        chat.chat.messages.add(role="user", content="Hi")
        with pytest.raises(grpc.aio.AioRpcError, match=problem) as caught:
            await InferenceServiceStub(channel).Generate(chat).read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        url = f"http://127.0.0.1:{config.server.http_port}/v1"
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
        refused = await http.post(f"{url}/chat/completions", json=body)
        assert refused.status_code == 400
        assert "put a chat template into" in refused.json()["error"]["message"]
        reply = await http.post(f"{url}/completions", json={"model": MODEL, "prompt": "Say.", "max_tokens": 3})
        assert reply.json()["choices"][0]["text"] == "abc"


@pytest.mark.field("vllm-project/vllm#42895", "ROCm/ATOM#2249")
async def test_health_says_that_workers_do_not_fit(workers: Rig) -> None:
    async with running(config_for(workers), asyncio.Event()) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        workers.prefill.snapshot.layout.CopyFrom(layout_to_proto(replace(LAYOUT, page_size=32)))
        workers.prefill.restart()
        await workers.prefill.server.__aexit__(None, None, None)
        await workers.serve(workers.prefill, workers.log.tracer())
        async with asyncio.timeout(60):
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()


async def test_what_is_wrong_at_the_start_is_one_clear_error(workers: Rig) -> None:
    with pytest.raises(InvalidArgumentError, match=r"router\.decode is \(\), must name at least one"):
        await main(Config(), asyncio.Event())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = config_for(workers, http_port=taken.getsockname()[1])
        with pytest.raises(UnavailableError, match="can't be opened"):
            await main(config, asyncio.Event())
