"""The endpoint picker of the Gateway API Inference Extension: Envoy's ext_proc protocol, served on the router's port.

A gateway opens a stream for each HTTP request. A generation's body is read whole, the router's policy picks, and the
gateway sends the request to the endpoint that it is told. Then the answer's headers are awaited, no more.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from opentelemetry import context as otel_context
from opentelemetry.context import Context
from opentelemetry.trace import get_current_span

from pageferry.core.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    PageferryError,
    ResourceExhaustedError,
)
from pageferry.ext_proc import external_processor_pb2 as envoy
from pageferry.ext_proc.external_processor_pb2_grpc import ExternalProcessorServicer
from pageferry.router.gateway.bodies import Bodies, Body
from pageferry.router.gateway.envelope import authorization_of, deadline_of
from pageferry.router.picker_reply import passed, refused, sent_by_body, sent_by_headers, sent_in_duplex
from pageferry.router.picker_request import Head, Reader, served_of
from pageferry.router.picks import Picks, Place, Question
from pageferry.router.tenant import Caller
from pageferry.runtime.rpc_spans import extract_context

PICKER_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_MODE = envoy.ProcessingMode
_WHOLE = (_MODE.BUFFERED, _MODE.BUFFERED_PARTIAL)
Messages = AsyncIterator[envoy.ProcessingRequest]


class PickerServicer(ExternalProcessorServicer):
    """What is wrong with a request is an answer to its client; what is wrong with the gateway ends the stream."""

    def __init__(self, picks: Picks, bodies: Bodies, *, refuse_unknown: bool = True) -> None:
        """Once the router drains, streams end as soon as their request was sent on."""
        self._picks = picks
        self._bodies = bodies
        self._refuse_unknown = refuse_unknown

    async def Process(self, requests: Any, context: Any) -> AsyncIterator[envoy.ProcessingResponse]:
        messages: Messages = aiter(requests)
        first = await anext(messages, None)
        if first is None or first.observability_mode:
            return
        if not first.HasField("request_headers"):
            raise FailedPreconditionError("the stream must begin with a request's headers", reason="NO_HEADERS")
        head = Head.of(first)
        reader = head.reader(refuse_unknown=self._refuse_unknown)
        place: Place | None
        replies: Iterable[envoy.ProcessingResponse]
        try:
            if reader is None:
                place = self._picks.any(head.only)
                replies = [sent_by_headers(place, head)]
            else:
                caller = self._picks.caller_of(authorization_of(head))  # no stranger's body is read
                if head.request_body_mode in _WHOLE:
                    yield passed(first, head)  # they wait at the gateway until the body is answered
                place, replies = await self._choose(head, reader, caller, messages)
        except PageferryError as error:
            yield refused(error, head)
            return
        for reply in replies:
            yield reply
        while (message := await self._next(messages)) is not None:
            is_answer = message.HasField("response_headers")
            if is_answer and place is not None:
                self._answered(message, place)
            yield passed(message, head)
            if is_answer and head.response_body_mode == _MODE.NONE:
                return

    async def _choose(
        self, head: Head, reader: Reader, caller: Caller, messages: Messages
    ) -> tuple[Place | None, Iterable[envoy.ProcessingResponse]]:
        """Where a generation goes, and what tells the gateway so; neither where the client has gone."""
        if head.request_body_mode not in (*_WHOLE, _MODE.FULL_DUPLEX_STREAMED):
            names = {number: name for name, number in _MODE.BodySendMode.items()}  # a later Envoy may have more
            mode = names.get(head.request_body_mode, str(head.request_body_mode))
            message = f"the gateway's request_body_mode is {mode}, must be BUFFERED or FULL_DUPLEX_STREAMED"
            raise InternalError(message, reason="BODY_MODE")
        try:
            async with self._bodies.receive() as body:
                has_trailers = await self._read(head, messages, body)
                if has_trailers is None:
                    return None, []
                data = body.whole()
                place = await self._picks.pick(self._question(head, reader, caller, data))
        except TimeoutError as error:
            raise DeadlineExceededError(str(error), reason="BODY_TIMEOUT") from None
        if head.request_body_mode in _WHOLE:
            return place, [sent_by_body(place, head)]
        return place, sent_in_duplex(place, head, data, has_trailers=has_trailers)

    async def _read(self, head: Head, messages: Messages, body: Body) -> bool | None:
        """All of it; then whether trailers came. None where the stream ends before it does."""
        num_bytes, most = 0, self._bodies.max_body_bytes
        async for message in messages:
            if message.HasField("request_trailers"):
                return True
            part = message.request_body.body
            num_bytes += len(part)
            is_last = message.request_body.end_of_stream
            is_cut = head.request_body_mode == _MODE.BUFFERED_PARTIAL and not is_last
            if num_bytes > most or is_cut:
                limit = "the gateway's buffer" if is_cut else f"the limit of {most} bytes"
                raise ResourceExhaustedError(f"the body is larger than {limit}", reason="BODY_TOO_LARGE")
            body.add(part)
            if is_last or head.request_body_mode in _WHOLE:
                return False
        return None

    def _question(self, head: Head, reader: Reader, caller: Caller, body: bytes) -> Question:
        request, names = reader(body)
        return Question(
            request,
            names,
            caller,
            deadline_of(head, self._picks.serving.clock()),
            head.only,
            _parent(head),
        )

    def _answered(self, message: envoy.ProcessingRequest, place: Place) -> None:
        place.arrived()
        if place.is_generation and (endpoint := served_of(message)):
            self._picks.metrics.count_served(endpoint, place.endpoints)

    async def _next(self, messages: Messages) -> envoy.ProcessingRequest | None:
        """None once the stream ends, or the router drains: without the picker the gateway goes on."""
        read = asyncio.ensure_future(anext(messages, None))
        drain = asyncio.create_task(self._picks.live.drains.wait())
        try:
            await asyncio.wait({read, drain}, return_when=asyncio.FIRST_COMPLETED)
            return read.result() if read.done() else None
        finally:
            read.cancel()
            drain.cancel()


def _parent(head: Head) -> Context:
    """The gateway's own span, where it traces; else the client's."""
    current = otel_context.get_current()
    if get_current_span(current).get_span_context().is_valid:
        return current
    return extract_context(head.headers.items())
