"""HTTP: bodies and headers of requests; whatever comes, the answer is a status below 500 and a body of JSON."""

import asyncio
from typing import Any

import httpx
from fake_frontend import FakeFrontend
from fuzzing import JSON_VALUES, altered, as_json, held_to_contract, mutated
from gateway import client_of
from hypothesis import given, strategies as st

from pageferry.router.gateway.chat_request import parse_chat
from pageferry.router.gateway.completion_request import parse_completion
from pageferry.router.gateway.fields import Reading
from pageferry.router.gateway.responses_request import parse_responses

COMPLETION = {
    "model": "tiny",
    "prompt": "Hello",
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1,
    "stop": ["a", "b"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "logprobs": 3,
    "stop_token_ids": [1, 2],
    "priority": -1,
}
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": "Hello"}]
COMMON = {
    "logit_bias": {"5": -1.5},
    "bad_words": ["c"],
    "guided_json": {"type": "object"},
    "response_format": {"type": "json_object"},
    "best_of": 2,
    "use_beam_search": True,
    "early_stopping": "never",
    "profile": "quality",
}
CHAT = COMPLETION | {
    "messages": MESSAGES,
    "logprobs": True,
    "top_logprobs": 2,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "tool_choice": "auto",
    "chat_template_kwargs": {"enable_thinking": False},
}
del CHAT["prompt"]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ],
    "instructions": "Be brief.",
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    "tools": [{"type": "function", "name": "f", "parameters": {}}],
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "max_output_tokens": 3,
    "metadata": {"a": "b"},
    "stream": True,
}
EXTRA: dict[str, list[Any]] = {
    "prompt": [[1, 2], [[1]], ["a"], ["a", "b"]],
    "n": [1, 2],
    "tools": [[], [{}], [{"type": "function"}]],
    "user": [None, "me"],
    "messages": [[{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c", "content": "1"}]],
    "xyz": [1],
    **{name: [value] for name, value in COMMON.items()},
}
ODD = [
    b"",
    b"{",
    b"[" * 100_000,
    b"{" * 100_000,
    b"1" * 5000,
    b'{"a":1,"a":2}',
    b'{"prompt":"\\ud800"}',
    b"\xff",
    b"null",
]
BODIES = (
    st.sampled_from(ODD)
    | altered(COMPLETION, EXTRA).map(as_json)
    | altered(CHAT, EXTRA).map(as_json)
    | altered(RESPONSES, EXTRA).map(as_json)
    | JSON_VALUES.map(as_json)
    | mutated(st.sampled_from([as_json(COMPLETION), as_json(CHAT), as_json(RESPONSES)]))
)


@given(BODIES)
def test_a_body(body: bytes) -> None:
    for parse in (parse_completion, parse_chat, parse_responses):
        for refuse_unknown in (True, False):
            with held_to_contract():
                parse(body, Reading(refuse_unknown))


NAMES = ["content-type", "x-request-id", "traceparent", "tracestate", "authorization", "baggage"]
NAMES += ["x-pageferry-profile", "x-envoy-expected-rq-timeout-ms", "origin"]
VALUES = st.sampled_from(
    ["application/json", "-1", "9" * 30, "1e3", "²", "Bearer x", "00-" + "0" * 32 + "-0-1", "a" * 9000]
)
LATIN = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\0"), max_size=20)
HEADERS = st.lists(st.tuples(st.sampled_from([name.encode() for name in NAMES]), VALUES | LATIN), max_size=3)
PATHS = st.sampled_from(
    ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/v1/models/%00%ff", "/health", "/x"]
)


@given(PATHS, st.sampled_from(["POST", "GET", "PUT", "HEAD", "X"]), HEADERS, BODIES)
def test_a_request(path: str, method: str, headers: list[tuple[bytes, str]], body: bytes) -> None:
    sent = [(name, value.encode("utf-8" if "²" in value else "latin-1")) for name, value in headers]
    if b"content-type" not in dict(sent):
        sent.append((b"content-type", b"application/json"))

    async def ask() -> httpx.Response:
        async with client_of(FakeFrontend()) as client:
            return await client.request(method, path, headers=sent, content=body)

    with held_to_contract():
        assert asyncio.run(ask()).status_code < 500
