"""One worker as the router sees it: reached over its channel, followed by its Watch stream."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

import grpc

from pageferry.core.errors import InvalidArgumentError, PageferryError, UnavailableError
from pageferry.router.feed import Feed
from pageferry.router.view import WatchGapError, WorkerView
from pageferry.runtime.convert import layout_to_proto
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.logs import log
from pageferry.v1.decode_pb2_grpc import DecodeServiceStub
from pageferry.v1.inference_pb2 import WorkerStatus
from pageferry.v1.prefill_pb2_grpc import PrefillServiceStub
from pageferry.v1.worker_pb2 import WORKER_ROLE_DECODE, WORKER_ROLE_PREFILL, WatchRequest
from pageferry.v1.worker_pb2_grpc import WorkerServiceStub

if TYPE_CHECKING:  # they are known to type checkers only
    from pageferry.v1.decode_pb2_grpc import DecodeServiceAsyncStub
    from pageferry.v1.prefill_pb2_grpc import PrefillServiceAsyncStub
    from pageferry.v1.worker_pb2_grpc import WorkerServiceAsyncStub

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.2  # a worker that has loaded its model is not to wait for the router
LOST = "WORKER_LOST"  # the reason of a call's end where the router has given its worker up
_STALLED = "its engine makes no progress"


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(Enum):
    WARMING = "warming"  # not seen yet
    READY = "ready"
    DRAINING = "draining"
    STALE = "stale"  # its messages have a gap or stopped; resynchronising
    DOWN = "down"
    REFUSED = "refused"  # does not fit: another model, role, or page layout


class Worker:
    """One worker: its channel, what is known of it, and whether it may be used."""

    def __init__(self, role: Role, address: str, channel: grpc.aio.Channel, model: str, name: str = "") -> None:
        """`name` is the configured one behind which the address was found, if it was."""
        self.role = role
        self.address = address
        self.name = name
        self.view = WorkerView()
        self.misfit = ""  # why it can't work with any worker of the other role; set by the fleet
        self.farewell = ""  # why it gets no more work, though it would take it; set by the fleet
        self.num_granted = 0  # requests that were given leave to use it, and are not over
        self.prefill: PrefillServiceAsyncStub = PrefillServiceStub(channel)
        self.decode: DecodeServiceAsyncStub = DecodeServiceStub(channel)
        self.feed = Feed(self.decode.Subscribe)
        self._watcher: WorkerServiceAsyncStub = WorkerServiceStub(channel)
        self._channel = channel
        self._model = model
        self._link = WorkerState.WARMING  # READY while the stream is good
        self._link_reason = "not reached yet"
        self._relying: set[Callable[[PageferryError], None]] = set()

    @property
    def state(self) -> WorkerState:
        if self._link is not WorkerState.READY:
            return self._link
        if self.misfit:
            return WorkerState.REFUSED
        if self.view.is_stalled:
            return WorkerState.STALE
        return WorkerState.DRAINING if self.view.draining or self.farewell else WorkerState.READY

    @property
    def reason(self) -> str:
        """Why it is not ready."""
        if self._link is not WorkerState.READY:
            return self._link_reason
        if self.misfit or self.view.is_stalled:
            return self.misfit or _STALLED
        return "it takes no more work" if self.view.draining else self.farewell

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    @property
    def is_hopeful(self) -> bool:
        """Whether it is ready, or may be so again in a moment."""
        return self.is_ready or self._link is WorkerState.STALE

    @property
    def is_connected(self) -> bool:
        """Whether its watch stream is good, whatever it tells."""
        return self._link is WorkerState.READY

    @property
    def is_alive(self) -> bool:
        """Whether it is heard of, or may be again in a moment."""
        return self._link in (WorkerState.READY, WorkerState.STALE)

    @contextmanager
    def relied_on(self, on_lost: Callable[[PageferryError], None]) -> Iterator[None]:
        """Inside, `on_lost` is called, perhaps more than once, when the process that works here is given up.

        Calls to a worker that is frozen, or out of reach, would go on until TCP notices.
        """
        self._relying.add(on_lost)
        try:
            yield
        finally:
            self._relying.discard(on_lost)

    def own_misfit(self) -> str:
        """What is wrong with the worker alone, whoever it should work with."""
        snapshot = self.view.snapshot
        if self._link is not WorkerState.READY or snapshot is None:
            return ""
        expected = WORKER_ROLE_PREFILL if self.role is Role.PREFILL else WORKER_ROLE_DECODE
        if snapshot.role != expected:
            return f"it is no {self.role.value} worker, but is configured as one"
        if snapshot.model != self._model:
            return f"its model is {snapshot.model!r}, the router's is {self._model!r}"
        return ""

    def status(self) -> WorkerStatus:
        status = WorkerStatus(
            role=self.role.value,
            address=self.address,
            state=self.state.value,
            reason=self.reason,
            load=self.view.load,
            incarnation=self.view.incarnation.hex(),
        )
        if self.view.layout is not None:
            status.layout.CopyFrom(layout_to_proto(self.view.layout))
        return status

    async def watch(self, on_change: Callable[[], None], silence_s: float) -> None:
        """Follow the worker for ever, starting over whenever the stream ends, has a gap, or falls silent."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                await self._follow(on_change, silence_s)
                link, reason = WorkerState.DOWN, "it ended the watch stream"
            except WatchGapError as error:
                link, reason = WorkerState.STALE, f"watch stream has a gap: {error}"
            except TimeoutError:
                # Silent once, it may only be slow; silent again, it is as good as gone.
                link = WorkerState.STALE if self._link is WorkerState.READY else WorkerState.DOWN
                reason = f"no message for {silence_s:g} s"
            except InvalidArgumentError as error:
                link, reason = WorkerState.REFUSED, error.message
            except grpc.aio.AioRpcError as error:
                never_seen = self.view.snapshot is None
                link = WorkerState.WARMING if never_seen else WorkerState.DOWN
                reason = from_rpc_error(error, "the worker").message
            except Exception as error:  # else nobody would hear of the worker any more
                log("watch_failed", level="error", address=self.address, error=error)
                link, reason = WorkerState.DOWN, f"internal error: {type(error).__name__}"
            before = (self._link, self._link_reason)
            was_heard = self._link is WorkerState.READY
            self._set_link(link, reason)
            if was_heard:
                pause_s = _FIRST_PAUSE_S
            else:  # a stream may break, or have a gap, while calls go on; where no other can be had, they won't
                self.feed.give_up()
                self._lose(reason)
            if (link, reason) != before:  # of hundreds that are away, each attempt would have all looked at
                on_change()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _follow(self, on_change: Callable[[], None], silence_s: float) -> None:
        """Apply one Watch stream's messages until it ends or is found wanting."""
        self.view.start_over()
        call = self._watcher.Watch(WatchRequest())
        try:
            while True:
                async with asyncio.timeout(silence_s):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return
                before = self.view.incarnation
                self.view.apply(message)  # type: ignore[arg-type]
                if before and before != self.view.incarnation:
                    self.feed.give_up()
                    self._lose("another process has taken its place")
                elif self.view.is_stalled:
                    self._lose(_STALLED)
                self._set_link(WorkerState.READY, "")
                if self.view.has_subscriptions:
                    self.feed.open()
                on_change()
        finally:
            call.cancel()

    def _set_link(self, link: WorkerState, reason: str) -> None:
        if link is not self._link:
            event = "worker_connected" if link is WorkerState.READY else "worker_lost"
            log(event, role=self.role.value, address=self.address, state=link.value, reason=reason)
        self._link, self._link_reason = link, reason

    def _lose(self, reason: str) -> None:
        """Tell whoever relies on it, once each: those that have had all they need from it go on."""
        relying, self._relying = self._relying, set()
        if relying:
            log("worker_given_up", level="warning", address=self.address, reason=reason, requests=len(relying))
        for on_lost in relying:
            on_lost(UnavailableError(f"{self.role.value} worker {self.address} is lost: {reason}", reason=LOST))

    async def close(self) -> None:
        await self.feed.close()
        await self._channel.close()
