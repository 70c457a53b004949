"""What befalls processes and links in a chaos run, and how each is set right again."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable

import pushes
from links import TcpLink
from services import Deployment, Service

from chaos.script import Fault, process_of
from chaos.trouble import Trouble

READY_S = 120.0
STOP_S = 60.0
DELAY_S = 0.04  # each way
_MAX_FRAME = 6  # a fault befalls one of the first frames of a push
_SINGLE = (pushes.drop, pushes.duplicate, pushes.flip, pushes.truncate, pushes.break_off)
_WHOLE = (pushes.reorder, pushes.commit_first, pushes.commit_twice)


class Faults:
    """Does what a script says to a deployment; `trouble` knows from when to when."""

    def __init__(self, deployment: Deployment, trouble: Trouble, complain: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._deployment = deployment
        self._trouble = trouble
        self._complain = complain

    async def befall(self, fault: Fault) -> None:
        """From its beginning until all is well again, which it is whatever happens.

        Nothing happens to what is not well yet, as it may be on a machine that starts processes slowly.
        """
        who = process_of(fault.who)
        if self._trouble.is_in(who):
            self.counts["skipped"] += 1
            return
        self.counts[fault.kind] += 1
        service = self._service(fault.who)
        spell = self._trouble.begin(who)
        try:
            match fault.kind:
                case "kill" | "drain":
                    await self._end(fault, service)
                case "pause" | "freeze":
                    await _pause(service, fault.for_s)
                case "garble":
                    await _garble(self._deployment.pushes[service.name].faults, fault)
                case _:
                    links = self._deployment.pages if fault.who.startswith("pages") else self._deployment.calls
                    await _break(links[service.name], fault)
        except AssertionError as error:
            self._complain(f"{fault}: {error}")
        finally:
            self._trouble.end(spell)

    def _service(self, who: str) -> Service:
        role = who.rstrip("0123456789")
        groups = {"router": self._deployment.routers, "prefill": self._deployment.prefill}
        return groups.get(role, self._deployment.decode)[int(who.removeprefix(role))]

    async def _end(self, fault: Fault, service: Service) -> None:
        if fault.kind == "kill":
            await asyncio.to_thread(service.kill)
        else:
            status = await asyncio.to_thread(service.terminate, STOP_S)
            if status:
                self._complain(f"{fault}: it ended with {status}:\n{service.output[-2000:]}")
        await asyncio.sleep(fault.for_s)
        service.start()
        await asyncio.to_thread(service.wait_ready, READY_S)


async def _pause(service: Service, for_s: float) -> None:
    service.pause()
    try:
        await asyncio.sleep(for_s)
    finally:
        service.resume()


async def _break(link: TcpLink, fault: Fault) -> None:
    match fault.kind:
        case "cut":
            await asyncio.to_thread(link.cut)
        case "black_hole":
            link.black_hole()
        case "delay":
            link.delay_s = DELAY_S
    try:
        await asyncio.sleep(fault.for_s)
    finally:
        await asyncio.to_thread(link.heal)


async def _garble(faults: deque[pushes.Fault], fault: Fault) -> None:
    """Each of the next pushes is spoilt in some way, always the same for a fault of a script."""
    draws = random.Random(f"{fault.who} {fault.for_s}")
    for _ in range(draws.randrange(2, 9)):
        change = draws.choice((*_SINGLE, *_WHOLE))
        faults.append(change(draws.randrange(_MAX_FRAME)) if change in _SINGLE else change)
    try:
        await asyncio.sleep(fault.for_s)
    finally:
        faults.clear()
