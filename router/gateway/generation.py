"""The HTTP answer to one generation: whole, or streamed as server-sent events.

Its status is decided at the first output: what fails before that has the status of its error, what fails after it is
an error event, and then the connection is closed without the end of the body.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from opentelemetry.context import Context
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pageferry.core.errors import InternalError, PageferryError
from pageferry.router.gateway import openai_reply as reply
from pageferry.router.gateway.openai_request import ParsedRequest
from pageferry.runtime.logs import log
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types

Events = AsyncGenerator[pb.GenerateResponse, None]


class Generator(Protocol):
    """What the gateway needs of the router's frontend."""

    @property
    def ready(self) -> bool: ...

    def generate(
        self,
        request: pb.GenerateRequest,
        *,
        deadline: float | None,
        parent: Context | None,
        authorization: Sequence[str],
    ) -> Events: ...

    def list_models(self, authorization: Sequence[str]) -> pb.ListModelsResponse: ...

    def check_caller(self, authorization: Sequence[str]) -> object: ...

    def check_admin(self, authorization: Sequence[str], what: str) -> None: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class GenerationResponse(Response):
    """Runs one generation and sends its answer; the client's going away cancels it."""

    def __init__(
        self, frontend: Generator, parsed: ParsedRequest, parent: Context, authorization: Sequence[str]
    ) -> None:
        super().__init__()
        self._parsed = parsed
        self._frontend = frontend
        self._parent = parent
        self._authorization = authorization

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self._answer(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answer.done():
                answer.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)
        if not answer.cancelled():
            answer.result()

    async def _answer(self, send: Send) -> None:
        request = self._parsed.generate
        events = self._frontend.generate(request, deadline=None, parent=self._parent, authorization=self._authorization)
        async with aclosing(events):
            started = (await _next(events)).started
            builder = reply.Reply(started, int(time.time()), self._parsed.chat, self._frontend.token_bytes)
            await (self._stream if self._parsed.stream else self._whole)(builder, events, send)

    async def _whole(self, builder: reply.Reply, events: Events, send: Send) -> None:
        texts: list[str] = []
        tokens: list[types.GeneratedToken] = []
        event = await _next(events)
        while not event.HasField("finished"):
            texts.append(event.delta.text)
            tokens.extend(event.delta.tokens)
            event = await _next(events)
        body = dump(builder.whole("".join(texts), tokens, event.finished))
        await _send_start(send, "application/json", builder.started)
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, builder: reply.Reply, events: Events, send: Send) -> None:
        event = await _next(events)  # only with the first output is the status known to be good
        await _send_start(send, "text/event-stream; charset=utf-8", builder.started)
        await _send_event(send, builder.opening())
        try:
            while not event.HasField("finished"):
                await _send_event(send, builder.delta(event.delta))
                event = await _next(events)
        except Exception as error:
            # The body is left without its end: the server then closes the connection, and no one takes it for whole.
            if not isinstance(error, PageferryError):
                log("http_failed", level="error", error=error)
            known = error if isinstance(error, PageferryError) else InternalError("the answer failed")
            await _send_event(send, reply.error_body(known))
            return
        await _send_event(send, builder.closing(event.finished))
        if self._parsed.include_usage:
            await _send_event(send, builder.usage_chunk(event.finished))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next(events: Events) -> pb.GenerateResponse:
    event = await anext(events, None)
    if event is None:
        raise InternalError("the generation ended without a finish", reason="NO_FINISH")
    return event


async def _send_start(send: Send, content_type: str, started: pb.Started) -> None:
    headers = {
        "content-type": content_type,
        "cache-control": "no-cache",
        "x-request-id": started.request_id,
        "traceparent": started.traceparent,
    }
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": encoded})


async def _send_event(send: Send, event: reply.Json | None) -> None:
    if event is not None:
        await send({"type": "http.response.body", "body": b"data: " + dump(event) + b"\n\n", "more_body": True})


def dump(value: reply.Json) -> bytes:
    """Compact JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
