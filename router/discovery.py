"""One name in the configuration, and the addresses behind it: each is a worker, or was one."""

import asyncio
from collections.abc import Callable

from pageferry.core.addresses import ServiceName, host_port
from pageferry.router.workers import Role, WorkerState
from pageferry.runtime.logs import log
from pageferry.runtime.names import Resolve
from pageferry.v1.inference_pb2 import WorkerStatus

_NOT_YET = "it was not looked up yet"
_NO_ADDRESS = "it has no address"


class Discovery:
    """What lookups of a name have said: a failing one leaves the addresses as they were."""

    def __init__(self, role: Role, text: str, name: ServiceName, resolve: Resolve) -> None:
        """`text` is the name as it is configured."""
        self.role = role
        self.text = text
        self.host = name.host.rstrip(".")  # as certificates have it
        self.addresses: frozenset[str] = frozenset()  # host:port each
        self.problem = _NOT_YET  # with the last lookup; empty: none
        self.was_met = False  # a worker was seen behind it
        self._name = name
        self._resolve = resolve

    async def follow(self, on_lookup: Callable[[], None], interval_s: float) -> None:
        """Look it up for ever; `on_lookup` is called after each time."""
        while True:
            try:
                await self._look_up()
                on_lookup()
            except Exception as error:  # else workers would come and go unnoticed from then on
                log("discovery_failed", level="error", name=self.text, error=error)
            await asyncio.sleep(interval_s)

    async def _look_up(self) -> None:
        before = (self.problem, self.addresses)
        try:
            hosts = await self._resolve(self._name.host)
            self.addresses = frozenset(host_port(host, self._name.port) for host in hosts)
            self.problem = "" if hosts else _NO_ADDRESS
        except OSError as error:
            self.problem = f"its lookup fails: {error.strerror or error}"
        if (self.problem, self.addresses) != before:
            level = "warning" if self.problem else "info"
            addresses = sorted(self.addresses)
            log("name_looked_up", level=level, name=self.text, addresses=addresses, problem=self.problem)

    def status(self, num_workers: int) -> WorkerStatus | None:
        """In place of workers that are not there; None where nothing is wrong."""
        if not self.problem:
            return None
        state = WorkerState.STALE if num_workers else WorkerState.DOWN if self.was_met else WorkerState.WARMING
        return WorkerStatus(role=self.role.value, address=self.text, state=state.value, reason=self.problem)
