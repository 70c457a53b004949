"""What a request asks of the workers while it waits, and the leave that it gets to go to some of them."""

import asyncio
from dataclasses import dataclass, field

from pageferry.core.prefix import page_hashes
from pageferry.router.candidates import Demand
from pageferry.router.policy import Route
from pageferry.router.profiles import DEFAULT, Chosen
from pageferry.router.queue import Queued
from pageferry.router.view import Dispatched
from pageferry.router.workers import Role, Worker


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
    lane: "set[Grant] | None" = None  # those of its profile that are under way
    workers: dict[Role, Worker] = field(init=False)  # those that are not None
    _counted: list[Worker] = field(init=False)

    def __post_init__(self) -> None:
        pair = ((Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        self.workers = {role: worker for role, worker in pair if worker is not None}
        self._counted = [*self.workers.values()]
        for worker in self._counted:
            worker.num_granted += 1

    @property
    def prefill_address(self) -> str:
        """Empty without such a worker."""
        return self.prefill.address if self.prefill is not None else ""

    @property
    def decode_address(self) -> str:
        """Empty without such a worker."""
        return self.decode.address if self.decode is not None else ""

    def release(self) -> None:
        """The work is over, or was never begun; idempotent."""
        while self._counted:
            self._counted.pop().num_granted -= 1
        if self.lane is not None:
            self.lane.discard(self)
        for worker, work in ((self.prefill, self.prefill_work), (self.decode, self.decode_work)):
            if worker is not None and work is not None:
                worker.view.forget(work)


@dataclass(slots=True, eq=False)
class Ask(Queued):
    """A request as far as choosing workers goes; changed between tries by its owner."""

    token_ids: list[int]  # prompt, then what was generated before a retry
    demand: Demand
    profile: Chosen = DEFAULT
    is_gathering: bool = False  # waits for others of its profile
    cache_salt: str = ""
    only: frozenset[str] | None = None  # addresses of the decode workers that it may go to; None: all
    excluded: dict[str, bytes] = field(default_factory=dict)  # incarnations that failed it, by the worker's address
    fingerprint: str = ""  # of the model that began the answer; empty: any will do
    hashes: dict[bytes, list[bytes]] = field(default_factory=dict)  # by layout, as far as computed
    granted: "asyncio.Future[Grant]" = field(init=False)  # once it is in the queue
    enqueued: float = 0.0

    def has_model_of(self, worker: Worker) -> bool:
        """Whether the worker's model is the one that began the answer, if one did."""
        return not self.fingerprint or self.fingerprint == worker.view.identity.fingerprint

    def may_go_to(self, worker: Worker) -> bool:
        """Whether the decode worker is one of those that it is held to."""
        return self.only is None or worker.address in self.only

    def may_use(self, worker: Worker) -> bool:
        """Whether the worker could go on with it, and has not failed it since it was started."""
        return self.has_model_of(worker) and self.excluded.get(worker.address) != worker.view.incarnation

    def cached_tokens(self, worker: Worker) -> int:
        """How many of its tokens the worker has in its cache and would not compute, or be sent, again."""
        layout = worker.view.layout
        assert layout is not None, "a ready worker has a layout"
        key = layout.cache_key
        hashes = self.hashes.get(key, [])
        if len(hashes) < len(self.token_ids) // layout.page_size:
            hashes = page_hashes(self.token_ids, layout.page_size, salt=self.cache_salt, layout_key=key, known=hashes)
            self.hashes[key] = hashes
        whole_pages = (len(self.token_ids) - 1) // layout.page_size * layout.page_size
        return min(worker.view.cached_tokens(hashes), whole_pages)
