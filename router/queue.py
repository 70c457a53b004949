"""The requests that wait for workers: one bounded queue, by priority, then by arrival."""

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from pageferry.core.errors import ResourceExhaustedError

_RETRY_AFTER_MS = 1000
_Item = TypeVar("_Item")


@dataclass(slots=True, eq=False)
class Waiting(Generic[_Item]):
    """One request's place; it keeps it when a worker refuses the request."""

    item: _Item
    priority: int  # lower goes first
    arrival: int
    deadline: float | None = None

    @property
    def place(self) -> tuple[int, int]:
        return (self.priority, self.arrival)


class RequestQueue(Generic[_Item]):
    """Holds at most `max_waiting` requests, apart from those that a worker has refused and that came back."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: list[Waiting[_Item]] = []
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: _Item, *, priority: int = 0, deadline: float | None = None) -> Waiting[_Item]:
        """Raises ResourceExhaustedError, with when to try again, where the queue is full."""
        if len(self._waiting) >= self._max_waiting:
            raise ResourceExhaustedError(
                f"the router's queue is full: {len(self._waiting)} requests wait, the limit is {self._max_waiting}",
                reason="QUEUE_FULL",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._num_arrivals += 1
        waiting = Waiting(item, priority, self._num_arrivals, deadline)
        insort(self._waiting, waiting, key=attrgetter("place"))
        return waiting

    def put_back(self, waiting: Waiting[_Item]) -> None:
        """Return a request that `remove` took out to its old place."""
        insort(self._waiting, waiting, key=attrgetter("place"))

    def first(self) -> Waiting[_Item] | None:
        return self._waiting[0] if self._waiting else None

    def remove(self, waiting: Waiting[_Item]) -> bool:
        """Take a request out; False where it is not in the queue."""
        if waiting not in self._waiting:
            return False
        self._waiting.remove(waiting)
        return True

    def expire(self, now: float) -> list[Waiting[_Item]]:
        """Take out the requests whose deadline has passed."""
        late = [waiting for waiting in self._waiting if waiting.deadline is not None and waiting.deadline <= now]
        for waiting in late:
            self._waiting.remove(waiting)
        return late
