"""The HTTP gateway: OpenAI's completions, models, health and metrics, in the gRPC server's event loop."""

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import uvicorn
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pageferry.core.errors import InternalError, NotFoundError, PageferryError, UnauthenticatedError, UnavailableError
from pageferry.router.admission import MAX_MODEL_CHARACTERS
from pageferry.router.gateway import openai_reply as reply
from pageferry.router.gateway.generation import GenerationResponse, Generator, dump
from pageferry.router.gateway.openai_request import ParsedRequest, parse_chat, parse_completion
from pageferry.router.gateway.protocol import HttpProtocol
from pageferry.router.gateway.strict_json import refuse
from pageferry.router.gateway.tls import HttpTls
from pageferry.runtime.logs import log

_MAX_REQUEST_ID = 128
_BACKLOG = 2048
BODY_S = 60.0  # for all of a request's body
_KEEP_ALIVE_S = 120  # longer than clients' and proxies' pools keep an idle connection


def build_app(frontend: Generator, registry: CollectorRegistry, *, max_body_bytes: int = 4 * 2**20) -> ASGIApp:
    """The gateway as an ASGI application; `max_body_bytes` bounds a body before it is parsed."""
    gateway = _Gateway(frontend, registry, max_body_bytes, int(time.time()))
    routes = [
        Route("/v1/completions", gateway.completions, methods=["POST"]),
        Route("/v1/chat/completions", gateway.chat_completions, methods=["POST"]),
        Route("/v1/models", gateway.models),
        Route("/v1/models/{name:path}", gateway.model),
        Route("/health", gateway.health),
        Route("/metrics", gateway.metrics),
    ]
    handlers: Mapping[Any, Any] = {
        PageferryError: _on_error,
        HTTPException: _on_http_error,
        ClientDisconnect: _on_disconnect,
        500: _on_bug,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


async def serve_http(
    app: ASGIApp,
    host: str,
    port: int,
    stop: asyncio.Event,
    *,
    tls: HttpTls | None = None,
    grace_s: float = 30.0,
    on_bound: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve until `stop`; then take no more connections and give running answers `grace_s` to end.

    `on_bound` hears the port. Raises UnavailableError before anything else if the port can't be opened.
    """
    listener = _bind(host, port)
    on_bound(listener.getsockname()[1])
    server = _Server(_uvicorn_config(app, grace_s, tls))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        server.should_exit = True
        await serving
        listener.close()


def _uvicorn_config(app: ASGIApp, grace_s: float, tls: HttpTls | None) -> uvicorn.Config:
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    return uvicorn.Config(
        app,
        http=tls.protocol() if tls is not None else HttpProtocol,
        ssl_context_factory=(lambda *_: tls.context) if tls is not None else None,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(grace_s)),
    )


@dataclass(frozen=True, slots=True)
class _Gateway:
    frontend: Generator
    registry: CollectorRegistry
    max_body_bytes: int
    created: int

    async def completions(self, request: Request) -> Response:
        return await self._generation(request, parse_completion)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generation(request, parse_chat)

    async def models(self, request: Request) -> Response:
        return _json(reply.models(self.frontend.list_models(_authorization(request)), self.created))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for entry in self.frontend.list_models(_authorization(request)).models:
            if entry.name == name:
                return _json(reply.model(entry, self.created))
        raise NotFoundError(f"model {name[:MAX_MODEL_CHARACTERS]!r} is not served", reason="MODEL_NOT_FOUND")

    async def health(self, request: Request) -> Response:
        return _json({"status": "ready"}) if self.frontend.ready else _json({"status": "not ready"}, 503)

    async def metrics(self, request: Request) -> Response:
        self.frontend.check_admin(_authorization(request), "metrics")
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

    async def _generation(self, request: Request, parse: Callable[[bytes], ParsedRequest]) -> Response:
        _check_media_type(request)
        self.frontend.check_caller(_authorization(request))  # before the body of a stranger is read
        request_id = _request_id(request)
        parsed = parse(await _body(request, self.max_body_bytes))
        parsed.generate.request_id = request_id
        parent = TraceContextTextMapPropagator().extract(dict(request.headers), Context())
        return GenerationResponse(self.frontend, parsed, parent, _authorization(request))


def _authorization(request: Request) -> list[str]:
    """The caller's credentials, as they came."""
    return request.headers.getlist("authorization")


def _check_media_type(request: Request) -> None:
    # A web page can post other types to this machine without being asked first.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, "content-type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "content-encoding must be identity", {"accept-encoding": "identity"})


def _request_id(request: Request) -> str:
    """The caller's x-request-id, or empty; the answer carries it, and the trace can be found by it."""
    request_id = request.headers.get("x-request-id", "")
    if len(request_id) > _MAX_REQUEST_ID or not (request_id.isascii() and request_id.isprintable()):
        refuse("x-request-id", f"must be at most {_MAX_REQUEST_ID} printable ASCII characters")
    return request_id


async def _body(request: Request, max_bytes: int) -> bytes:
    too_large = HTTPException(413, f"the body is larger than the limit of {max_bytes} bytes", {"connection": "close"})
    if int(request.headers.get("content-length", "0")) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, f"the body took longer than {BODY_S:g} s", {"connection": "close"}) from None
    return bytes(body)


def _json(value: reply.Json, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump(value), status, headers, "application/json")


async def _on_error(request: Request, error: PageferryError) -> Response:
    headers = {"x-request-id": request.headers.get("x-request-id", "")}
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    if isinstance(error, UnauthenticatedError):
        headers["www-authenticate"] = "Bearer"
    return _json(reply.error_body(error), reply.error_status(error), {k: v for k, v in headers.items() if v})


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    reason = HTTPStatus(error.status_code).name.lower()
    body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": reason}
    return _json({"error": body}, error.status_code, error.headers)


async def _on_disconnect(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=400)  # nobody reads it: the client left while it sent the body


async def _on_bug(request: Request, error: Exception) -> Response:
    log("http_failed", level="error", error=error, path=request.url.path)
    return _json(reply.error_body(InternalError("the server failed; see its log")), 500)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process: it drains gRPC and HTTP together."""
        yield


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        message = f"http_port {port} on {host} can't be opened: {error.strerror}; choose another"
        raise UnavailableError(message, reason="PORT_UNAVAILABLE") from error
    return listener
