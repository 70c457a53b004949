"""Routers and workers as processes of their own, which a test kills, pauses and starts again at the same address.

`cluster.py` has `pageferry up` and what is asked of either.
"""

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Container, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import grpc
from cluster import POLL_S, Stub, environment
from links import TcpLink, hold_port
from pushes import Fault, PushLink
from tiny_model import write_tiny_model

from pageferry.v1.inference_pb2_grpc import InferenceServiceStub

Role = Literal["router", "prefill", "decode"]
Settings = Mapping[str, str]
_MODULES = {"router": "router", "prefill": "prefill_svc", "decode": "decode_svc"}
READY_S = 120.0
STOP_S = 60.0
# Every prompt is handed over, inline, and exactly.
QUICK: Settings = {
    "router.local_prefill_tokens": "0",
    "router.local_advantage": "1e9",
    "scheduler.chunk_tokens": "64",
    "scheduler.local_chunk_tokens": "64",
    "engine.num_pages": "1024",
    "engine.page_format": "fp32",
    "engine.threads": "1",
    "handoff.transport": "inline",
}


class Service:
    """A process of one role. Its port is its own from the first life to the last; `output` is that of all lives."""

    def __init__(self, role: Role, port: int = 0, settings: Settings | None = None, *, name: str = "") -> None:
        """`settings` are keyed "section.field". Port 0 is one that is free."""
        self.role = role
        self.name = name or role
        self.settings = dict(settings or {})
        self.command_prefix: tuple[str, ...] = ()  # a command that ends by running the service in its place
        self._holders = [hold_port(port), *([hold_port(0)] if role == "router" else [])]
        self._log = tempfile.NamedTemporaryFile(prefix=f"{self.name}-", suffix=".log")  # noqa: SIM115 - for its life
        self._life = 0  # where its output begins
        self._process: subprocess.Popen[bytes] | None = None
        self._is_paused = False

    @property
    def port(self) -> int:
        return int(self._holders[0].getsockname()[1])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def http(self) -> str:
        """Of a router."""
        return f"http://127.0.0.1:{self._holders[1].getsockname()[1]}"

    @property
    def pid(self) -> int:
        """Of the present life, or the last one."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def output(self) -> str:
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """What this life has logged."""
        text = Path(self._log.name).read_bytes()[self._life :].decode(errors="replace")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[0] == "{" and line[-1] == "\n"]

    def start(self) -> None:
        """Begin a life. On the main thread, since it ends with the thread that began it."""
        assert threading.current_thread() is threading.main_thread()
        assert not self.is_alive, f"{self.name} runs already"
        own = {"server.port": str(self.port)}
        if self.role == "router":
            own["server.http_port"] = self.http.rpartition(":")[2]
        self._life = Path(self._log.name).stat().st_size
        self._process = subprocess.Popen(
            [*self.command_prefix, sys.executable, "-m", f"pageferry.{_MODULES[self.role]}", "--die-with-parent"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment(self.settings | own),
        )

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Until this life has said that it is ready, and not since that it isn't."""
        end = time.monotonic() + timeout_s
        while True:
            ended = not self.is_alive
            said = [event["event"] for event in self.events() if event["event"] in ("ready", "not_ready")]
            if said[-1:] == ["ready"]:
                return
            assert not ended, f"{self.name} ended before it was ready:\n{self.output[-4000:]}"
            assert time.monotonic() < end, f"{self.name} is not ready after {timeout_s} s:\n{self.output[-4000:]}"
            time.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self._end(signal.SIGKILL, STOP_S)

    def terminate(self, timeout_s: float = STOP_S) -> int:
        """SIGTERM; the exit status. Kills what does not end in time, which fails the caller."""
        return self._end(signal.SIGTERM, timeout_s)

    def signal(self, number: int) -> None:
        assert self._process is not None, f"{self.name} was not started"
        self._process.send_signal(number)

    def pause(self) -> None:
        """SIGSTOP; all its threads stand still when this returns."""
        self.signal(signal.SIGSTOP)
        self._is_paused = True
        while self.is_alive and any(_state(task) not in "Tt" for task in Path(f"/proc/{self.pid}/task").iterdir()):
            time.sleep(0.001)

    def resume(self) -> None:
        self._is_paused = False
        self.signal(signal.SIGCONT)

    def restart(self, changes: Settings | None = None) -> None:
        """Kill it, if it lives, and begin another life at the same address; `wait_ready` is the caller's."""
        if self.is_alive:
            self.kill()
        self.settings.update(changes or {})
        self.start()

    def wait_ended(self, timeout_s: float = STOP_S) -> int:
        """The exit status of a life that ends by itself."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.wait(timeout_s)

    def fds(self) -> int:
        """Open file descriptors."""
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    def rss(self) -> int:
        """Bytes resident."""
        status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii")
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
        return int(line.split()[1]) * 1024

    def close(self) -> None:
        """Give up the port and the log."""
        for holder in self._holders:
            holder.close()
        self._log.close()

    def _end(self, number: int, timeout_s: float) -> int:
        self.signal(number)  # which does nothing to one that is gone
        if self._is_paused:
            self.resume()
        try:
            return self.wait_ended(timeout_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.wait_ended()
            raise AssertionError(f"{self.name} still ran {timeout_s} s after SIGTERM:\n{self.output[-4000:]}") from None


def _state(task: Path) -> str:
    """The letter of /proc for what a thread does."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return (task / "stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    return "T"  # it is over


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
