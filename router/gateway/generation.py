"""The HTTP answer to one body: whole, or streamed as server-sent events.

Its status is decided at the first output: what fails before that has the status of its error, what fails after it is
an error event, and, once clients can have read that, the connection is closed without the end of the body.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from opentelemetry.context import Context
from opentelemetry.util.types import AttributeValue
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pageferry.core.errors import InternalError, PageferryError
from pageferry.router.gateway.errors import in_the_body_s_words
from pageferry.router.gateway.parsed import Parsed
from pageferry.router.gateway.reply import Reply
from pageferry.router.gateway.runs import Events, all_events
from pageferry.router.gateway.strict_json import Json, dump
from pageferry.runtime.logs import log
from pageferry.v1 import inference_pb2 as pb

ERROR_READ_S = 0.5  # browsers forget what a page has not read of a body when its connection breaks
Numbered = AsyncGenerator[tuple[int, pb.GenerateResponse], None]


class Generator(Protocol):
    """What the gateway needs of the router's frontend."""

    @property
    def clock(self) -> Callable[[], float]: ...

    @property
    def ready(self) -> bool: ...

    def generate(
        self,
        request: pb.GenerateRequest,
        *,
        deadline: float | None,
        parent: Context | None,
        authorization: Sequence[str],
        protocol: Mapping[str, AttributeValue],
    ) -> Events: ...

    def list_models(self, authorization: Sequence[str]) -> pb.ListModelsResponse: ...

    def check_caller(self, authorization: Sequence[str]) -> object: ...

    def check_admin(self, authorization: Sequence[str], what: str) -> None: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Sender:
    """Who sent a body, and how."""

    authorization: Sequence[str]
    parent: Context
    deadline: float | None  # by the frontend's clock
    names: Mapping[str, str]  # of the body's fields, as `Reading` has them
    protocol: Mapping[str, AttributeValue]  # how it came, for the request's span


class GenerationResponse(Response):
    """Runs a body's generations and sends the answer; the client's going away cancels them."""

    def __init__(
        self, frontend: Generator, parsed: Parsed, reply: Reply, sender: Sender, headers: Mapping[str, str]
    ) -> None:
        super().__init__()
        self._frontend = frontend
        self._parsed = parsed
        self._reply = reply
        self._sender = sender
        self._more_headers = headers

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
        begin = [partial(self._begin, number) for number in range(self._parsed.num_requests)]
        async with aclosing(all_events(begin)) as events:
            try:
                await (self._whole(events, send) if self._parsed.streaming is None else self._stream(events, send))
            except PageferryError as error:
                error.nothing_begun &= self._parsed.num_requests == 1  # what holds for one of several prompts
                raise in_the_body_s_words(error, self._sender.names) from None

    def _begin(self, number: int) -> Events:
        sender = self._sender
        return self._frontend.generate(
            self._parsed.request_of(number),
            deadline=sender.deadline,
            parent=sender.parent,
            authorization=sender.authorization,
            protocol=sender.protocol,
        )

    async def _whole(self, events: Numbered, send: Send) -> None:
        traceparent = ""
        async for prompt, event in events:
            traceparent = traceparent or event.started.traceparent
            self._reply.take(prompt, event)
        sampling = self._parsed.request.sampling
        if sampling.HasField("logprobs") or sampling.HasField("prompt_logprobs"):  # megabytes, perhaps
            body = await asyncio.to_thread(self._whole_body)
        else:
            body = self._whole_body()
        await self._send_start(send, "application/json", traceparent)
        await send({"type": "http.response.body", "body": body})

    def _whole_body(self) -> bytes:
        return dump(self._reply.whole())

    async def _stream(self, events: Numbered, send: Send) -> None:
        traceparent, has_begun = "", False
        try:
            async for prompt, event in events:
                traceparent = traceparent or event.started.traceparent
                chunks = self._reply.take(prompt, event)
                if not has_begun and not event.HasField("started"):
                    # Only with the first output is the status known to be good.
                    await self._send_start(send, "text/event-stream; charset=utf-8", traceparent)
                    has_begun = True
                await _send_chunks(send, chunks)
        except Exception as error:
            if not has_begun:
                raise
            if not isinstance(error, PageferryError):
                log("http_failed", level="error", error=error)
            known = error if isinstance(error, PageferryError) else InternalError("the answer failed")
            await _send_chunks(send, [self._reply.failed(known)])
            await events.aclose()
            await asyncio.sleep(ERROR_READ_S)
            return  # The body is left without its end: the server closes the connection, and no one takes it for whole.
        end = b"".join(map(_framed, self._reply.closing())) + self._reply.done
        await send({"type": "http.response.body", "body": end})

    async def _send_start(self, send: Send, content_type: str, traceparent: str) -> None:
        headers = {
            "content-type": content_type,
            "cache-control": "no-cache",
            "traceparent": traceparent,
            **self._more_headers,
        }
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": encoded})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_chunks(send: Send, chunks: list[Json]) -> None:
    if chunks:
        await send({"type": "http.response.body", "body": b"".join(map(_framed, chunks)), "more_body": True})


def _framed(chunk: Json) -> bytes:
    """A server-sent event; one that has a type, as those of /v1/responses, is named by it."""
    name = f"event: {chunk['type']}\n" if "type" in chunk else ""
    return name.encode() + b"data: " + dump(chunk) + b"\n\n"
