"""The workers that the router watches: which are there, which may be used, and which fit together."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import grpc

from pageferry.core.addresses import parse_worker
from pageferry.router.discovery import Discovery
from pageferry.router.fits import Fits
from pageferry.router.workers import Role, Worker, WorkerState
from pageferry.runtime.logs import log
from pageferry.runtime.names import Resolve, system_resolver
from pageferry.v1.inference_pb2 import WorkerStatus

# Of an address, and the name that its certificate must have; empty: the address's host.
OpenChannel = Callable[[str, str], grpc.aio.Channel]
SILENCE_S = 3.0  # without a message (one comes every half second) after which a worker is not trusted any more


class Fleet:
    """All configured workers, and those behind configured names. `listeners` are called after every change heard of."""

    def __init__(
        self,
        prefill: Iterable[str],
        decode: Iterable[str],
        open_channel: OpenChannel,
        *,
        model: str,
        silence_s: float = SILENCE_S,
        discovery_s: float = 2.0,
        resolve: Resolve | None = None,
    ) -> None:
        """`prefill` and `decode` have host:port, or dns:///name:port, which is looked up every `discovery_s`."""
        self.workers: list[Worker] = []
        self._prefills: list[Worker] = []
        self._decodes: list[Worker] = []
        self.listeners: list[Callable[[], None]] = []
        self._open_channel = open_channel
        self._model = model
        self._silence_s = silence_s
        self._discovery_s = discovery_s
        self._names: list[Discovery] = []
        self._fits = Fits()
        self._tasks: dict[Worker | Discovery, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._is_started = False
        for role, text in (*((Role.PREFILL, text) for text in prefill), *((Role.DECODE, text) for text in decode)):
            name = parse_worker(role.value, text)
            if name is None:
                self._add(role, text)
            else:
                resolve = resolve or system_resolver()
                self._names.append(Discovery(role, text, name, resolve))

    def start(self) -> None:
        self._is_started = True
        for worker in self.workers:
            self._watch(worker)
        for name in self._names:
            follow = name.follow(partial(self._on_lookup, name), self._discovery_s)
            self._tasks[name] = asyncio.create_task(follow, name=f"discover {name.text}")

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        for task in self._tasks.values():
            with suppress(asyncio.CancelledError):
                await task
        for worker in self.workers:
            await worker.close()
        await asyncio.gather(*self._leaving)

    def of(self, role: Role) -> list[Worker]:
        """Not to be changed."""
        return self._prefills if role is Role.PREFILL else self._decodes

    def ready(self, role: Role) -> list[Worker]:
        """The workers of a role that may be used."""
        return [worker for worker in self.of(role) if worker.is_ready]

    @property
    def is_ready(self) -> bool:
        """Whether requests can be served: a decode worker is ready, and a prefill worker is, or all of those have died.

        A decode worker alone can serve, so a fleet stays ready when its prefill workers die. It is not where one is yet
        to be seen first, or one was refused: that is a mistake of who has set it up, and shall show. Of those behind a
        name any is enough to have been seen.
        """
        has_decode, has_prefill = (
            any(worker.is_ready for worker in self.of(role)) for role in (Role.DECODE, Role.PREFILL)
        )
        if not has_decode or has_prefill:
            return has_decode
        states = [(worker.state, worker.name) for worker in self.of(Role.PREFILL)]
        is_one_unseen = any(state is WorkerState.WARMING and not name for state, name in states)
        is_one_refused = any(state is WorkerState.REFUSED for state, _ in states)
        are_all_met = all(name.was_met for name in self._names if name.role is Role.PREFILL)
        return are_all_met and not is_one_unseen and not is_one_refused

    def why_hopeless(self) -> str:
        """Why no decode worker can serve, nor is about to be able to; empty where one can or is."""
        if any(worker.is_hopeful for worker in self.of(Role.DECODE)):
            return ""
        decodes = [status for status in self.status() if status.role == Role.DECODE.value]
        states = "; ".join(f"{status.address} is {status.state} ({status.reason})" for status in decodes)
        return f"no decode worker is ready: {states or 'none is configured'}"

    def status(self) -> list[WorkerStatus]:
        """Of each worker, and of each name with which something is wrong, as if it were one."""
        names = (name.status(len(self._behind(name))) for name in self._names)
        return [*(worker.status() for worker in self.workers), *(status for status in names if status is not None)]

    def _behind(self, name: Discovery) -> list[Worker]:
        return [worker for worker in self.of(name.role) if worker.name == name.text]

    def _on_lookup(self, name: Discovery) -> None:
        """Workers that are new begin; one that has gone ends once others have taken its place, or it is lost."""
        known = self._behind(name)
        for address in sorted(name.addresses - {worker.address for worker in known}):
            self._add(name.role, address, name)
        is_replaced = any(worker.is_ready for worker in known if worker.address in name.addresses)
        for worker in known:
            has_gone = worker.address not in name.addresses
            worker.farewell = f"{name.text} leads there no more" if has_gone and is_replaced else ""
            if has_gone and not worker.num_granted and (is_replaced or not worker.is_alive):
                self._remove(worker)
        self._changed()

    def _add(self, role: Role, address: str, name: Discovery | None = None) -> None:
        channel = self._open_channel(address, name.host if name is not None else "")
        worker = Worker(role, address, channel, self._model, name.text if name is not None else "")
        self.workers.append(worker)
        self.of(role).append(worker)
        self._fits.add(worker)
        if self._is_started:
            log("worker_added", role=role.value, address=address)
            self._watch(worker)

    def _watch(self, worker: Worker) -> None:
        watch = worker.watch(partial(self._look, worker), self._silence_s)
        self._tasks[worker] = asyncio.create_task(watch, name=f"watch {worker.address}")

    def _remove(self, worker: Worker) -> None:
        """Of which nobody has any use."""
        log("worker_removed", role=worker.role.value, address=worker.address, state=worker.state.value)
        self.workers.remove(worker)
        self.of(worker.role).remove(worker)
        watch = self._tasks.pop(worker)
        watch.cancel()  # now: what it has told and nobody has read yet would be looked at
        _log_refused(self._fits.remove(worker))
        leaving = asyncio.create_task(_end(worker, watch), name=f"leave {worker.address}")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    def _look(self, worker: Worker) -> None:
        """Of one that has told something, or is lost. Most often it is its load, which is nothing to the others."""
        _log_refused(self._fits.look(worker))
        if worker.name and worker.is_alive:
            for name in self._names:
                name.was_met = name.was_met or (name.text, name.role) == (worker.name, worker.role)
        self._changed()

    def _changed(self) -> None:
        for listener in self.listeners:
            listener()


def _log_refused(workers: Iterable[Worker]) -> None:
    for worker in workers:
        role, address = worker.role.value, worker.address
        log("worker_refused", level="warning", role=role, address=address, reason=worker.misfit)


async def _end(worker: Worker, watch: "asyncio.Task[None]") -> None:
    """Once it is watched no more."""
    with suppress(asyncio.CancelledError):
        await watch
    await worker.close()
