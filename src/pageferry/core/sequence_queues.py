"""Where sequences stand in line: in order of a key, and in order of their deadlines."""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import count

from pageferry.core.errors import ResourceExhaustedError
from pageferry.core.sequence import Sequence, SequenceStatus

RETRY_S = 0.01  # until the next look for pages that only a transfer's end or a peer can free
_RETRY_AFTER_MS = 1000

Key = tuple[float, ...]
_Entry = tuple[Key, int, Sequence]
_MIN_COMPACT = 64


class SequenceQueue:
    """Sequences in order of the key that each was added with, ties in order of adding; any one can be taken out."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._entry_of: dict[Sequence, _Entry] = {}
        self._ticks = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._entry_of

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for entry in self._entries)

    def __reversed__(self) -> Iterator[Sequence]:
        return (entry[2] for entry in reversed(self._entries))

    @property
    def head(self) -> Sequence:
        return self._entries[0][2]

    @property
    def head_key(self) -> Key:
        return self._entries[0][0]

    def add(self, sequence: Sequence, key: Key) -> None:
        # The tick makes entries differ, so that sequences themselves are never compared.
        entry = (key, next(self._ticks), sequence)
        insort(self._entries, entry)
        self._entry_of[sequence] = entry

    def remove(self, sequence: Sequence) -> None:
        entry = self._entry_of.pop(sequence)
        del self._entries[bisect_left(self._entries, entry)]

    def check_not_full(self, max_waiting: int) -> None:
        """Raise ResourceExhaustedError if no more may wait."""
        if len(self) >= max_waiting:
            message = f"{len(self)} sequences wait already, max_waiting is {max_waiting}"
            raise ResourceExhaustedError(message, reason="QUEUE_FULL", retry_after_ms=_RETRY_AFTER_MS)

    def num_up_to(self, key: Key) -> int:
        """How many go before one that is added with this key."""
        return bisect_right(self._entries, key, key=lambda entry: entry[0])


class DeadlineQueue:
    """Sequences by deadline. Those that finish first need not be taken out: they are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self._ticks = count()
        self._compact_at = _MIN_COMPACT

    def add(self, sequence: Sequence) -> None:
        """Watch the sequence's deadline, if it has one."""
        if sequence.deadline is None:
            return
        if len(self._heap) >= self._compact_at:
            self._compact()
        heapq.heappush(self._heap, (sequence.deadline, next(self._ticks), sequence))

    def expired(self, now: float) -> list[Sequence]:
        """Take out those whose deadline has passed and that have not finished."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            sequence = heapq.heappop(self._heap)[2]
            if sequence.status is not SequenceStatus.FINISHED:
                expired.append(sequence)
        return expired

    def next_deadline(self) -> float | None:
        while self._heap and self._heap[0][2].status is SequenceStatus.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _compact(self) -> None:
        # Finished sequences with far deadlines would pile up; doubling the threshold keeps adding cheap on average.
        self._heap = [entry for entry in self._heap if entry[2].status is not SequenceStatus.FINISHED]
        heapq.heapify(self._heap)
        self._compact_at = max(_MIN_COMPACT, 2 * len(self._heap))
