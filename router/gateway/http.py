"""The HTTP gateway: OpenAI's endpoints, health and metrics, as an ASGI application."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from opentelemetry.util.types import AttributeValue
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pageferry import __version__
from pageferry.core.errors import NOTHING_BEGUN, InternalError, NotFoundError, PageferryError
from pageferry.router.admission import MAX_MODEL_CHARACTERS
from pageferry.router.gateway.bodies import Bodies
from pageferry.router.gateway.chat_request import parse_chat
from pageferry.router.gateway.choices_reply import ChatReply, CompletionReply
from pageferry.router.gateway.completion_request import parse_completion
from pageferry.router.gateway.envelope import (
    HEADERS_OUT,
    RequestIds,
    authorization_of,
    deadline_of,
    ignored_header,
    read_profile,
)
from pageferry.router.gateway.errors import error_body, error_headers, error_status
from pageferry.router.gateway.fields import Reading
from pageferry.router.gateway.generation import GenerationResponse, Generator, Sender
from pageferry.router.gateway.logprobs import TokenBytes
from pageferry.router.gateway.page import Page
from pageferry.router.gateway.parsed import Parsed
from pageferry.router.gateway.reply import Reply
from pageferry.router.gateway.responses_reply import ResponsesReply
from pageferry.router.gateway.responses_request import parse_responses
from pageferry.router.gateway.strict_json import Json, dump
from pageferry.runtime.logs import log
from pageferry.runtime.rpc_spans import extract_context
from pageferry.runtime.scrapes import Scrapes
from pageferry.v1 import inference_pb2 as pb

_MAX_DROPPED_BYTES = 64 * 2**20  # of a body that is too large
_Parser = Callable[[bytes, Reading], Parsed]
_Replier = Callable[[Parsed, str, int, TokenBytes], Reply]


def build_app(
    frontend: Generator,
    registry: CollectorRegistry,
    *,
    bodies: Bodies | None = None,
    refuse_unknown: bool = True,
    cors_origins: tuple[str, ...] = (),
    page: Page | None = None,
) -> ASGIApp:
    """The gateway; `bodies` bounds bodies before they are parsed, `cors_origins` are whose pages may call."""
    gateway = _Gateway(frontend, Scrapes(registry), bodies or Bodies(), int(time.time()), refuse_unknown)
    handlers: Mapping[Any, Any] = {
        PageferryError: _on_error,
        HTTPException: _on_http_error,
        ClientDisconnect: _on_disconnect,
        500: _on_bug,
    }
    routes = [*gateway.routes(), *(page.routes() if page is not None else ())]
    app = Starlette(routes=routes, exception_handlers=handlers)
    if cors_origins:
        methods, exposed = ["GET", "POST"], list(HEADERS_OUT)
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=methods,
            allow_headers=["*"],
            expose_headers=exposed,
        )
    return RequestIds(app)


@dataclass(frozen=True, slots=True)
class _Gateway:
    frontend: Generator
    scrapes: Scrapes
    bodies: Bodies
    created: int
    refuse_unknown: bool

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.ready),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
        ]

    async def completions(self, request: Request) -> Response:
        return await self._generation(request, parse_completion, CompletionReply)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generation(request, parse_chat, ChatReply)

    async def responses(self, request: Request) -> Response:
        return await self._generation(request, parse_responses, ResponsesReply)

    async def models(self, request: Request) -> Response:
        entries = self.frontend.list_models(authorization_of(request)).models
        return _json({"object": "list", "data": [self._model(entry) for entry in entries]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for entry in self.frontend.list_models(authorization_of(request)).models:
            if entry.name == name:
                return _json(self._model(entry))
        raise NotFoundError(f"model {name[:MAX_MODEL_CHARACTERS]!r} is not served", reason="MODEL_NOT_FOUND")

    async def ready(self, request: Request) -> Response:
        return _json({"status": "ready"}) if self.frontend.ready else _json({"status": "not ready"}, 503)

    async def metrics(self, request: Request) -> Response:
        self.frontend.check_admin(authorization_of(request), "metrics")
        text, content_type = self.scrapes.ask(request.headers.get("accept", ""))
        body = await asyncio.shield(asyncio.wrap_future(text))  # others wait for it, too
        return Response(body, media_type=content_type)

    async def version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def _generation(self, request: Request, parse: _Parser, reply: _Replier) -> Response:
        _check_media_type(request)
        self.frontend.check_caller(authorization_of(request))  # before the body of a stranger is read
        request_id = RequestIds.of(request)
        deadline = deadline_of(request, self.frontend.clock())
        reading = Reading(self.refuse_unknown)
        parsed = parse(await _body(request, self.bodies), reading)
        parsed.request.request_id = request_id
        read_profile(request, parsed.request)
        parent = extract_context(request.headers.items())
        streams = parsed.streaming is not None
        protocol: dict[str, AttributeValue] = {
            "http.request.method": request.method,
            "http.route": request.url.path,
            "gen_ai.request.stream": streams,
        }
        sender = Sender(authorization_of(request), parent, deadline, reading.names, protocol)
        builder = reply(parsed, request_id, int(time.time()), self.frontend.token_bytes)
        return GenerationResponse(self.frontend, parsed, builder, sender, ignored_header(reading.ignored))

    def _model(self, entry: pb.Model) -> Json:
        return {
            "id": entry.name,
            "object": "model",
            "created": self.created,
            "owned_by": "pageferry",
            "max_model_len": entry.max_model_tokens,
        }


def _check_media_type(request: Request) -> None:
    # A web page can post other types to this machine without being asked first.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, "content-type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HTTPException(415, "content-encoding must be identity", {"accept-encoding": "identity"})


async def _body(request: Request, bodies: Bodies) -> bytes:
    """What is too much is read nevertheless, and dropped: many clients hear no answer before they have sent all."""
    most = bodies.max_body_bytes
    too_large = HTTPException(413, f"the body is larger than the limit of {most} bytes", {"connection": "close"})
    if int(request.headers.get("content-length", "0")) > most + _MAX_DROPPED_BYTES:
        raise too_large
    num_bytes = 0
    try:
        async with bodies.receive() as body:
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes <= most:
                    body.add(part)
                elif num_bytes <= most + _MAX_DROPPED_BYTES:
                    body.drop()
                else:
                    raise too_large
            if num_bytes > most:
                raise too_large
            return body.whole()
    except TimeoutError as error:
        raise HTTPException(408, str(error), {"connection": "close"}) from None


def _json(value: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dump(value), status, headers, "application/json")


async def _on_error(request: Request, error: PageferryError) -> Response:
    headers = error_headers(error)
    if error.nothing_begun:
        headers[NOTHING_BEGUN] = "1"
    return _json(error_body(error), error_status(error), headers)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    reason = HTTPStatus(error.status_code).name.lower()
    body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": reason}
    return _json({"error": body}, error.status_code, error.headers)


async def _on_disconnect(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=400)  # nobody reads it: the client left while it sent the body


async def _on_bug(request: Request, error: Exception) -> Response:
    log("http_failed", level="error", error=error, path=request.url.path)
    return _json(error_body(InternalError("the server failed; see its log")), 500)
