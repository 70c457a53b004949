"""Routers and workers as processes of their own, with proxies between them where a test wants any.

`cluster.py` has `pageferry up` and what is asked of either.
"""

import contextlib
import signal
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Container, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from cluster import LONG_LEASES, Stub, wait_idle
from links import TcpLink
from pushes import Fault, PushLink
from service import READY_S, Role, Service, Settings
from tiny_model import write_tiny_model

from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

# Every prompt is handed over, inline, and exactly. An answer takes as long as it has tokens: tiny models repeat theirs.
QUICK: Settings = {
    "router.local_prefill_tokens": "0",
    "router.local_advantage": "1e9",
    "scheduler.chunk_tokens": "64",
    "scheduler.local_chunk_tokens": "64",
    "engine.num_pages": "1024",
    "engine.compute_dtype": "fp32",
    "engine.page_format": "fp32",
    "engine.threads": "1",
    "engine.speculation": "off",
    "handoff.transport": "inline",
    **LONG_LEASES,
}


class Deployment:
    """Routers and workers with the tiny model, ready once the context is entered, drained when it is left.

    Leaving it fails where a service that lived did not end well, or one of them printed a traceback.
    """

    def __init__(
        self,
        prefill: int = 2,
        decode: int = 2,
        routers: int = 1,
        settings: Settings | None = None,
        *,
        of_role: Mapping[Role, Settings] | None = None,
        model: Path | None = None,
        linked: bool | Container[str] = False,
    ) -> None:
        """`settings` go to all, over QUICK; those `of_role` to one role, over all others.

        `linked`, all or those of these names: calls to a service go through `calls[its name]`, pushes of pages to a
        decode worker through `pages[its name]` and then `pushes[its name]`, which share `faults`.
        """
        self._links = contextlib.ExitStack()
        self._directory = tempfile.TemporaryDirectory(prefix="pageferry-test-")
        model = model or write_tiny_model(Path(self._directory.name) / "tiny")
        self._shared = QUICK | {"engine.model": str(model)} | (settings or {})
        self._of_role = of_role or {}
        self.routers = self._make("router", routers)
        endpoint = {"telemetry.otlp_endpoint": self.routers[0].address}
        self.prefill = self._make("prefill", prefill, endpoint)
        self.decode = self._make("decode", decode, endpoint)
        self.calls: dict[str, TcpLink] = {}
        self.pages: dict[str, TcpLink] = {}
        self.pushes: dict[str, PushLink] = {}
        self.faults: deque[Fault] = deque()
        if linked is not False:
            self._link([service for service in self.services if linked is True or service.name in linked])
        workers = {
            f"router.{role}": ",".join(self.address_of(worker) for worker in group)
            for role, group in (("prefill", self.prefill), ("decode", self.decode))
        }
        for router in self.routers:
            router.settings = workers | router.settings

    def _make(self, role: Role, number: int, more: Settings | None = None) -> list[Service]:
        settings = dict(more or {}) | self._shared | self._of_role.get(role, {})
        return [Service(role, settings=settings, name=f"{role}-{index}") for index in range(number)]

    def _link(self, services: Iterable[Service]) -> None:
        for service in services:
            self.calls[service.name] = TcpLink(service.address)
            if service.role == "decode":
                self._link_pages(service)

    def _link_pages(self, worker: Service) -> None:
        push = self.pushes[worker.name] = PushLink(worker.address, self.faults)
        link = self.pages[worker.name] = TcpLink(push.address)
        worker.settings["server.advertised_port"] = str(link.port)

    def address_of(self, service: Service) -> str:
        """Where others call it."""
        link = self.calls.get(service.name)
        return link.address if link is not None else service.address

    @property
    def workers(self) -> list[Service]:
        return [*self.prefill, *self.decode]

    @property
    def services(self) -> list[Service]:
        return [*self.routers, *self.workers]

    @property
    def output(self) -> str:
        return "\n".join(f"--- {service.name}\n{service.output}" for service in self.services)

    @contextlib.asynccontextmanager
    async def stub(self, router: int = 0) -> AsyncIterator[Stub]:
        async with grpc.aio.insecure_channel(self.address_of(self.routers[router])) as channel:
            yield InferenceServiceStub(channel)

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[Stub]:
        """A stub for one test; afterwards all is mended, and every page, ticket and stream found given back."""
        async with self.stub() as stub:
            yield stub
            self.restore()
            await wait_idle(stub)

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        for service in (*self.workers, *self.routers):  # as a router waits for its workers
            service.wait_ready(timeout_s)

    def restore(self) -> None:
        """Undo what was done to services and links; what is dead lives again, and all are ready."""
        for link in (*self.calls.values(), *self.pages.values()):
            link.heal()
        self.faults.clear()
        for service in self.services:
            if not service.is_alive:
                service.start()
            service.resume()
        self.wait_ready()

    def __enter__(self) -> Self:
        try:
            for link in (*self.calls.values(), *self.pages.values(), *self.pushes.values()):
                self._links.enter_context(link)
            for service in self.services:
                service.start()
            self.wait_ready()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is not None:
                error.add_note(f"what the services said last:\n{self._last_words()}")
            else:
                self._stop()
        finally:
            self._kill()

    def _stop(self) -> None:
        """Routers before workers, as they would have work for them; each that lives must end with 0."""
        for group in (self.routers, self.workers):
            living = [service for service in group if service.is_alive]
            for service in living:
                service.signal(signal.SIGTERM)
            statuses = {service.name: service.terminate() for service in living}
            assert not any(statuses.values()), f"{statuses}\n{self._last_words()}"
        before, found, after = self.output.partition("Traceback")
        assert not found, f"{before[-1500:]}Traceback{after[:4000]}"

    def _last_words(self) -> str:
        return "\n".join(f"--- {service.name}\n{service.output[-2500:]}" for service in self.services)

    def _kill(self) -> None:
        for service in self.services:
            if service.is_alive:
                service.kill()
            service.close()
        self._links.close()
        self._directory.cleanup()
