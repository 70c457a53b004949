"""The router's queue: bounded, by priority, then by arrival; a refused request keeps its place."""

import pytest
from hypothesis import given, strategies as st

from pageferry.core.errors import ResourceExhaustedError
from pageferry.router.queue import RequestQueue


def drain(queue: RequestQueue[int]) -> list[int]:
    items = []
    while (waiting := queue.first()) is not None:
        assert queue.remove(waiting)
        items.append(waiting.item)
    return items


@given(st.lists(st.integers(-3, 3), max_size=30))
def test_priority_then_arrival(priorities: list[int]) -> None:
    queue: RequestQueue[int] = RequestQueue(100)
    for index, priority in enumerate(priorities):
        queue.add(index, priority=priority)
    assert drain(queue) == [index for _, index in sorted((p, i) for i, p in enumerate(priorities))]


@given(st.lists(st.integers(-1, 1), min_size=1, max_size=10), st.data())
def test_a_refused_request_keeps_its_place(priorities: list[int], data: st.DataObject) -> None:
    queue: RequestQueue[int] = RequestQueue(100)
    places = [queue.add(index, priority=priority) for index, priority in enumerate(priorities)]
    for waiting in data.draw(st.lists(st.sampled_from(places), unique=True)):
        assert queue.remove(waiting)
        queue.put_back(waiting)
    assert drain(queue) == [index for _, index in sorted((p, i) for i, p in enumerate(priorities))]


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    queue: RequestQueue[str] = RequestQueue(1)
    first = queue.add("a")
    with pytest.raises(ResourceExhaustedError, match="1 requests wait, the limit is 1") as caught:
        queue.add("b")
    assert caught.value.retry_after_ms
    queue.remove(first)
    queue.add("c")
    queue.put_back(first)  # never refused: it was accepted before
    assert drain_texts(queue) == ["a", "c"]


def drain_texts(queue: RequestQueue[str]) -> list[str]:
    return [waiting.item for waiting in iter(queue.first, None) if waiting and queue.remove(waiting)]


def test_what_is_past_its_deadline_leaves() -> None:
    queue: RequestQueue[int] = RequestQueue(10)
    late, early, never = queue.add(0, deadline=9.0), queue.add(1, deadline=5.0), queue.add(2)
    assert queue.expire(4.9) == []
    assert queue.expire(5.0) == [early]
    assert not queue.remove(early)
    assert queue.expire(100.0) == [late]
    assert queue.first() is never
