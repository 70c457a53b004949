"""The workers that the router watches: which are there, which may be used, and which fit together."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import grpc

from pageferry.core.errors import FailedPreconditionError
from pageferry.router.workers import Role, Worker, WorkerState
from pageferry.runtime.logs import log

SILENCE_S = 3.0  # without a message (one comes every half second) after which a worker is not trusted any more


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
        """Whether requests can be served: a decode worker is ready, and a prefill worker is, or all of those have died.

        A decode worker alone can serve, so a fleet stays ready when its prefill workers die. It is not where one is yet
        to be seen first, or one was refused: that is a mistake of who has set it up, and shall show.
        """
        unready = (WorkerState.WARMING, WorkerState.REFUSED)
        hindered = any(worker.state in unready for worker in self.of(Role.PREFILL))
        return bool(self.ready(Role.DECODE)) and (bool(self.ready(Role.PREFILL)) or not hindered)

    def why_hopeless(self) -> str:
        """Why no decode worker can serve, nor is about to be able to; empty where one can or is."""
        decodes = self.of(Role.DECODE)
        if any(worker.is_hopeful for worker in decodes):
            return ""
        states = "; ".join(f"{worker.address} is {worker.state.value} ({worker.reason})" for worker in decodes)
        return f"no decode worker is ready: {states or 'none is configured'}"

    def _changed(self) -> None:
        before = [worker.misfit for worker in self.workers]
        refuse_misfits(self.workers)
        for worker, misfit in zip(self.workers, before, strict=True):
            if worker.misfit and worker.misfit != misfit:
                role, address = worker.role.value, worker.address
                log("worker_refused", level="warning", role=role, address=address, reason=worker.misfit)
        for listener in self.listeners:
            listener()


def refuse_misfits(workers: Sequence[Worker]) -> None:
    """Set `misfit` of each worker that is connected, by itself and by the page layouts of the other role's workers.

    A worker fits if pages can be shipped between it and a connected one of the other role; where none is connected, it
    fits too.
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
    if ours is None or not others or any(_fits(worker, other) for other in others):
        return ""
    theirs = others[0].view.layout
    assert theirs is not None, "a connected worker has a snapshot"
    try:
        ours.check_equal(
            theirs, ours=f"{worker.role.value} {worker.address}", theirs=f"{others[0].role.value} {others[0].address}"
        )
    except FailedPreconditionError as error:
        return error.message
    return ""


def _fits(one: Worker, other: Worker) -> bool:
    """Whether the one that is a prefill worker can fill the pages of the one that is a decode worker."""
    sender, receiver = (one, other) if one.role is Role.PREFILL else (other, one)
    if sender.view.layout is None or receiver.view.layout is None:
        return False
    return sender.view.layout.ships_to(receiver.view.layout)
