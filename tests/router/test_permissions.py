"""API keys in front of the whole router, over gRPC and HTTP: who may do what, how much, and what is told of it."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import asking
import grpc
import httpx
import pytest
from answer import Answer
from fake_workers import Rig, Script, eventually
from gateway import client_of

from pageferry.core.config import Config, SecurityConfig, ServerConfig
from pageferry.core.tenants import key_digest
from pageferry.router.service import InferenceServicer
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.server import GrpcServer
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server

TOKENS = [4 + byte for byte in b"streamed text"]
ADMIN, ACME, OTHER = "key-of-the-admin", "key-of-acme", "key-of-other"
BODY = {"prompt": "Say something.", "max_tokens": 3}
ask = partial(asking.ask, prompt="Say something.", max_tokens=3)


@dataclass
class Door:
    router: Rig
    stub: InferenceServiceStub
    http: httpx.AsyncClient

    async def generate(self, key: str, **fields: object) -> Answer:
        return await Answer().read(self.stub.Generate(ask(**fields), metadata=bearer(key)))

    async def complete(self, key: str, **fields: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json=BODY | fields, headers=dict(bearer(key)))


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key else ()


def _write_tenants(path: Path, limits: str) -> None:
    path.write_text(
        f'[[tenant]]\nname = "root"\nadmin = true\nkey_sha256 = ["{key_digest(ADMIN)}"]\n'
        f'[[tenant]]\nname = "other"\nkey_sha256 = ["{key_digest(OTHER)}"]\n'
        f'[[tenant]]\nname = "acme"\nkey_sha256 = ["{key_digest(ACME)}"]\n{limits}\n',
        encoding="utf-8",
    )


@asynccontextmanager
async def door(tiny_model: Path, path: Path, limits: str = "") -> AsyncIterator[Door]:
    """A router that knows three tenants; `limits` are lines of TOML for acme."""
    _write_tenants(path, limits)
    config = Config(security=SecurityConfig(tenants_file=str(path)))
    async with Rig(str(tiny_model), Script(TOKENS), config=config, admin=(f"Bearer {ADMIN}",)) as router:
        async with (
            GrpcServer(ServerConfig(), router.log.tracer()) as server,
            client_of(router.frontend, router.metrics.registry) as http,
        ):
            server.add(add_InferenceServiceServicer_to_server, InferenceServicer(router.frontend), "x")
            async with grpc.aio.insecure_channel(f"127.0.0.1:{await server.start()}") as channel:
                yield Door(router, InferenceServiceStub(channel), http)
        await eventually(lambda: router.frontend.get_status(router.admin).running == 0)
        await router.check_idle()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tenants.toml"


async def refusal(call: object) -> tuple[str, str, int | None]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    error = from_rpc_error(caught.value)
    return error.code, error.reason, error.retry_after_ms


async def test_with_a_key_one_is_served_and_without_one_nothing_is(tiny_model: Path, path: Path) -> None:
    async with door(tiny_model, path) as to:
        for key, reason in (("", "NO_API_KEY"), ("wrong", "UNKNOWN_API_KEY")):
            for call in (
                to.generate(key),
                to.stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=bearer(key)),
                to.stub.ListModels(pb.ListModelsRequest(), metadata=bearer(key)),
                to.stub.GetStatus(pb.GetStatusRequest(), metadata=bearer(key)),
                to.stub.GetTrace(pb.GetTraceRequest(), metadata=bearer(key)),
            ):
                assert await refusal(call) == ("UNAUTHENTICATED", reason, None)
            refused = [await to.complete(key), await to.complete(key, stream=True)]
            urls = ("/v1/models", "/v1/models/tiny", "/metrics")
            refused += await asyncio.gather(*(to.http.get(url, headers=dict(bearer(key))) for url in urls))
            for response in refused:
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == reason.lower()
        assert to.router.prefill.works == []
        assert to.router.log.spans == [], "a stranger could fill the trace store"
        assert to.router.value("pageferry_requests_total", outcome="unauthenticated") == 20
        assert (await to.http.get("/health")).status_code == 200
        assert (await to.generate(ACME)).text == "str"
        assert (await to.complete(ACME)).json()["choices"][0]["text"] == "str"
        assert (await to.http.get("/v1/models", headers=dict(bearer(ACME)))).status_code == 200


async def test_status_traces_and_metrics_are_for_admins(tiny_model: Path, path: Path) -> None:
    async with door(tiny_model, path) as to:
        status, trace = pb.GetStatusRequest(), pb.GetTraceRequest()
        denied = ("PERMISSION_DENIED", "NO_ADMIN", None)
        assert await refusal(to.stub.GetStatus(status, metadata=bearer(ACME))) == denied
        assert await refusal(to.stub.GetTrace(trace, metadata=bearer(ACME))) == denied
        response = await to.http.get("/metrics", headers=dict(bearer(ACME)))
        assert (response.status_code, response.json()["error"]["code"]) == (403, "no_admin")
        assert len((await to.stub.GetStatus(status, metadata=bearer(ADMIN))).workers) == 2
        assert (await refusal(to.stub.GetTrace(trace, metadata=bearer(ADMIN))))[1] == "NO_TRACE_STORE"
        assert (await to.http.get("/metrics", headers=dict(bearer(ADMIN)))).status_code == 200


@pytest.mark.field("vllm-project/vllm#10583", "sgl-project/sglang#19035")
async def test_a_request_is_its_tenants_in_spans_and_at_workers(tiny_model: Path, path: Path) -> None:
    async with door(tiny_model, path) as to:
        gate = to.router.decode.pause_at[1] = asyncio.Event()
        first = asyncio.create_task(to.generate(ACME, request_id="id-7"))
        await eventually(lambda: bool(to.router.decode.works))
        assert (await refusal(to.generate(ACME, request_id="id-7")))[:2] == ("ALREADY_EXISTS", "REQUEST_ID_LIVE")
        second = asyncio.create_task(to.generate(OTHER, request_id="id-7"))  # another's id takes nothing from one
        await eventually(lambda: len(to.router.decode.works) == 2)
        gate.set()
        assert {(await answer).started.request_id for answer in (first, second)} == {"id-7"}
        assert sorted(work.request_id for work in to.router.decode.works) == ["acme/id-7", "other/id-7"]
        assert len({work.cache_salt for work in to.router.decode.works}) == 2
        roots = [span for span in await to.router.log.wait(15) if span.name == "pageferry.request"]
        found = sorted((span.attributes["pageferry.tenant"], span.attributes["pageferry.request_id"]) for span in roots)
        assert found == [("acme", "id-7"), ("acme", "id-7"), ("other", "id-7")]


async def test_limits_are_told_with_when_to_come_again(tiny_model: Path, path: Path) -> None:
    async with door(tiny_model, path, "max_requests = 1") as to:
        gate = to.router.decode.pause_at[1] = asyncio.Event()
        live = asyncio.create_task(to.generate(ACME))
        await eventually(lambda: bool(to.router.decode.works))
        assert await refusal(to.generate(ACME)) == ("RESOURCE_EXHAUSTED", "TENANT_MAX_REQUESTS", 1000)
        response = await to.complete(ACME, stream=True)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "tenant_max_requests")
        assert "max_requests of tenant acme is 1" in error["message"]
        other = asyncio.create_task(to.generate(OTHER))  # others are not held up
        await eventually(lambda: len(to.router.decode.works) == 2)
        gate.set()
        await live
        await other
        assert (await to.generate(ACME)).text == "str"


async def test_no_more_are_looked_at_than_may_be_live(
    tiny_model: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with door(tiny_model, path, "max_requests = 1") as to:
        asked, gate = asyncio.Event(), asyncio.Event()

        async def render(messages: object, variables: object) -> str:
            asked.set()
            await gate.wait()
            return "Hello"

        monkeypatch.setattr(to.router.tokenizer.template, "render_async", render)
        chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hello")])
        first = asyncio.create_task(to.generate(ACME, prompt=None, chat=chat))
        await asked.wait()
        assert (await refusal(to.generate(ACME)))[1] == "TENANT_MAX_REQUESTS"
        gate.set()
        assert (await first).text == "str"
        assert (await to.generate(ACME)).text == "str"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ("requests_per_minute = 1", "TENANT_REQUESTS_PER_MINUTE"),
        ("tokens_per_minute = 20", "TENANT_TOKENS_PER_MINUTE"),
    ],
)
async def test_rates(tiny_model: Path, path: Path, limits: str, reason: str) -> None:
    async with door(tiny_model, path, limits) as to:
        await to.generate(ACME, max_tokens=10)
        code, found, retry_after_ms = await refusal(to.generate(ACME))
        assert (code, found) == ("RESOURCE_EXHAUSTED", reason)
        assert retry_after_ms is not None and 1000 < retry_after_ms <= 60_000
        tokenise = to.stub.Tokenize(pb.TokenizeRequest(text="a"), metadata=bearer(ACME))
        if limits.startswith("requests"):
            assert (await refusal(tokenise))[1] == reason
        else:
            assert (await tokenise).ids


async def test_pages_that_a_tenant_may_come_to_hold(tiny_model: Path, path: Path) -> None:
    def prompt(num_tokens: int) -> dict[str, object]:
        return {"token_ids": pb.TokenIds(ids=[200] * num_tokens), "prompt": None}

    async with door(tiny_model, path, "max_pages = 10") as to:
        gate = to.router.decode.pause_at[1] = asyncio.Event()
        live = asyncio.create_task(to.generate(ACME, **prompt(62)))  # 62 and 2 that are stored: 4 pages
        await eventually(lambda: bool(to.router.decode.works))
        assert (await refusal(to.generate(ACME, **prompt(95))))[:2] == ("RESOURCE_EXHAUSTED", "TENANT_MAX_PAGES")
        gate.set()
        await live
        await to.generate(ACME, **prompt(95))
        code, reason, retry_after_ms = await refusal(to.generate(ACME, **prompt(159)))
        assert (code, reason, retry_after_ms) == ("INVALID_ARGUMENT", "EXCEEDS_TENANT_PAGES", None)
        unbounded = ask(**prompt(100))
        unbounded.stop.ClearField("max_tokens")
        call = to.stub.Generate(unbounded, metadata=bearer(ACME))
        async for event in call:
            if event.HasField("delta"):
                call.cancel()
                break
        assert to.router.decode.works[-1].stop.max_tokens == 61, "10 pages hold 160 of prompt and answer, but the last"


async def test_only_who_may_goes_before_others(tiny_model: Path, path: Path) -> None:
    async with door(tiny_model, path, "min_priority = -1") as to:
        await to.generate(ACME, priority=-1)
        await to.generate(OTHER, priority=5)
        for key, priority in ((ACME, -2), (OTHER, -1)):
            assert (await refusal(to.generate(key, priority=priority)))[:2] == ("PERMISSION_DENIED", "PRIORITY_DENIED")


async def test_a_stranger_s_body_is_not_read(tiny_model: Path, path: Path) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"{"
        raise AssertionError("it was read")

    async with door(tiny_model, path) as to:
        headers = {"content-type": "application/json"}
        assert (await to.http.post("/v1/completions", content=body(), headers=headers)).status_code == 401


async def test_no_key_is_in_a_log_a_span_or_an_error(
    tiny_model: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with door(tiny_model, path, "requests_per_minute = 1") as to:
        told = [(await to.complete("wrong-key-of-nobody")).text]
        for key in (ADMIN, ACME, OTHER, ACME):
            response = await to.complete(key)
            told += [response.text, str(response.headers)]
            told.append((await to.http.get("/metrics", headers=dict(bearer(key)))).text)
        told += [span.to_json() for span in await to.router.log.wait(22)]
    logged = [json.dumps(vars(record), default=str) for record in caplog.records]
    assert not [text for text in (*told, *logged) if "key-of" in text]
