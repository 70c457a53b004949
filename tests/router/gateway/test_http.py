import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator
from typing import Any

import fake_frontend as fake
import httpx
import pytest
from fake_frontend import FakeFrontend
from gateway import client_of, serving
from opentelemetry import trace
from prometheus_client import CollectorRegistry, Counter

from pageferry.core.errors import (
    NOTHING_BEGUN,
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
    invalid,
)
from pageferry.router.gateway import generation
from pageferry.router.gateway.bodies import Bodies
from pageferry.router.gateway.http import build_app
from pageferry.router.gateway.serving import serve_http
from pageferry.router.gateway.strict_json import dump
from pageferry.v1 import types_pb2 as types

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def events_of(body: str) -> list[str]:
    return [block.removeprefix("data: ") for block in body.split("\n\n") if block]


async def test_whole_completion() -> None:
    frontend = FakeFrontend()
    async with client_of(frontend) as client:
        response = await client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "r-1"})
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "r-1"
    body = response.json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["total_tokens"] == 7
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert frontend.requests[0].request_id == "r-1"
    assert frontend.requests[0].stop.max_tokens == 16
    assert frontend.num_closed == 1


async def test_whole_chat() -> None:
    async with client_of(FakeFrontend()) as client:
        body = (await client.post("/v1/chat/completions", json=CHAT)).json()
    assert body["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": "Hello", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]


@pytest.mark.field("waybarrios/vllm-mlx#101", "mozilla-ai/any-llm#847")
async def test_streamed_chat_ends_with_finish_usage_and_done_once() -> None:
    async with client_of(FakeFrontend()) as client:
        request = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        response = await client.post("/v1/chat/completions", json=request)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = events_of(response.text)
    assert done == "[DONE]" and response.text.count("[DONE]") == 1
    *chunks, usage = [json.loads(event) for event in events]
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 2


async def test_streamed_completion() -> None:
    async with client_of(FakeFrontend((*fake.HELLO[:-1], fake.finished(types.FINISH_REASON_LENGTH)))) as client:
        response = await client.post("/v1/completions", json={"prompt": [1, 2], "stream": True})
    chunks = [json.loads(event) for event in events_of(response.text)[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in chunks)


async def test_log_probabilities_are_written_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noting_dump(value: dict[str, Any]) -> bytes:
        threads.append(threading.get_ident())
        return dump(value)

    monkeypatch.setattr(generation, "dump", noting_dump)
    async with client_of(FakeFrontend()) as client:
        for more in ({}, {"logprobs": 0}):
            assert (await client.post("/v1/completions", json={"prompt": "a", **more})).status_code == 200
    assert [thread == threading.get_ident() for thread in threads] == [True, False]


@pytest.mark.field("sgl-project/sglang#4097")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_logprob_of_minus_infinity_is_null(stream: bool) -> None:
    scripted = fake.token(0, 10, -0.5, [(10, -0.5), (12, -math.inf)])
    frontend = FakeFrontend((fake.started(), fake.delta("", scripted), fake.delta("x"), fake.finished()))
    async with client_of(frontend) as client:
        response = await client.post("/v1/completions", json={"prompt": "a", "logprobs": 5, "stream": stream})
        chat = await client.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": 2})
    assert response.status_code == 200
    body = json.loads(events_of(response.text)[0]) if stream else response.json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["<10>"] and logprobs["top_logprobs"] == [{"<10>": -0.5, "<12>": None}]
    content = chat.json()["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"][1] == {"token": "<12>", "logprob": None, "bytes": list(b"<12>")}
    assert [request.sampling.logprobs for request in frontend.requests] == [5, 2]


async def test_a_token_that_is_no_whole_character_is_told_by_its_bytes() -> None:
    tokens = (fake.token(0, 128, -1.0, [(128, -1.0), (129, -2.0)]), fake.token(1, 10, -1.0))
    async with client_of(FakeFrontend((fake.started(), fake.delta("x", *tokens), fake.finished()))) as client:
        completion = (await client.post("/v1/completions", json={"prompt": "a", "logprobs": 2})).json()
        chat = (await client.post("/v1/chat/completions", json=CHAT | {"logprobs": True})).json()
    logprobs = completion["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xe2\\x80", "<10>"]
    assert list(logprobs["top_logprobs"][0]) == ["bytes:\\xe2\\x80", "bytes:\\xe2\\x81"]
    assert chat["choices"][0]["logprobs"]["content"][0]["bytes"] == [0xE2, 0x80]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (invalid("temperature", -1.0, "must be 0 or finite and positive"), 400, "invalid_field"),
        (AlreadyExistsError("request_id 'id-7' is live", reason="REQUEST_ID_LIVE"), 409, "request_id_live"),
        (FailedPreconditionError("the model has no chat template", reason="NO_CHAT_TEMPLATE"), 400, "no_chat_template"),
        (ResourceExhaustedError("queue is full", retry_after_ms=1500, reason="QUEUE_FULL"), 429, "queue_full"),
        (ResourceExhaustedError("prompt has 9 bytes, at most 8", reason="TOO_LARGE"), 413, "too_large"),
        (UnavailableError("no decode worker is ready", retry_after_ms=200), 503, "unavailable"),
        (DeadlineExceededError("too late"), 504, "deadline_exceeded"),
    ],
)
@pytest.mark.parametrize("accepted", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_output_is_the_status(
    error: Exception, status: int, code: str, accepted: bool, stream: bool
) -> None:
    script = (fake.started(), error) if accepted else (error,)
    async with client_of(FakeFrontend(script)) as client:
        response = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert response.status_code == status
    body = response.json()["error"]
    assert (body["message"], body["code"]) == (str(error), code)
    assert body["param"] == ("temperature" if code == "invalid_field" else None)
    assert response.headers.get("retry-after") == {429: "2", 503: "1"}.get(status)
    assert NOTHING_BEGUN not in response.headers


@pytest.mark.parametrize(("prompt", "is_told"), [("a", True), (["a", "b"], False)])
async def test_what_is_refused_before_it_begins_is_told_as_that(prompt: str | list[str], is_told: bool) -> None:
    """Not of one of several prompts, since others may have begun."""
    refusal = UnavailableError("the router is draining", reason="DRAINING", nothing_begun=True)
    async with client_of(FakeFrontend((refusal,))) as client:
        response = await client.post("/v1/completions", json={"prompt": prompt})
    assert (response.status_code, NOTHING_BEGUN in response.headers) == (503, is_told)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("stop_strings[1]", "stop[1]"),
        ("stop.max_tokens", "max_tokens"),
        ("chat.messages[0].role", "messages[0].role"),
        ("chat", "messages"),
        ("token_ids", "prompt"),
        ("top_p", "top_p"),
    ],
)
async def test_an_error_names_the_field_as_the_body_does(field: str, param: str) -> None:
    async with client_of(FakeFrontend((invalid(field, 9, "must be less"),))) as client:
        error = (await client.post("/v1/chat/completions", json=CHAT)).json()["error"]
    assert (error["param"], error["message"]) == (param, f"{param} is 9, must be less")


LOGPROBS = "message.output_text.logprobs"


@pytest.mark.parametrize(
    ("path", "fields", "field", "param"),
    [
        ("chat/completions", {"max_completion_tokens": 9}, "stop.max_tokens", "max_completion_tokens"),
        ("chat/completions", {"max_completion_tokens": 9}, "max_tokens", "max_completion_tokens"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "logprobs", "top_logprobs"),
        ("chat/completions", {"logprobs": True}, "logprobs", "logprobs"),
        ("chat/completions", {"guided_regex": "("}, "grammar.regex", "guided_regex"),
        ("chat/completions", {"structured_outputs": {"json": "1"}}, "grammar.json_schema", "structured_outputs.json"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "grammar", "response_format"),
        ("responses", {"text": {"format": {"type": "json_object"}}}, "grammar.json_object", "text.format"),
        ("responses", {}, "stop.max_tokens", "max_output_tokens"),
        ("responses", {}, "max_tokens", "max_output_tokens"),
        ("responses", {"include": [LOGPROBS], "top_logprobs": 21}, "logprobs", "top_logprobs"),
        ("responses", {}, "chat", "input"),
    ],
)
async def test_an_error_names_the_field_that_the_body_had(path: str, fields: Any, field: str, param: str) -> None:
    body = (CHAT if path.startswith("chat") else {"input": "a"}) | fields
    async with client_of(FakeFrontend((invalid(field, 9, "must be less"),))) as client:
        error = (await client.post(f"/v1/{path}", json=body)).json()["error"]
    assert (error["param"], error["message"]) == (param, f"{param} is 9, must be less")


@pytest.mark.field("waybarrios/vllm-mlx#101", "mozilla-ai/any-llm#847")
async def test_an_error_in_mid_stream_is_an_event_and_closes_the_connection() -> None:
    frontend = FakeFrontend((*fake.HELLO[:2], UnavailableError("the decode worker is gone")))
    body = ""
    async with serving(frontend) as url, httpx.AsyncClient(base_url=url) as client:
        request = client.build_request("POST", "/v1/chat/completions", json=CHAT | {"stream": True})
        response = await client.send(request, stream=True)
        with pytest.raises(httpx.RemoteProtocolError):
            async for text in response.aiter_text():
                body += text
        await response.aclose()
    events = events_of(body)
    assert json.loads(events[-1])["error"]["message"] == "the decode worker is gone"
    assert "[DONE]" not in body
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in map(json.loads, events[:-1]))


async def test_an_error_event_can_be_read_before_the_connection_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser's page gets nothing of a body that has broken off, not even what came before."""
    monkeypatch.setattr(generation, "ERROR_READ_S", 3600.0)
    frontend = FakeFrontend((*fake.HELLO[:2], UnavailableError("the decode worker is gone")))
    async with (
        serving(frontend) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response,
    ):
        texts, body = response.aiter_text(), ""
        while "the decode worker is gone" not in body:
            body += await anext(texts)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await anext(texts)


async def test_a_fault_of_our_own_ends_the_generation_before_its_error_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "ERROR_READ_S", 3600.0)
    no_reason: Any = 99
    frontend = FakeFrontend((*fake.HELLO[:2], fake.finished(no_reason)))  # that no answer can tell
    async with (
        serving(frontend) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
        client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}),
        asyncio.timeout(60),
    ):
        await frontend.closed.wait()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.field("waybarrios/vllm-mlx#101", "mozilla-ai/any-llm#847")
async def test_a_stream_without_a_finish_is_an_error(stream: bool) -> None:
    async with serving(FakeFrontend(fake.HELLO[:2])) as url, httpx.AsyncClient(base_url=url) as client:
        request = client.build_request("POST", "/v1/completions", json={"prompt": "a", "stream": stream})
        response = await client.send(request, stream=True)
        first = await anext(response.aiter_text())
        await response.aclose()
    assert response.status_code == (200 if stream else 500)
    assert "[DONE]" not in first and '"stop"' not in first


@pytest.mark.parametrize("played", [0, 1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_going_away_cancels_the_generation(played: int, stream: bool) -> None:
    frontend = FakeFrontend((*fake.HELLO[:played], asyncio.Event()))
    async with serving(frontend) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        body = json.dumps(CHAT | {"stream": stream}).encode()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
        await frontend.called.wait()
        assert not frontend.closed.is_set()
        writer.close()
        await asyncio.wait_for(frontend.closed.wait(), 60)
        assert reader is not None


async def test_trace_context_goes_in_and_comes_out() -> None:
    frontend = FakeFrontend()
    traceparent = f"00-{fake.TRACE_ID}-b7ad6b7169203331-01"
    async with client_of(frontend) as client:
        response = await client.post("/v1/chat/completions", json=CHAT, headers={"Traceparent": traceparent})
        await client.post("/v1/chat/completions", json=CHAT)
    parent = trace.get_current_span(frontend.parents[0]).get_span_context()
    assert format(parent.trace_id, "032x") == fake.TRACE_ID and parent.is_remote
    assert not trace.get_current_span(frontend.parents[1]).get_span_context().is_valid
    assert response.headers["traceparent"] == fake.TRACEPARENT


async def test_models_health_and_metrics() -> None:
    frontend = FakeFrontend()
    registry = CollectorRegistry()
    Counter("pageferry_things", "Things.", registry=registry).inc()
    async with client_of(frontend, registry) as client:
        models = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["tiny"]
        assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == 256
        missing = await client.get("/v1/models/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.get("/health")).status_code == 200
        frontend.ready = False
        assert (await client.get("/health")).status_code == 503
        assert "pageferry_things_total 1.0" in (await client.get("/metrics")).text
        for version in ("1.0.0", "words", "1.0.x", "9" * 5000):
            answer = await client.get(
                "/metrics", headers={"accept": f"application/openmetrics-text; version={version}"}
            )
            assert (answer.status_code, "pageferry_things_total 1.0" in answer.text) == (200, True)


@pytest.mark.field("llm-d/llm-d-router#895")
async def test_what_is_not_there_is_told_in_the_same_form() -> None:
    async with client_of(FakeFrontend()) as client:
        assert (await client.get("/v2")).json()["error"]["code"] == "not_found"
        assert (await client.get("/v1/completions")).status_code == 405
        typed = await client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
        assert (typed.status_code, typed.json()["error"]["message"]) == (415, "content-type must be application/json")
        packed = {"content-type": "application/json", "content-encoding": "gzip"}
        assert (await client.post("/v1/completions", content=b"{}", headers=packed)).status_code == 415
        long_id = await client.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "x" * 129})
        assert long_id.json()["error"]["param"] == "x-request-id"


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_refused_before_parsing(chunked: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"[" * 30

    frontend = FakeFrontend()
    async with client_of(frontend, bodies=Bodies(100)) as client:
        content = parts() if chunked else b"[" * 150
        headers = {"content-type": "application/json"}
        response = await client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 413
    assert "100 bytes" in response.json()["error"]["message"]
    assert not frontend.requests


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[tuple[str, object]]:
    return [
        (record.message, record.pageferry_fields["error"]) for record in caplog.records if record.name == "pageferry"
    ]


async def test_a_bug_in_a_stream_is_an_event_without_its_text_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    frontend = FakeFrontend((*fake.HELLO[:2], RuntimeError("secret prompt")))
    body = ""
    async with serving(frontend) as url, httpx.AsyncClient(base_url=url) as client:
        request = client.build_request("POST", "/v1/completions", json={"prompt": "a", "stream": True})
        response = await client.send(request, stream=True)
        with pytest.raises(httpx.RemoteProtocolError):
            async for text in response.aiter_text():
                body += text
        await response.aclose()
    assert "secret" not in body and "[DONE]" not in body
    assert json.loads(events_of(body)[-1])["error"]["type"] == "server_error"
    assert logged_errors(caplog) == [("http_failed", "RuntimeError")]


async def test_a_bug_is_a_500_without_its_text_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(FakeFrontend((RuntimeError("secret prompt"),)), raise_bugs=False) as client:
        response = await client.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == 500 and "secret" not in response.text
    assert response.json()["error"]["type"] == "server_error"
    assert logged_errors(caplog) == [("http_failed", "RuntimeError")]


async def test_a_port_in_use_is_named() -> None:
    async with serving(FakeFrontend()) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(UnavailableError, match=f"http_port {port} on 127.0.0.1 can't be opened"):
            await serve_http(build_app(FakeFrontend(), CollectorRegistry()), "127.0.0.1", port, asyncio.Event())
