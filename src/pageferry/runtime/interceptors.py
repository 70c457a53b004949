"""Tracing and errors of the calls that a process serves, and the draining of a server.

Written here since the published instrumentation breaks asyncio handlers that use `context.read` and `context.write`,
loses spans of streams that are not read to their end, and marks cancelled calls as OK.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from opentelemetry import context as current_context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer

from pageferry.core.errors import InternalError, InvalidArgumentError, PageferryError, UnavailableError
from pageferry.runtime.access import Access
from pageferry.runtime.errors import abort
from pageferry.runtime.logs import log
from pageferry.runtime.rpc_spans import PUSH_METHOD, end_span, extract_context, rpc_attributes, server_span_name

_STREAM_OF_WORK = "inference.GRPCInferenceService/ModelStreamInfer"  # may be open when no request of it is
# Calls that bring work. A draining server refuses them, and takes all others, which serve work that lives on.
_WORK_METHODS = {
    _STREAM_OF_WORK,
    "inference.GRPCInferenceService/ModelInfer",
    "pageferry.v1.InferenceService/Generate",
    "pageferry.v1.PrefillService/Prefill",
    "pageferry.v1.DecodeService/Decode",
}
_OPEN_METHODS = (_WORK_METHODS | {PUSH_METHOD}) - {_STREAM_OF_WORK}  # those that a drain waits for
_ENDS_BY_ITSELF = "pageferry.v1.AdminService/Drain"  # when nothing is open, and then has to say so
_END_S = 2.0  # for calls that are ended to take their status; who reads nothing doesn't get it
_CODES = {code.value[0]: code for code in grpc.StatusCode}
Behaviour = Callable[[Any, Any], Any]


class ServerInterceptor(grpc.aio.ServerInterceptor):
    """Traces calls, turns errors into statuses with details, and knows which calls are at work.

    A handler is a coroutine or an async generator, and its span (or, where it makes its own, its caller's context) is
    current inside it. When its call is cancelled, its `finally` blocks run before the span ends.
    """

    def __init__(self, tracer: Tracer, access: Access | None = None) -> None:
        self._access = access
        self.refusal: Callable[[], PageferryError] | None = None  # what calls that bring work are told, and no more
        self._tracer = tracer
        self._open: set[asyncio.Task[Any]] = set()
        self._others: set[asyncio.Task[Any]] = set()  # that last until their caller leaves, or the server ends
        self._overdue: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_refused = 0.0  # the loop's time

    @property
    def num_open(self) -> int:
        """Calls that brought work, and transfers of pages, that are not over."""
        return len(self._open)

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        streaming = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if streams else "unary" for streams in streaming)
        behaviour = _as_coroutine(getattr(handler, kind))
        method = handler_call_details.method.lstrip("/")
        context = extract_context(handler_call_details.invocation_metadata)

        async def run(request: Any, servicer_context: Any) -> Any:
            with self._counted(method), self._traced(method, context, servicer_context):
                return await self._answer(method, behaviour, request, servicer_context)

        make_handler = getattr(grpc, f"{kind}_rpc_method_handler")
        deserialize = _refusing_malformed(handler.request_deserializer, streaming=handler.request_streaming)
        return make_handler(run, deserialize, handler.response_serializer)

    async def wait_idle(self, grace_s: float) -> int:
        """Wait until no call is open; what is after `grace_s` ends with UNAVAILABLE. Returns how many did."""
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
            return 0
        except TimeoutError:
            overdue = set(self._open)
        self._end(overdue)
        with suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                await self._idle.wait()
        return len(overdue)

    async def wait_quiet(self, quiet_s: float, longest_s: float) -> None:
        """Wait until nothing was refused for so long: whoever sent it has heard, and asks elsewhere."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (now := loop.time()) < began + longest_s:
            quiet_until = max(began, self._last_refused) + quiet_s
            if now >= quiet_until:
                return
            await asyncio.sleep(quiet_until - now)

    def end_all(self) -> None:
        """Let all calls end with UNAVAILABLE that do not end by themselves now."""
        self._end(self._open | self._others)

    def _end(self, tasks: set[asyncio.Task[Any]]) -> None:
        self._overdue |= tasks
        for task in tasks:
            task.cancel()

    async def _answer(self, method: str, behaviour: Behaviour, request: Any, servicer_context: Any) -> Any:
        """Run the handler; its errors end the call with their status."""
        error: PageferryError
        try:
            if self._access is not None:
                self._access.check(method, servicer_context)
            if self.refusal is not None and method in _WORK_METHODS:
                self._last_refused = asyncio.get_running_loop().time()
                raise self.refusal()
            if isinstance(request, PageferryError):
                raise request
            return await behaviour(request, servicer_context)
        except PageferryError as raised:
            error = raised
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task in self._overdue:
                task.uncancel()
                error = UnavailableError("the server drained before the call was over", reason="DRAINING")
            elif task is not None and task.cancelling():
                raise
            else:  # of something that the handler waited for: the call itself goes on, and must get an end
                log("handler_failed", level="error", error=cancelled, method=method)
                error = InternalError("internal error: CancelledError")
        except grpc.aio.InternalError:  # what it read or wrote did not go through, as a rule since the call is over
            error = InternalError("internal error: the stream broke")
        except grpc.aio.BaseError:  # the handler has ended the call itself
            raise
        except Exception as raised:
            # Its text may hold anything, so that it goes to the log only.
            log("handler_failed", level="error", error=raised, method=method)
            error = InternalError(f"internal error: {type(raised).__name__}")
        try:
            return await abort(servicer_context, error)
        except grpc.aio.InternalError:
            raise asyncio.CancelledError from None  # the caller has left, and this task is about to be told

    @contextmanager
    def _counted(self, method: str) -> Iterator[None]:
        task = asyncio.current_task()
        if task is None or method == _ENDS_BY_ITSELF:
            yield
            return
        tasks = self._open if method in _OPEN_METHODS else self._others
        tasks.add(task)
        if tasks is self._open:
            self._idle.clear()
        try:
            yield
        finally:
            tasks.discard(task)
            self._overdue.discard(task)
            if not self._open:
                self._idle.set()

    @contextmanager
    def _traced(self, method: str, context: Context, servicer_context: Any) -> Iterator[None]:
        name = server_span_name(method)
        span: Span = trace.INVALID_SPAN
        if name is not None:
            span = self._tracer.start_span(name, context, SpanKind.SERVER, rpc_attributes(method))
            context = trace.set_span_in_context(span, context)
        token = current_context.attach(context)
        cancelled = False
        try:
            yield
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            current_context.detach(token)
            code = grpc.StatusCode.CANCELLED if cancelled else _CODES[_number(servicer_context.code())]
            end_span(span, code, "" if cancelled else servicer_context.details())


def _refusing_malformed(deserialize: Callable[[bytes], Any], *, streaming: bool) -> Callable[[bytes], Any]:
    """What is no message of its type is an InvalidArgumentError: raised to a handler that reads, else in its place.

    The library would end a call whose only message can't be read by itself, with UNKNOWN and without details.
    """

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            error = InvalidArgumentError(
                "the message is malformed: no protobuf of its type", reason="MALFORMED_MESSAGE"
            )
        if streaming:
            raise error
        return error

    return read


def _as_coroutine(behaviour: Behaviour) -> Behaviour:
    """An async generator's messages are written as they come, and it is closed when the call is cancelled."""
    if not inspect.isasyncgenfunction(behaviour):
        return behaviour

    async def write_all(request: Any, servicer_context: Any) -> None:
        async with aclosing(behaviour(request, servicer_context)) as messages:
            async for message in messages:
                await servicer_context.write(message)

    return write_all


def _number(code: Any) -> int:
    """Of a status as the library keeps it: 0 where none was set, an enumeration's member, or its number."""
    return int(code.value[0]) if isinstance(code, grpc.StatusCode) else int(code or 0)
