"""What the router knows of one worker, built from the messages of its Watch stream alone."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pageferry.core.errors import invalid
from pageferry.core.layout import CacheLayout
from pageferry.core.prefix import HASH_BYTES
from pageferry.runtime.convert import layout_from_proto
from pageferry.v1.inference_pb2 import PoolLoad, WorkerLoad
from pageferry.v1.worker_pb2 import Snapshot, WatchResponse


class WatchGapError(Exception):
    """A message is missing: the view is stale until a new Watch starts over."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process a worker is, and which model it holds; empty before it was seen."""

    incarnation: bytes = b""
    fingerprint: str = ""


@dataclass(slots=True, eq=False)
class Dispatched:
    """Work sent to a worker. Once accepted it is in the worker's next load report; before, only we know of it."""

    num_tokens: int
    num_pages: tuple[int, ...] = ()  # of each pool, in the order of `WorkerView.pools`; empty: not counted
    priority: int = 0
    accepted: bool = False


class WorkerView:
    """Load, layout and prefix cache of a worker. A new incarnation forgets all that was known of the old one."""

    def __init__(self) -> None:
        self.incarnation = b""
        self.snapshot: Snapshot | None = None
        self.layout: CacheLayout | None = None
        self.load = WorkerLoad()
        self.draining = False
        self.refusing = False  # it has refused work since its last load report
        self.has_failed = False  # it has failed a request since it was started
        self._capacity_tokens: int | None = None  # by the last load report, once asked for
        self._next_sequence = 1
        self._cached: set[bytes] = set()
        self._dispatched: dict[Dispatched, None] = {}

    @property
    def identity(self) -> Identity:
        return Identity(self.incarnation, self.layout.fingerprint if self.layout is not None else "")

    def start_over(self) -> None:
        """A new Watch stream begins: its first message must be a snapshot."""
        self._next_sequence = 1

    def apply(self, message: WatchResponse) -> None:
        """Take the stream's next message.

        Raises WatchGapError, with the view unchanged, where one is missing or the worker is another one, and
        InvalidArgumentError for a snapshot that can't be understood.
        """
        event = message.WhichOneof("event")
        if message.sequence != self._next_sequence:
            raise WatchGapError(f"message {message.sequence} came after {self._next_sequence - 1}")
        if (event == "snapshot") != (message.sequence == 1):
            raise WatchGapError(f"message {message.sequence} of the stream is {event}")
        if event != "snapshot" and message.incarnation != self.incarnation:
            raise WatchGapError("the worker's incarnation changed within the stream")
        if event == "snapshot":
            self._take_snapshot(message)
        elif event == "load":
            self._take_load(message.load)
        elif event == "cache":
            self._cached.difference_update(_split(message.cache.removed))
            self._cached.update(_split(message.cache.stored))
        elif event == "draining":
            self.draining = True
        self._next_sequence += 1

    def _take_snapshot(self, message: WatchResponse) -> None:
        snapshot = message.snapshot
        layout = layout_from_proto(snapshot.layout)
        if message.incarnation != self.incarnation:
            self._dispatched.clear()
            self.has_failed = False
        self.incarnation = message.incarnation
        self.snapshot, self.layout = snapshot, layout
        self.draining = snapshot.draining
        self._cached = set(_split(snapshot.cached_hashes))
        self._take_load(snapshot.load)

    def _take_load(self, load: WorkerLoad) -> None:
        assert self.layout is not None, "a snapshot comes first"
        self._capacity_tokens = None
        num_pools = len(self.layout.groups) + self.layout.format.has_tails
        if max(1, len(load.pools)) != num_pools:
            raise invalid("load.pools", len(load.pools), f"must be {num_pools}, for the layout's groups and tails")
        self.load = load
        self.refusing = False
        for dispatched in [entry for entry in self._dispatched if entry.accepted]:
            del self._dispatched[dispatched]

    @property
    def pools(self) -> Sequence[PoolLoad | WorkerLoad]:
        """Of each cache group, then of tails where the layout has such. An older worker has told of all as one."""
        return self.load.pools or [self.load]

    @property
    def available_pages(self) -> tuple[int, ...]:
        """Pages of each pool that the last load report and what was sent since leave."""
        assert self.layout is not None, "a worker with pages has been seen"
        left = [pool.pages_free + pool.pages_cached for pool in self.pools]
        for group, (policy, pool) in enumerate(zip(self.layout.groups, self.load.pools, strict=False)):
            if policy.window is not None:  # what is free there may be promised
                left[group] = pool.pages_total - pool.pages_promised
        work = [dispatched.num_pages for dispatched in self._dispatched if dispatched.num_pages]
        return tuple(number - sum(pages[index] for pages in work) for index, number in enumerate(left))

    def capacity_tokens(self) -> int:
        """Most tokens that a sequence can have for its pages to fit, as far as the model goes."""
        if self._capacity_tokens is None:
            self._capacity_tokens = self._capacity()
        return self._capacity_tokens

    def _capacity(self) -> int:
        assert self.layout is not None and self.snapshot is not None, "a ready worker has been seen"
        most, page_size = self.snapshot.max_model_tokens, self.layout.page_size
        for group, pool in zip(self.layout.groups, self.pools, strict=False):
            if group.most_live(most, self.snapshot.chunk_tokens, page_size) > pool.pages_total:
                most = pool.pages_total * page_size
        return most

    def full_pages(self) -> int | None:
        """Pages of its smallest pool of layers that keep all tokens; None where there are no such layers."""
        assert self.layout is not None, "a ready worker has been seen"
        pairs = zip(self.layout.groups, self.pools, strict=False)
        return min((pool.pages_total for group, pool in pairs if group.window is None), default=None)

    def cached_tokens(self, page_hashes: Sequence[bytes]) -> int:
        """How many tokens at the start of a prompt, whole pages, are in the worker's prefix cache."""
        assert self.layout is not None, "a view without a snapshot has no cache"
        num_pages = next((i for i, key in enumerate(page_hashes) if key not in self._cached), len(page_hashes))
        return num_pages * self.layout.page_size

    @property
    def has_subscriptions(self) -> bool:
        """Whether what all calls to it generate can come in one stream."""
        return self.snapshot is not None and self.snapshot.subscriptions

    @property
    def is_stalled(self) -> bool:
        """Whether its engine has work and makes no progress."""
        return self.load.stalled

    @property
    def num_cached_pages(self) -> int:
        return len(self._cached)

    def dispatch(self, num_tokens: int, num_pages: tuple[int, ...] = (), priority: int = 0) -> Dispatched:
        """Count work that is sent to the worker; the caller owes `forget` once it is over."""
        dispatched = Dispatched(num_tokens, num_pages, priority)
        self._dispatched[dispatched] = None
        return dispatched

    def forget(self, dispatched: Dispatched) -> None:
        self._dispatched.pop(dispatched, None)

    @property
    def uncounted(self) -> Collection[Dispatched]:
        """Work that the last load report does not count."""
        return self._dispatched


def _split(hashes: bytes) -> Iterator[bytes]:
    return (hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES))
