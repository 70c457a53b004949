"""Late dispatch: requests wait in the router's queue until the policy says that workers can take them.

They go in the queue's order. One that waits for decode workers leaves those behind it the others, of which there are
some where a profile wants page formats, or a request is large; one that waits for a prefill worker lets nobody pass.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection

from pageferry.core.config import Config
from pageferry.core.errors import DeadlineExceededError, InternalError, PageferryError
from pageferry.router.able import AbleWorkers
from pageferry.router.ask import Ask, Grant
from pageferry.router.candidates import DecodeState
from pageferry.router.fleet import Fleet
from pageferry.router.forecast import forecast
from pageferry.router.lanes import Lanes
from pageferry.router.policy import Settings, by_load, choose
from pageferry.router.profiles import Profiles
from pageferry.router.queue import RequestQueue
from pageferry.router.states import decode_state, decode_states, num_active, num_slots
from pageferry.router.workers import Role, Worker
from pageferry.runtime.logs import log
from pageferry.v1.inference_pb2 import ProfileStatus


class Dispatcher:
    """Owns the queue. It looks at the queue again after each change, and never otherwise."""

    def __init__(self, fleet: Fleet, profiles: Profiles, config: Config, clock: Callable[[], float]) -> None:
        router, scheduler = config.router, config.scheduler
        self._fleet = fleet
        self._ageing = scheduler.ageing_tokens_per_s
        self._settings = Settings(router.local_prefill_tokens, scheduler.headroom_pages, router.local_advantage)
        self._queue: RequestQueue[Ask] = RequestQueue(router.max_queue)
        self._clock = clock
        self._profiles = profiles
        self._able = AbleWorkers(fleet)
        self._lanes = Lanes(self._profiles, self.pump)
        fleet.listeners.append(self.pump)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def profile_status(self) -> list[ProfileStatus]:
        """Of each profile that can be asked for."""
        queued = Counter(ask.profile.name for ask in self._queue.waiting())
        return [
            ProfileStatus(name=name, in_effect=profile.name, queued=queued[name], running=self._lanes.num_running(name))
            for name, profile in self._profiles.in_effect().items()
        ]

    def preferred(self, ask: Ask) -> list[tuple[DecodeState, float]]:
        """The decode workers that have room for it now, the best first, with their scores, whoever else waits."""
        decodes = [worker for worker in self._able.decodes(ask) if not worker.view.refusing and ask.may_use(worker)]
        states = by_load(ask.demand, decode_states(ask, decodes), self._settings)
        return [(state, state.load_score(ask.demand, self._settings.headroom_pages)) for state in states]

    def check_room(self) -> None:
        """As `enqueue` about a full queue, before any work is done."""
        self._queue.check_room()

    def enqueue(self, ask: Ask, *, is_let_in: bool = False) -> None:
        """The caller owes `abandon`. What `is_let_in` is part of a request that a full queue and a deadline allowed.

        Raises UnavailableError where no worker could ever take it, FailedPreconditionError where that is since none has
        pages in a format that its profile wants, ResourceExhaustedError where the queue is full or
        its first token can't be expected before its deadline.
        """
        hopeless = self._able.why_hopeless(ask)
        if hopeless is not None:
            raise hopeless
        ready = [worker for role in Role for worker in self._fleet.ready(role)]
        uncached = ask.demand.num_tokens - max(map(ask.cached_tokens, ready), default=0)
        ask.rank = uncached + self._ageing * self._clock()  # all gain at one rate: an order never changes
        if not is_let_in:
            self._check_deadline(ask)
        self._queue.add(ask, is_let_in=is_let_in)
        if not is_let_in:
            self._lanes.join(ask)
        self._begin(ask)

    def put_back(self, ask: Ask) -> None:
        """Let a request that was granted wait again, in its old place."""
        self._queue.put_back(ask)
        self._begin(ask)

    async def wait(self, ask: Ask) -> Grant:
        """Until the request may go.

        Raises DeadlineExceededError, or UnavailableError once no worker can take it any more.
        """
        left_s = None if ask.deadline is None else max(0.0, ask.deadline - self._clock())
        try:
            async with asyncio.timeout(left_s):
                return await ask.granted
        except TimeoutError:
            raise self._late(ask) from None

    def abandon(self, ask: Ask) -> None:
        """The request is over: it waits no more, and what was granted is given back; idempotent."""
        self._queue.remove(ask)
        self._lanes.leave(ask)
        granted = ask.granted
        if granted.cancel() or granted.cancelled() or granted.exception() is not None:
            return
        granted.result().release()
        self.pump()

    def fail(self, ask: Ask, error: PageferryError) -> None:
        """End a request's wait with an error, if it waits."""
        if self._queue.remove(ask):
            _fail(ask, error)

    def pump(self) -> None:
        """Send off those of the queue that workers can take, in its order."""
        for late in self._queue.expire(self._clock()):
            _fail(late, self._late(late))
        self._profiles.look(len(self._queue), lambda: _share(self._fleet.ready(Role.DECODE)))
        if not len(self._queue):  # each of hundreds of workers' reports comes here
            return
        decodes = self._fleet.ready(Role.DECODE)
        awaited: set[Worker] = set()  # decode workers that those before wait for
        for ask in self._queue.waiting():
            if self._lanes.holds(ask):
                continue
            try:
                if not self._send(ask, decodes, awaited):
                    return
            except PageferryError as error:
                self.fail(ask, error)
            except Exception as error:  # it must not hold up all that wait behind it
                log("dispatch_failed", level="error", error=error)
                self.fail(ask, InternalError(f"internal error: {type(error).__name__}"))
            if awaited and awaited.issuperset(decodes):
                return

    def _send(self, ask: Ask, decodes: Collection[Worker], awaited: set[Worker]) -> bool:
        """Send it off, or add those that it waits for to `awaited`; False where none behind it may go.

        Raises the PageferryError of one that waits in vain.
        """
        kept = awaited | self._lanes.reserved(ask, decodes)
        grant = self._grant(ask, kept)
        if grant is None:
            hopeless = self._able.why_hopeless(ask)
            if hopeless is not None:
                raise hopeless
            others = [worker for worker in self._able.decodes(ask) if worker not in kept]
            states = decode_states(ask, others)
            headroom = self._settings.headroom_pages
            awaited.update(others)
            rooms = [state.has_room(ask.demand, headroom) or state.may_make_room(ask.demand) for state in states]
            return bool(decodes) and not any(rooms)
        self._queue.take(ask, self._clock())
        if ask.granted.done():  # its owner has gone
            grant.release()
        else:
            ask.granted.set_result(grant)
        return True

    def _begin(self, ask: Ask) -> None:
        ask.granted = asyncio.get_running_loop().create_future()
        ask.enqueued = self._clock()
        self.pump()
        self._queue.note_waiting(self._clock())

    def _check_deadline(self, ask: Ask) -> None:
        if ask.deadline is None:
            return
        states = self._able.prefill_states(ask), decode_states(ask, self._able.decodes(ask))
        expected = forecast(ask.demand, *states, self._queue.num_before(ask), self._queue.pace.gap_s)
        expected.check(ask.deadline - self._clock())

    def _late(self, ask: Ask) -> DeadlineExceededError:
        waited_ms = (self._clock() - ask.enqueued) * 1000
        message = f"the deadline passed after {waited_ms:.0f} ms in the router's queue"
        return DeadlineExceededError(message, reason="DEADLINE_IN_QUEUE")

    def _grant(self, ask: Ask, kept: Collection[Worker]) -> Grant | None:
        """None where it had better wait. The decode workers in `kept` are for others."""
        began = self._clock()
        decodes = [worker for worker in self._able.decodes(ask) if not worker.view.refusing and worker not in kept]
        others = [worker for worker in decodes if ask.may_use(worker)]
        prefills = self._able.prefill_states(ask)
        route = choose(ask.demand, prefills, decode_states(ask, others), self._settings)
        if route is None and len(others) < len(decodes):
            # One that failed it is there all the same, so that its fault may have passed. Waiting here for another one
            # would hold up all that wait behind.
            route = choose(ask.demand, prefills, decode_states(ask, decodes), self._settings)
        if route is None:
            return None
        # An address may be there twice, but one of them is refused then.
        by_address = {worker.address: worker for worker in self._fleet.workers if worker.is_ready}
        grant = Grant(
            route,
            by_address[route.prefill] if route.prefill else None,
            by_address[route.decode] if route.decode else None,
            began=began,
            ended=self._clock(),
        )
        self._count(ask, grant)
        return grant

    def _count(self, ask: Ask, grant: Grant) -> None:
        """What the workers are sent, against them and the profile until the grant is released."""
        self._lanes.goes(ask, grant)
        num_tokens, priority = ask.demand.num_tokens, ask.demand.priority
        if grant.prefill is not None:
            uncached = num_tokens - ask.cached_tokens(grant.prefill)
            grant.prefill_work = grant.prefill.view.dispatch(uncached, priority=priority)
        if grant.decode is not None:
            state = decode_state(grant.decode, ask.cached_tokens(grant.decode))
            num_pages = state.needed_pages(ask.demand, self._settings.headroom_pages)
            uncached = num_tokens - state.cached_tokens
            uncached = uncached if grant.prefill is None else 0
            grant.decode_work = grant.decode.view.dispatch(uncached, num_pages, priority)


def _share(decodes: Collection[Worker]) -> float:
    """Of the workers' slots that are in use."""
    return sum(map(num_active, decodes)) / max(1, sum(map(num_slots, decodes)))


def _fail(ask: Ask, error: PageferryError) -> None:
    if not ask.granted.done():
        ask.granted.set_exception(error)
