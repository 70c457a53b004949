"""The requests that wait for workers: one bounded queue, by priority, then the least to compute, with ageing."""

from bisect import bisect_right, insort
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from pageferry.core.errors import ResourceExhaustedError
from pageferry.router.pace import Pace, retry_ms


@dataclass(slots=True, eq=False, kw_only=True)
class Queued:
    """One request's place; it keeps it when a worker refuses the request."""

    priority: int = 0  # lower goes first
    deadline: float | None = None
    rank: float = 0.0  # lower goes first among equals of priority
    arrival: int = 0  # set by the queue

    @property
    def place(self) -> tuple[int, float, int]:
        return (self.priority, self.rank, self.arrival)


_Item = TypeVar("_Item", bound=Queued)


class RequestQueue(Generic[_Item]):
    """Holds at most `max_waiting` requests, apart from those that a worker has refused and that came back."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: list[_Item] = []
        self._num_arrivals = 0
        self.pace = Pace()

    def __len__(self) -> int:
        return len(self._waiting)

    def check_room(self) -> None:
        """Raise ResourceExhaustedError where no more may wait, with when half of those that do can have gone."""
        num_waiting = len(self._waiting)
        if num_waiting < self._max_waiting:
            return
        gap_s = self.pace.gap_s
        raise ResourceExhaustedError(
            f"the router's queue is full: {num_waiting} requests wait, the limit is {self._max_waiting}",
            reason="QUEUE_FULL",
            retry_after_ms=retry_ms(None if gap_s is None else gap_s * num_waiting / 2),
        )

    def add(self, item: _Item, *, is_let_in: bool = False) -> None:
        """Raises as `check_room` does, but for what belongs to a request that has been let in."""
        if not is_let_in:
            self.check_room()
        self._num_arrivals += 1
        item.arrival = self._num_arrivals
        self.put_back(item)

    def num_before(self, item: _Item) -> int:
        """How many would go before it if it came now."""
        return bisect_right(self._waiting, (item.priority, item.rank), key=lambda other: other.place[:2])

    def put_back(self, item: _Item) -> None:
        """Return a request that `remove` took out to its old place."""
        insort(self._waiting, item, key=attrgetter("place"))

    def waiting(self) -> list[_Item]:
        """Those in it, in order."""
        return list(self._waiting)

    def take(self, item: _Item, now: float) -> None:
        """Take out a request that goes to its workers."""
        self._waiting.remove(item)
        self.pace.goes(now, len(self._waiting))

    def note_waiting(self, now: float) -> None:
        """Tell the pace that, where anybody is left, they wait for workers."""
        if self._waiting:
            self.pace.waits(now)

    def remove(self, item: _Item) -> bool:
        """Take out a request that gives up; False where it is not in the queue."""
        if item not in self._waiting:
            return False
        self._waiting.remove(item)
        if not self._waiting:
            self.pace.empties()
        return True

    def expire(self, now: float) -> list[_Item]:
        """Take out the requests whose deadline has passed."""
        late = [item for item in self._waiting if item.deadline is not None and item.deadline <= now]
        for item in late:
            self.remove(item)
        return late
