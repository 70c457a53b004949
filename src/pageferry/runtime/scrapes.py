"""Metrics as text for scrapers: rendered one at a time, and once for all who ask meanwhile."""

import gzip
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, gzip_accepted

_REST = 9  # times as long as the last rendering took: so all of them together have a tenth of a processor
_OPEN_METRICS = "application/openmetrics-text"


class Scrapes:
    """Renders a registry on a thread of its own. A flood of scrapes waits, and costs little more than one of them."""

    def __init__(
        self,
        registry: CollectorRegistry,
        rest: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rest` waits for so many seconds of the clock."""
        self._registry = registry
        self._rest = rest
        self._clock = clock
        self._rested = 0.0  # when it will have, after the last rendering
        self._thread = ThreadPoolExecutor(1, "scrapes")
        self._lock = threading.Lock()
        self._next: dict[tuple[str, bool], Future[bytes]] = {}  # by the form; not begun yet

    def ask(self, accept: str, *, packed: bool = False) -> tuple[Future[bytes], str]:
        """The text, which has all that was counted before this call, and its content type. Any thread may call.

        The future is shared: it must not be cancelled.
        """
        accept = _form(accept)
        with self._lock:
            future = self._next.get((accept, packed))
            if future is None:
                future = self._thread.submit(self._render, accept, packed)
                self._next[accept, packed] = future
        return future, choose_encoder(accept)[1]

    def answer(self, environ: dict[str, Any], start: Callable[..., object]) -> Iterable[bytes]:
        """As an application of WSGI."""
        if environ["REQUEST_METHOD"] != "GET":
            start("405 Method Not Allowed", [("Allow", "GET")])
            return [b""]
        packed = gzip_accepted(environ.get("HTTP_ACCEPT_ENCODING", ""))
        text, content_type = self.ask(environ.get("HTTP_ACCEPT", ""), packed=packed)
        body = text.result()
        start("200 OK", [("Content-Type", content_type), *([("Content-Encoding", "gzip")] if packed else [])])
        return [body]

    def _render(self, accept: str, packed: bool) -> bytes:
        self._rest(max(0.0, self._rested - self._clock()))
        with self._lock:
            del self._next[accept, packed]  # who asks from here on wants what is counted from here on
        began = time.thread_time()
        text: bytes = choose_encoder(accept)[0](self._registry)
        text = gzip.compress(text, 1) if packed else text
        self._rested = self._clock() + _REST * (time.thread_time() - began)
        return text


def _form(accept: str) -> str:
    """One of the two forms that there are, whatever versions a scraper names: each differs only in the name."""
    try:
        is_open = choose_encoder(accept)[1].startswith(_OPEN_METRICS)
    except TypeError:  # of a version of words
        is_open = False
    return _OPEN_METRICS if is_open else ""
