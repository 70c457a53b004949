"""Late dispatch: requests wait in the router's queue until the policy says that workers can take them."""

import asyncio
import time
from collections.abc import Callable, Sequence

from pageferry.core.errors import DeadlineExceededError, InternalError, PageferryError, UnavailableError
from pageferry.router.ask import Ask, Grant
from pageferry.router.candidates import DecodeState, PrefillState
from pageferry.router.fleet import Fleet
from pageferry.router.forecast import forecast
from pageferry.router.policy import Settings, choose
from pageferry.router.queue import RequestQueue
from pageferry.router.states import capacity_tokens, decode_state, may_hold, prefill_state
from pageferry.router.workers import Role, Worker
from pageferry.runtime.logs import log

RETRY_AFTER_MS = 1000  # once no worker is there


class Dispatcher:
    """Owns the queue. It looks at the queue again after each change, and never otherwise."""

    def __init__(
        self,
        fleet: Fleet,
        settings: Settings,
        *,
        max_queue: int,
        ageing_tokens_per_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._ageing = ageing_tokens_per_s
        self._settings = settings
        self._queue: RequestQueue[Ask] = RequestQueue(max_queue)
        self._clock = clock
        fleet.listeners.append(self.pump)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def check_room(self) -> None:
        """As `enqueue` about a full queue, before any work is done."""
        self._queue.check_room()

    def enqueue(self, ask: Ask, *, is_let_in: bool = False) -> None:
        """The caller owes `abandon`. What `is_let_in` is part of a request that a full queue and a deadline allowed.

        Raises UnavailableError where no worker could ever take it, ResourceExhaustedError where the queue is full or
        its first token can't be expected before its deadline.
        """
        hopeless = self._why_hopeless(ask)
        if hopeless is not None:
            raise hopeless
        ready = [worker for role in Role for worker in self._fleet.ready(role)]
        uncached = ask.demand.num_tokens - max(map(ask.cached_tokens, ready), default=0)
        ask.rank = uncached + self._ageing * self._clock()  # all gain at one rate: an order never changes
        if not is_let_in:
            self._check_deadline(ask)
        self._queue.add(ask, is_let_in=is_let_in)
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
        """Send off the first of the queue for as long as workers can take it."""
        for late in self._queue.expire(self._clock()):
            _fail(late, self._late(late))
        while (ask := self._queue.first()) is not None:
            hopeless = self._why_hopeless(ask)
            if hopeless is not None:
                self._queue.remove(ask)
                _fail(ask, hopeless)
                continue
            try:
                grant = self._grant(ask)
            except Exception as error:  # it must not hold up all that wait behind it
                log("dispatch_failed", level="error", error=error)
                self._queue.remove(ask)
                _fail(ask, InternalError(f"internal error: {type(error).__name__}"))
                continue
            if grant is None:
                return
            self._queue.take(ask, self._clock())
            if ask.granted.done():  # its owner has gone
                grant.release()
            else:
                ask.granted.set_result(grant)

    def _begin(self, ask: Ask) -> None:
        ask.granted = asyncio.get_running_loop().create_future()
        ask.enqueued = self._clock()
        self.pump()
        self._queue.note_waiting(self._clock())

    def _why_hopeless(self, ask: Ask) -> UnavailableError | None:
        demand = ask.demand
        may_prefill_alone = demand.num_left == 1 and not demand.local_only
        if may_prefill_alone and (capacity_tokens(self._prefills(ask)) or 0) >= demand.num_tokens:
            return None
        reason = self._fleet.why_hopeless() or self._why_no_decode(ask)
        return UnavailableError(reason, reason="NO_WORKER", retry_after_ms=RETRY_AFTER_MS) if reason else None

    def _why_no_decode(self, ask: Ask) -> str:
        """Why no decode worker that is there will do, as where the largest has gone since the request was admitted.

        It would otherwise wait at the head of the queue for good, and all others behind it.
        """
        if not (able := self._able_decodes(ask)):
            return "no decode worker has the model that the answer began with"
        if any(may_hold(worker, ask.demand.num_stored) for worker in able):
            return ""
        most = f"the largest decode worker's pages hold {capacity_tokens(able)} tokens"
        return f"{most}, the request needs {ask.demand.num_stored}"

    def _check_deadline(self, ask: Ask) -> None:
        if ask.deadline is None:
            return
        states = self._states(ask, self._decodes(ask))
        expected = forecast(ask.demand, *states, self._queue.num_before(ask), self._queue.pace.gap_s)
        expected.check(ask.deadline - self._clock())

    def _late(self, ask: Ask) -> DeadlineExceededError:
        waited_ms = (self._clock() - ask.enqueued) * 1000
        message = f"the deadline passed after {waited_ms:.0f} ms in the router's queue"
        return DeadlineExceededError(message, reason="DEADLINE_IN_QUEUE")

    def _prefills(self, ask: Ask) -> list[Worker]:
        return [worker for worker in self._fleet.ready(Role.PREFILL) if ask.may_use(worker)]

    def _able_decodes(self, ask: Ask) -> list[Worker]:
        return [worker for worker in self._fleet.of(Role.DECODE) if worker.is_hopeful and ask.has_model_of(worker)]

    def _decodes(self, ask: Ask) -> list[Worker]:
        able = [worker for worker in self._able_decodes(ask) if worker.is_ready]
        return [worker for worker in able if may_hold(worker, ask.demand.num_stored)]

    def _states(self, ask: Ask, decodes: Sequence[Worker]) -> tuple[list[PrefillState], list[DecodeState]]:
        prefills = [prefill_state(worker, ask.cached_tokens(worker)) for worker in self._prefills(ask)]
        return prefills, [decode_state(worker, ask.cached_tokens(worker)) for worker in decodes]

    def _grant(self, ask: Ask) -> Grant | None:
        began = self._clock()
        decodes = [worker for worker in self._decodes(ask) if not worker.view.refusing]
        others = [worker for worker in decodes if ask.may_use(worker)]
        route = choose(ask.demand, *self._states(ask, others), self._settings)
        if route is None and len(others) < len(decodes):
            # One that failed it is there all the same, so that its fault may have passed. Waiting here for another one
            # would hold up all that wait behind.
            route = choose(ask.demand, *self._states(ask, decodes), self._settings)
        if route is None:
            return None
        by_address = {worker.address: worker for worker in self._fleet.workers}
        grant = Grant(
            route,
            by_address[route.prefill] if route.prefill else None,
            by_address[route.decode] if route.decode else None,
            began=began,
            ended=self._clock(),
        )
        num_tokens = ask.demand.num_tokens
        if grant.prefill is not None:
            grant.prefill_work = grant.prefill.view.dispatch(num_tokens - ask.cached_tokens(grant.prefill))
        if grant.decode is not None:
            state = decode_state(grant.decode, ask.cached_tokens(grant.decode))
            num_pages = state.needed_pages(ask.demand, self._settings.headroom_pages)
            uncached = num_tokens - state.cached_tokens
            grant.decode_work = grant.decode.view.dispatch(uncached if grant.prefill is None else 0, num_pages)
        return grant


def _fail(ask: Ask, error: PageferryError) -> None:
    if not ask.granted.done():
        ask.granted.set_exception(error)
