"""The workers that the router watches: which are there, how loaded they are, and which fit together."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING

import grpc

from pageferry.core.errors import FailedPreconditionError, InvalidArgumentError
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

SILENCE_S = 3.0  # without a message (one comes every half second) after which a worker is not trusted any more
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


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

    def __init__(self, role: Role, address: str, channel: grpc.aio.Channel, model: str) -> None:
        self.role = role
        self.address = address
        self.view = WorkerView()
        self.misfit = ""  # why it can't work with any worker of the other role; set by the fleet
        self.prefill: PrefillServiceAsyncStub = PrefillServiceStub(channel)
        self.decode: DecodeServiceAsyncStub = DecodeServiceStub(channel)
        self._watcher: WorkerServiceAsyncStub = WorkerServiceStub(channel)
        self._channel = channel
        self._model = model
        self._link = WorkerState.WARMING  # READY while the stream is good
        self._link_reason = "not reached yet"

    @property
    def state(self) -> WorkerState:
        if self._link is not WorkerState.READY:
            return self._link
        if self.misfit:
            return WorkerState.REFUSED
        return WorkerState.DRAINING if self.view.draining else WorkerState.READY

    @property
    def reason(self) -> str:
        """Why it is not ready."""
        if self._link is not WorkerState.READY:
            return self._link_reason
        return self.misfit or ("it takes no more work" if self.view.draining else "")

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

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
                reason = from_rpc_error(error).message
            if self._link is WorkerState.READY:
                pause_s = _FIRST_PAUSE_S
            self._set_link(link, reason)
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
                self.view.apply(message)  # type: ignore[arg-type]
                self._set_link(WorkerState.READY, "")
                on_change()
        finally:
            call.cancel()

    def _set_link(self, link: WorkerState, reason: str) -> None:
        if link is not self._link:
            event = "worker_connected" if link is WorkerState.READY else "worker_lost"
            log(event, role=self.role.value, address=self.address, state=link.value, reason=reason)
        self._link, self._link_reason = link, reason

    async def close(self) -> None:
        await self._channel.close()


class Fleet:
    """All configured workers. `listeners` are called after every change that was heard of."""

    def __init__(
        self,
        prefill: Iterable[str],
        decode: Iterable[str],
        open_channel: Callable[[str], grpc.aio.Channel],
        *,
        model: str,
        silence_s: float = SILENCE_S,
    ) -> None:
        addresses = [*((Role.PREFILL, address) for address in prefill), *((Role.DECODE, address) for address in decode)]
        self.workers = [Worker(role, address, open_channel(address), model) for role, address in addresses]
        self.listeners: list[Callable[[], None]] = []
        self._silence_s = silence_s
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(worker.watch(self._changed, self._silence_s), name=f"watch {worker.address}")
            for worker in self.workers
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        for worker in self.workers:
            await worker.close()

    def of(self, role: Role) -> list[Worker]:
        return [worker for worker in self.workers if worker.role is role]

    def ready(self, role: Role) -> list[Worker]:
        """The workers of a role that may be used."""
        return [worker for worker in self.of(role) if worker.is_ready]

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served: a decode worker is ready, and no prefill worker is yet to be seen first.

        A decode worker alone can serve, so a fleet stays ready when its prefill workers die.
        """
        warming = any(worker.state is WorkerState.WARMING for worker in self.of(Role.PREFILL))
        return bool(self.ready(Role.DECODE)) and (bool(self.ready(Role.PREFILL)) or not warming)

    def why_hopeless(self) -> str:
        """Why no decode worker can serve, nor is about to be able to; empty where one can or is."""
        hopeful = (WorkerState.READY, WorkerState.STALE)
        decodes = self.of(Role.DECODE)
        if any(worker.state in hopeful for worker in decodes):
            return ""
        states = "; ".join(f"{worker.address} is {worker.state.value} ({worker.reason})" for worker in decodes)
        return f"no decode worker is ready: {states or 'none is configured'}"

    def _changed(self) -> None:
        refuse_misfits(self.workers)
        for listener in self.listeners:
            listener()


def refuse_misfits(workers: Sequence[Worker]) -> None:
    """Set `misfit` of each worker that is connected, by itself and by the page layouts of the other role's workers.

    A worker fits if a connected one of the other role has an equal layout; where none is connected, it fits too.
    """
    for worker in workers:
        worker.misfit = worker.own_misfit()
    connected = [worker for worker in workers if worker.state in (WorkerState.READY, WorkerState.DRAINING)]
    problems = {worker: _layout_problem(worker, connected) for worker in connected}
    for worker, problem in problems.items():
        if problem and not worker.misfit:
            worker.misfit = problem


def _layout_problem(worker: Worker, connected: Sequence[Worker]) -> str:
    others = [other for other in connected if other.role is not worker.role]
    ours = worker.view.layout
    if ours is None or not others or any(other.view.layout == ours for other in others):
        return ""
    theirs = others[0].view.layout
    assert theirs is not None, "a connected worker has a snapshot"
    try:
        ours.check_equal(
            theirs,
            ours=f"{worker.role.value} {worker.address}",
            theirs=f"{others[0].role.value} {others[0].address}",
        )
    except FailedPreconditionError as error:
        return error.message
    return ""
