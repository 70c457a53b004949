"""What headers say of a request and of its answer: ids, credentials, deadlines, profiles, ignored fields."""

import secrets
from collections.abc import Sequence
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pageferry.router.gateway.strict_json import refuse
from pageferry.v1 import inference_pb2 as pb

REQUEST_ID = "x-request-id"
IGNORED = "x-ignored-fields"
PROFILE = "x-pageferry-profile"
# Milliseconds until nobody waits for the answer any more: as Envoy tells the servers behind it.
TIMEOUT = "x-envoy-expected-rq-timeout-ms"
HEADERS_OUT = (REQUEST_ID, "traceparent", "retry-after", IGNORED)  # that a page's script may read
_MAX_REQUEST_ID = 120  # the ids of a body's further prompts are longer by their number
_MAX_TIMEOUT_MS = 86_400_000
_SCOPE = "pageferry.request_id"


class HasHeaders(Protocol):
    """A request, or what a gateway tells of one."""

    @property
    def headers(self) -> Headers: ...


class RequestIds:
    """Wraps an application: every answer, an error's too, tells the request's id, the caller's own or a drawn one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if given and _is_request_id(given) else secrets.token_hex(12)
        scope[_SCOPE] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)

    @staticmethod
    def of(request: Request) -> str:
        """Raises InvalidArgumentError where the caller's own can't be taken."""
        if not _is_request_id(request.headers.get(REQUEST_ID, "")):
            refuse(REQUEST_ID, f"must be at most {_MAX_REQUEST_ID} printable ASCII characters")
        request_id: str = request.scope[_SCOPE]
        return request_id


def _is_request_id(text: str) -> bool:
    return len(text) <= _MAX_REQUEST_ID and text.isascii() and text.isprintable()


def authorization_of(request: HasHeaders) -> list[str]:
    """The caller's credentials, as they came."""
    return request.headers.getlist("authorization")


def deadline_of(request: HasHeaders, now: float) -> float | None:
    """Raises InvalidArgumentError where the header is no number."""
    text = request.headers.get(TIMEOUT)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 12):
        refuse(TIMEOUT, f"must be a whole number of milliseconds from 0 to {_MAX_TIMEOUT_MS}")
    return now + min(int(text), _MAX_TIMEOUT_MS) / 1000


def read_profile(request: HasHeaders, generate: pb.GenerateRequest) -> None:
    """The header stands for the body's field. Raises InvalidArgumentError where they differ."""
    profile = request.headers.get(PROFILE, "")
    if not profile:
        return
    if not profile.isascii():
        refuse(PROFILE, "must be ASCII characters")
    if generate.profile not in ("", profile):
        refuse(PROFILE, "differs from the body's profile; set one of them")
    generate.profile = profile


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Of the answer, where fields of the body had no effect."""
    shown = [name.encode("ascii", "backslashreplace").decode() for name in names]
    return {IGNORED: ", ".join(name if name.isprintable() else "?" for name in shown)} if shown else {}
