"""The router's page: one static file, and the objects that it asks for."""

import asyncio
import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pageferry import __version__
from pageferry.router.gateway.envelope import authorization_of
from pageferry.router.gateway.page_json import requests_text, status_text, trace_json
from pageferry.router.gateway.strict_json import Json, dump, refuse, shown
from pageferry.router.record import KEPT_REQUESTS, Record
from pageferry.v1 import inference_pb2 as pb

MAX_NUMBER = 2**53 - 1  # the largest that JavaScript tells from its neighbours
_PREFIX = "/pageferry/v1"
_NO_STORE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class Watched(Protocol):
    """What the page needs of the router's frontend. Both raise UnauthenticatedError and PermissionDeniedError."""

    @property
    def ready(self) -> bool: ...

    def get_status(self, authorization: Sequence[str]) -> pb.GetStatusResponse: ...

    def get_trace(self, request: pb.GetTraceRequest, authorization: Sequence[str]) -> pb.GetTraceResponse: ...

    def check_admin(self, authorization: Sequence[str], what: str) -> None: ...


@dataclass(frozen=True)
class Page:
    """`keeps_traces`: here, in memory; `trace_url` is where else a trace is shown, with "{trace_id}" in it."""

    frontend: Watched
    record: Record
    model: str
    keeps_traces: bool
    trace_url: str = ""

    def routes(self) -> list[Route]:
        return [
            Route("/", self.page),
            Route(f"{_PREFIX}/status", self.status),
            Route(f"{_PREFIX}/requests", self.requests),
            Route(f"{_PREFIX}/traces/{{id:path}}", self.trace),
        ]

    @cached_property
    def _file(self) -> tuple[bytes, dict[str, str]]:
        body = files("pageferry.router.gateway").joinpath("page.html").read_bytes()
        return body, page_headers(body)

    async def page(self, request: Request) -> Response:
        """Anybody may have it: there is nothing in it but the page."""
        body, headers = self._file
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type="text/html")

    async def status(self, request: Request) -> Response:
        status = self.frontend.get_status(authorization_of(request))
        after = _query(request, {"after": (0, 0, MAX_NUMBER)})["after"]
        about: Json = {
            "version": __version__,
            "model": self.model,
            "ready": self.frontend.ready,
            "keeps_traces": self.keeps_traces,
            "trace_url": self.trace_url,
        }
        return _json(status_text(about, status, self.record, after / 1000))

    async def requests(self, request: Request) -> Response:
        self.frontend.check_admin(authorization_of(request), "requests")
        asked = _query(request, {"after": (0, 0, MAX_NUMBER), "limit": (100, 1, KEPT_REQUESTS)})
        return _json(requests_text(self.record, asked["after"], asked["limit"]))

    async def trace(self, request: Request) -> Response:
        asked = pb.GetTraceRequest(id=request.path_params["id"])
        response = self.frontend.get_trace(asked, authorization_of(request))
        _query(request, {})
        return _json(await asyncio.to_thread(lambda: dump(trace_json(response))))


def page_headers(page: bytes) -> dict[str, str]:
    """Of the page: what it may do is to run its own script, look as its own styles say, and call this server."""
    script, style = (_hash_of(page, tag) for tag in ("script", "style"))
    policy = (
        "default-src 'none'",
        f"script-src '{script}'",
        f"style-src '{style}'",
        "connect-src 'self'",
        "img-src data:",  # the icon, which is in the page
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-resource-policy": "same-origin",
        "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
        "cache-control": "no-cache",
        "etag": f'"{hashlib.sha256(page).hexdigest()[:32]}"',
    }


def _hash_of(page: bytes, tag: str) -> str:
    """The hash, as a policy has it, of what stands in the page's one element of that name."""
    found: list[bytes] = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), page, re.DOTALL)
    assert len(found) == 1, f"the page has {len(found)} of {tag}"
    return "sha256-" + base64.b64encode(hashlib.sha256(found[0]).digest()).decode()


def _query(request: Request, known: dict[str, tuple[int, int, int]]) -> dict[str, int]:
    """Whole numbers by name, each with its default, least and most. Raises InvalidArgumentError for all else."""
    values = {name: default for name, (default, _, _) in known.items()}
    for name, text in request.query_params.multi_items():
        if name not in known:
            refuse(shown(name), f"is no parameter here; {', '.join(known) or 'none'} may be given")
        _, least, most = known[name]
        if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most):
            refuse(name, f"must be a whole number from {least} to {most}")
        values[name] = int(text)
    return values


def _json(text: bytes) -> Response:
    return Response(text, 200, _NO_STORE, "application/json")
