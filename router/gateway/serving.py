"""The gateway on a port: uvicorn in the gRPC server's event loop."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from pageferry.core.errors import UnavailableError
from pageferry.router.gateway.protocol import HttpProtocol
from pageferry.router.gateway.tls import HttpTls

GRACE_S = 8.0  # for answers that clients have yet to read once all has drained: 15 s after that, Kubernetes kills
_BACKLOG = 2048
_KEEP_ALIVE_S = 120  # longer than clients' and proxies' pools keep an idle connection


async def serve_http(
    app: ASGIApp,
    host: str,
    port: int,
    stop: asyncio.Event,
    *,
    tls: HttpTls | None = None,
    grace_s: float = GRACE_S,
    on_bound: Callable[[int], None] = lambda port: None,
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """Serve until `stop`; then take no more connections and give running answers `grace_s` to end.

    `on_bound` hears the port, `on_stop` ends what is not to be waited for. Raises UnavailableError before anything else
    if the port can't be opened.
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
        on_stop()
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
