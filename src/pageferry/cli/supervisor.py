"""Keeps a set of child processes running: starts, restarts, relays what they print, drains in order."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from pageferry.core.errors import AbortedError, UnavailableError

MIN_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
STEADY_S = 60.0  # a child that lived this long starts again with the shortest wait
_MAX_LINE_BYTES = 2**20
_DRAIN_MARGIN_S = 10.0  # beyond the children's own grace
ABANDON_S = 2.0  # for children that were still starting: nothing is lost with them
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")

Report = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A process to keep running. The same command serves every restart, so a child keeps its port."""

    role: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


class LineFilter:
    """What a user is to see of a child's output: each line but stack traces, of which the last line says it all."""

    def __init__(self) -> None:
        self.reason = ""  # the last line that told of an error, else the last line
        self._in_traceback = False
        self._has_error = False

    def feed(self, line: str) -> str | None:
        """The line to show, or None."""
        line = line.rstrip()
        if line.startswith("Traceback (most recent call last)"):
            self._in_traceback = True
            return None
        if self._in_traceback:
            if not line or line[0].isspace():
                return None
            self._in_traceback = False
            line = f"error: {line}"
        if not line or line.startswith(_CHAINED):
            return None
        is_error = line.startswith("error: ")
        if is_error or not self._has_error:
            self.reason, self._has_error = line.removeprefix("error: "), is_error
        return line


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    process: asyncio.subprocess.Process | None = None
    filter: LineFilter = field(default_factory=LineFilter)

    def send(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


class Supervisor:
    """Runs children as long as its context is open; leaving it drains them, the first (the router) before the others.

    Until `settle`, a child that ends is a failed start: `failed` then has its reason. After it, the child is started
    again, with a wait that doubles each time. `report` hears role and line of all that is to be shown.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        report: Report,
        *,
        grace_s: float = 30.0,
        backoff_s: tuple[float, float] = (MIN_BACKOFF_S, MAX_BACKOFF_S),
        abandon_s: float = ABANDON_S,
    ) -> None:
        self._children = [_Child(spec) for spec in specs]
        self._report = report
        self._grace_s = grace_s
        self._backoff_s = backoff_s
        self._abandon_s = abandon_s
        self._settled = False
        self._draining = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._killed = False
        self.failed: asyncio.Future[UnavailableError] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        self._keepers = [asyncio.create_task(self._keep(child)) for child in self._children]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain()

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    def settle(self) -> None:
        """All children have started well."""
        self._settled = True

    async def drain(self) -> None:
        """End the first child, then the others; each has the grace to end by itself, and is killed after it.

        Raises AbortedError where `kill` cut it short.
        """
        self._draining.set()
        await self._end(self._keepers[:1], self._children[:1])
        await self._end(self._keepers[1:], self._children[1:])
        if self._killed:
            raise AbortedError("the processes were killed before they had drained", reason="KILLED")

    def kill(self) -> None:
        """End every child at once; `drain` then returns soon."""
        self._killed = True
        self._draining.set()
        for child in self._children:
            child.send(signal.SIGKILL)

    async def _end(self, keepers: list[asyncio.Task[None]], children: list[_Child]) -> None:
        if not keepers:
            return
        for child in children:
            child.send(signal.SIGTERM)
        _, late = await asyncio.wait(
            keepers, timeout=self._grace_s + _DRAIN_MARGIN_S if self._settled else self._abandon_s
        )
        if late:
            for child in children:
                child.send(signal.SIGKILL)
            await asyncio.wait(keepers)

    async def _keep(self, child: _Child) -> None:
        shortest, longest = self._backoff_s
        wait_s = shortest
        while not self._draining.is_set():
            began = time.monotonic()
            code = await self._run(child)
            if self._draining.is_set():
                return
            if not self._settled:
                self._fail(child, code)
                return
            if time.monotonic() - began >= STEADY_S:
                wait_s = shortest
            self._report(child.spec.role, f"ended with {_ending(code)}; starts again in {wait_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), wait_s)
            wait_s = min(2 * wait_s, longest)

    def _fail(self, child: _Child, code: int) -> None:
        if not self.failed.done():
            reason = child.filter.reason or f"it ended with {_ending(code)}"
            self.failed.set_result(UnavailableError(f"{child.spec.role} can't start: {reason}", reason="START_FAILED"))

    async def _run(self, child: _Child) -> int:
        """One life of a child; its exit status."""
        child.filter = LineFilter()
        child.process = process = await asyncio.create_subprocess_exec(
            *child.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(child.spec.environment),
            limit=_MAX_LINE_BYTES,
            process_group=0,  # a Ctrl-C in the terminal is for the supervisor alone
        )
        if self._draining.is_set():
            child.send(signal.SIGTERM)
        assert process.stdout is not None
        await self._relay(child, process.stdout)
        return await process.wait()

    async def _relay(self, child: _Child, output: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await output.readline()
            except ValueError:  # longer than the limit, and dropped
                continue
            if not line:
                return
            if (shown := child.filter.feed(line.decode(errors="replace"))) is not None:
                self._report(child.spec.role, shown)


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
