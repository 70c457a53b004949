"""The requests that wait for workers: one bounded queue, by priority, then by arrival."""

from bisect import insort
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from pageferry.core.errors import ResourceExhaustedError

_RETRY_AFTER_MS = 1000


@dataclass(slots=True, eq=False, kw_only=True)
class Queued:
    """One request's place; it keeps it when a worker refuses the request."""

    priority: int = 0  # lower goes first
    deadline: float | None = None
    arrival: int = 0  # set by the queue

    @property
    def place(self) -> tuple[int, int]:
        return (self.priority, self.arrival)


_Item = TypeVar("_Item", bound=Queued)


class RequestQueue(Generic[_Item]):
    """Holds at most `max_waiting` requests, apart from those that a worker has refused and that came back."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: list[_Item] = []
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, item: _Item) -> None:
        """Raises ResourceExhaustedError, with when to try again, where the queue is full."""
        if len(self._waiting) >= self._max_waiting:
            raise ResourceExhaustedError(
                f"the router's queue is full: {len(self._waiting)} requests wait, the limit is {self._max_waiting}",
                reason="QUEUE_FULL",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._num_arrivals += 1
        item.arrival = self._num_arrivals
        self.put_back(item)

    def put_back(self, item: _Item) -> None:
        """Return a request that `remove` took out to its old place."""
        insort(self._waiting, item, key=attrgetter("place"))

    def first(self) -> _Item | None:
        return self._waiting[0] if self._waiting else None

    def remove(self, item: _Item) -> bool:
        """Take a request out; False where it is not in the queue."""
        if item not in self._waiting:
            return False
        self._waiting.remove(item)
        return True

    def expire(self, now: float) -> list[_Item]:
        """Take out the requests whose deadline has passed."""
        late = [item for item in self._waiting if item.deadline is not None and item.deadline <= now]
        for item in late:
            self._waiting.remove(item)
        return late
