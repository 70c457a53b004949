"""Tracing and errors of every call, at both ends.

Written here since the published instrumentation breaks asyncio handlers that use `context.read` and `context.write`,
loses spans of streams that are not read to their end, and marks cancelled calls as OK.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pageferry.core.errors import InternalError, PageferryError, UnavailableError
from pageferry.runtime.errors import abort
from pageferry.runtime.logs import log

PUSH_METHOD = "pageferry.v1.PageService/Push"
_SPAN_NAMES = {PUSH_METHOD: "kv.push"}
_INFERENCE = "pageferry.v1.InferenceService/"
_UNTRACED = {
    "pageferry.v1.WorkerService/Watch",
    "opentelemetry.proto.collector.trace.v1.TraceService/Export",
    *(_INFERENCE + name for name in ("Tokenize", "ListModels", "GetStatus", "GetTrace")),
}
_UNTRACED_SERVICES = ("grpc.health.", "grpc.reflection.")
# The router makes the server's span of these itself.
_UNTRACED_AT_SERVER = {_INFERENCE + "Generate"}
# PushClient makes the client's span of these itself.
_UNTRACED_AT_CLIENT = {PUSH_METHOD}
# Calls that begin work; a draining server refuses them, and lets all others end what has begun.
_WORK_METHODS = {
    _INFERENCE + "Generate",
    "pageferry.v1.PrefillService/Prefill",
    "pageferry.v1.DecodeService/Decode",
}
_PROPAGATOR = TraceContextTextMapPropagator()
_R = TypeVar("_R")


def span_name(method: str) -> str | None:
    """The name of a method's span; None where the method is never traced."""
    if method in _UNTRACED or method.startswith(_UNTRACED_SERVICES):
        return None
    return _SPAN_NAMES.get(method, method)


def extract_context(metadata: object) -> Context:
    """The caller's W3C context from a call's metadata; keys in any spelling, as HTTP proxies write them."""
    carrier: dict[str, str] = {}
    for key, value in metadata or ():  # type: ignore[attr-defined]
        carrier[key.lower()] = value if isinstance(value, str) else value.decode("ascii", "replace")
    return _PROPAGATOR.extract(carrier, Context())


def inject_context(context: Context | None = None) -> list[tuple[str, str]]:
    """Metadata that carries a context, by default the current one."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return list(carrier.items())


def rpc_attributes(method: str) -> dict[str, str]:
    return {"rpc.system.name": "grpc", "rpc.method": method}


def end_span(span: Span, code: grpc.StatusCode, description: str = "") -> None:
    """Set the call's status and end the span."""
    span.set_attribute("rpc.response.status_code", code.name)
    if code is not grpc.StatusCode.OK:
        span.set_attribute("error.type", code.name)
        span.set_status(Status(StatusCode.ERROR, description or code.name))
    span.end()


class ServerInterceptor(grpc.aio.ServerInterceptor):
    """Traces calls, turns errors into statuses with details, and knows which calls are live.

    A handler is a coroutine or an async generator; its span is the current one inside it. Where a call is cancelled the
    handler is too, and its `finally` blocks have run before the span ends.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._live: dict[asyncio.Task[Any], str] = {}
        self._overdue: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method.lstrip("/")
        context = extract_context(handler_call_details.invocation_metadata)
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        behaviour = getattr(handler, kind)

        async def run(request: Any, servicer_context: Any) -> Any:
            return await self._run(method, context, _adapt(behaviour, request, servicer_context), servicer_context)

        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(run, handler.request_deserializer, handler.response_serializer)

    async def wait_idle(self, grace_s: float) -> int:
        """Wait until no work is live; what still is after `grace_s` ends with UNAVAILABLE. Returns how many did."""
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
            return 0
        except TimeoutError:
            overdue = list(self._live)
        self._overdue.update(overdue)
        for task in overdue:
            task.cancel()
        await self._idle.wait()
        return len(overdue)

    async def _run(self, method: str, context: Context, work: Callable[[], Awaitable[_R]], servicer_context: Any) -> _R:
        if method in _WORK_METHODS and self.draining:
            await abort(servicer_context, UnavailableError("the server is draining", reason="DRAINING"))
        name = None if method in _UNTRACED_AT_SERVER else span_name(method)
        if name is None:
            span = trace.INVALID_SPAN
            token = otel_context.attach(context)
        else:
            span = self._tracer.start_span(name, context, SpanKind.SERVER, rpc_attributes(method))
            token = otel_context.attach(trace.set_span_in_context(span, context))
        task = asyncio.current_task()
        assert task is not None
        if method in _WORK_METHODS:
            self._live[task] = method
            self._idle.clear()
        code, description = grpc.StatusCode.UNKNOWN, ""
        try:
            result = await self._translate(method, work, servicer_context)
            code = _code(servicer_context) or grpc.StatusCode.OK
            return result
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except BaseException:
            code, description = _code(servicer_context) or grpc.StatusCode.UNKNOWN, servicer_context.details()
            raise
        finally:
            if self._live.pop(task, None) and not self._live:
                self._idle.set()
            self._overdue.discard(task)
            end_span(span, code, description)
            otel_context.detach(token)

    async def _translate(self, method: str, work: Callable[[], Awaitable[_R]], servicer_context: Any) -> _R:
        try:
            return await work()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task not in self._overdue:
                raise
            task.uncancel()
            error: PageferryError = UnavailableError("the server drained before the call was over", reason="DRAINED")
        except PageferryError as raised:
            error = raised
        except grpc.aio.BaseError:
            raise  # the handler's own abort
        except Exception as raised:
            log("handler_failed", level="error", exc_info=True, method=method)
            error = InternalError(f"internal error: {type(raised).__name__}")
        await abort(servicer_context, error)


def _adapt(behaviour: Any, request: Any, servicer_context: Any) -> Callable[[], Awaitable[Any]]:
    """A handler of either kind as a coroutine; an async generator's messages are written as they come."""
    if not inspect.isasyncgenfunction(behaviour):
        return lambda: behaviour(request, servicer_context)  # type: ignore[no-any-return]

    async def write_all() -> None:
        async with aclosing(behaviour(request, servicer_context)) as messages:
            async for message in messages:
                await servicer_context.write(message)

    return write_all


def _code(servicer_context: Any) -> grpc.StatusCode | None:
    """The status that the handler has set: an enum member, or its number, as the library keeps either."""
    code = servicer_context.code()
    if isinstance(code, int):
        code = next(status for status in grpc.StatusCode if status.value[0] == code)
    return code or None


class _ClientTracing:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def _traced(self, continuation: Any, details: Any, request: Any) -> Any:
        method = (details.method.decode() if isinstance(details.method, bytes) else details.method).lstrip("/")
        name = None if method in _UNTRACED_AT_CLIENT else span_name(method)
        if name is None:
            return await continuation(details, request)
        # Runs in a task made by the call itself, so the current context is the caller's.
        span = self._tracer.start_span(name, kind=SpanKind.CLIENT, attributes=rpc_attributes(method))
        try:
            call = await continuation(_with_context(details, trace.set_span_in_context(span)), request)
        except BaseException as error:
            cancelled = isinstance(error, asyncio.CancelledError)
            end_span(span, grpc.StatusCode.CANCELLED if cancelled else grpc.StatusCode.UNKNOWN)
            raise
        call.add_done_callback(lambda done: end_span(span, *_final_status(done)))
        return call


def _with_context(details: Any, context: Context) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    for key, value in inject_context(context):
        metadata.delete_all(key) if key in metadata else None
        metadata.add(key, value)
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


def _final_status(call: Any) -> tuple[grpc.StatusCode, str]:
    """Code and details of a call that is done: these coroutines then end without waiting."""
    results = []
    for coroutine in (call.code(), call.details()):
        try:
            coroutine.send(None)
        except StopIteration as end:
            results.append(end.value)
        else:
            coroutine.close()
            return grpc.StatusCode.UNKNOWN, ""
    return results[0], results[1] or ""


class _UnaryUnary(_ClientTracing, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._traced(continuation, client_call_details, request)


class _UnaryStream(_ClientTracing, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._traced(continuation, client_call_details, request)


class _StreamStream(_ClientTracing, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await self._traced(continuation, client_call_details, request_iterator)


def client_interceptors(tracer: Tracer) -> list[grpc.aio.ClientInterceptor]:
    """One for each kind of call; the context is taken at the call, and the span ends with it whatever happens."""
    return [_UnaryUnary(tracer), _UnaryStream(tracer), _StreamStream(tracer)]
