"""Late dispatch: requests wait in the router's queue until the policy says that workers can take them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pageferry.core.errors import DeadlineExceededError, PageferryError, UnavailableError
from pageferry.core.prefix import page_hashes
from pageferry.router.fleet import Fleet
from pageferry.router.policy import DecodeState, Demand, PrefillState, Route, Settings, choose
from pageferry.router.queue import Queued, RequestQueue
from pageferry.router.view import Dispatched
from pageferry.router.workers import Role, Worker

RETRY_AFTER_MS = 1000  # once no worker is there


@dataclass(slots=True, eq=False)
class Grant:
    """Leave to send a request to the route's workers; counted against them until `release`.

    The choice took from `began` to `ended`; the request had waited since its `Ask.enqueued`. Times are the
    dispatcher's clock's.
    """

    route: Route
    prefill: Worker | None
    decode: Worker | None
    began: float
    ended: float
    prefill_work: Dispatched | None = None
    decode_work: Dispatched | None = None

    def release(self) -> None:
        """The work is over, or was never begun; idempotent."""
        for worker, work in ((self.prefill, self.prefill_work), (self.decode, self.decode_work)):
            if worker is not None and work is not None:
                worker.view.forget(work)


@dataclass(slots=True, eq=False)
class Ask(Queued):
    """A request as far as choosing workers goes; changed between tries by its owner."""

    token_ids: list[int]  # prompt, then what was generated before a retry
    demand: Demand
    cache_salt: str = ""
    excluded: dict[str, bytes] = field(default_factory=dict)  # incarnations that failed it, by the worker's address
    fingerprint: str = ""  # of the model that began the answer; empty: any will do
    hashes: dict[bytes, list[bytes]] = field(default_factory=dict)  # by layout, as far as computed
    granted: "asyncio.Future[Grant]" = field(init=False)  # once it is in the queue
    enqueued: float = 0.0

    def has_model_of(self, worker: Worker) -> bool:
        """Whether the worker's model is the one that began the answer, if one did."""
        return self.fingerprint in ("", worker.view.identity.fingerprint)

    def may_use(self, worker: Worker) -> bool:
        """Whether the worker could go on with it, and has not failed it since it was started."""
        return self.has_model_of(worker) and self.excluded.get(worker.address) != worker.view.incarnation

    def cached_tokens(self, worker: Worker) -> int:
        """How many of its tokens the worker has in its cache and would not compute, or be sent, again."""
        layout = worker.view.layout
        assert layout is not None, "a ready worker has a layout"
        key = layout.cache_key()
        hashes = self.hashes.get(key, [])
        if len(hashes) < len(self.token_ids) // layout.page_size:
            hashes = page_hashes(self.token_ids, layout.page_size, salt=self.cache_salt, layout_key=key, known=hashes)
            self.hashes[key] = hashes
        whole_pages = (len(self.token_ids) - 1) // layout.page_size * layout.page_size
        return min(worker.view.cached_tokens(hashes), whole_pages)


class Dispatcher:
    """Owns the queue. It looks at the queue again after each change, and never otherwise."""

    def __init__(
        self, fleet: Fleet, settings: Settings, *, max_queue: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._queue: RequestQueue[Ask] = RequestQueue(max_queue)
        self._clock = clock
        fleet.listeners.append(self.pump)

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def enqueue(self, ask: Ask) -> None:
        """The caller owes `abandon`.

        Raises UnavailableError where no worker could ever take it, ResourceExhaustedError where the queue is full.
        """
        hopeless = self._why_hopeless(ask)
        if hopeless is not None:
            raise hopeless
        self._queue.add(ask)
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
            grant = self._grant(ask)
            if grant is None:
                return
            self._queue.remove(ask)
            if ask.granted.done():  # its owner has gone
                grant.release()
            else:
                ask.granted.set_result(grant)

    def _begin(self, ask: Ask) -> None:
        ask.granted = asyncio.get_running_loop().create_future()
        ask.enqueued = self._clock()
        self.pump()

    def _why_hopeless(self, ask: Ask) -> UnavailableError | None:
        demand = ask.demand
        if demand.num_left == 1 and not demand.local_only and self._prefills(ask):
            return None
        reason = self._fleet.why_hopeless()
        if not reason and not self._hopeful_decodes(ask):
            reason = "no decode worker has the model that the answer began with"
        return UnavailableError(reason, reason="NO_WORKER", retry_after_ms=RETRY_AFTER_MS) if reason else None

    def _late(self, ask: Ask) -> DeadlineExceededError:
        waited_ms = (self._clock() - ask.enqueued) * 1000
        message = f"the deadline passed after {waited_ms:.0f} ms in the router's queue"
        return DeadlineExceededError(message, reason="DEADLINE_IN_QUEUE")

    def _prefills(self, ask: Ask) -> list[Worker]:
        return [worker for worker in self._fleet.ready(Role.PREFILL) if ask.may_use(worker)]

    def _hopeful_decodes(self, ask: Ask) -> list[Worker]:
        """One that failed the request is among them only where there is no other: its fault may have passed."""
        able = [worker for worker in self._fleet.of(Role.DECODE) if worker.is_hopeful and ask.has_model_of(worker)]
        return [worker for worker in able if ask.may_use(worker)] or able

    def _grant(self, ask: Ask) -> Grant | None:
        prefills = self._prefills(ask)
        decodes = [worker for worker in self._hopeful_decodes(ask) if worker.is_ready and not worker.view.refusing]
        began = self._clock()
        route = choose(
            ask.demand,
            [prefill_state(worker, ask.cached_tokens(worker)) for worker in prefills],
            [decode_state(worker, ask.cached_tokens(worker)) for worker in decodes],
            self._settings,
        )
        if route is None:
            return None
        by_address = {worker.address: worker for worker in (*prefills, *decodes)}
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


def prefill_state(worker: Worker, cached_tokens: int) -> PrefillState:
    """The worker as the policy sees it: its last report and what was sent since. One that refuses seems full."""
    view = worker.view
    assert view.layout is not None and view.snapshot is not None, "a ready worker has been seen"
    return PrefillState(
        address=worker.address,
        layout=view.layout,
        num_waiting=view.load.waiting + len(view.uncounted),
        queued_tokens=view.load.queued_prompt_tokens + sum(work.num_tokens for work in view.uncounted),
        tokens_per_s=view.load.prefill_tokens_per_s,
        chunk_tokens=view.snapshot.chunk_tokens,
        cached_tokens=cached_tokens,
        num_running=view.load.running,
        refuses=view.refusing,
    )


def decode_state(worker: Worker, cached_tokens: int) -> DecodeState:
    view, load = worker.view, worker.view.load
    assert view.layout is not None and view.snapshot is not None, "a ready worker has been seen"
    return DecodeState(
        address=worker.address,
        layout=view.layout,
        num_active=load.running + load.waiting + load.tickets + len(view.uncounted),
        max_num_seqs=view.snapshot.max_num_seqs,
        available_pages=view.available_pages,
        chunk_tokens=view.snapshot.chunk_tokens,
        queued_tokens=load.queued_prompt_tokens + sum(work.num_tokens for work in view.uncounted),
        tokens_per_s=load.prefill_tokens_per_s,
        cached_tokens=cached_tokens,
    )


def capacity_tokens(workers: Sequence[Worker]) -> int | None:
    """Tokens that the pools of the largest of the workers hold; None without a worker."""
    return max((worker.view.capacity_tokens() for worker in workers), default=None)
