"""The router's queue: bounded, by priority, then by arrival; a refused request keeps its place."""

from typing import Any

import pytest
from hypothesis import given, strategies as st

from pageferry.core.errors import ResourceExhaustedError
from pageferry.router.queue import Queued, RequestQueue


class Request(Queued):
    def __init__(self, name: object, **place: Any) -> None:
        super().__init__(**place)
        self.name = name


def add(queue: RequestQueue[Request], name: object, **place: Any) -> Request:
    request = Request(name, **place)
    queue.add(request)
    return request


def drain(queue: RequestQueue[Request]) -> list[object]:
    names = []
    for request in queue.waiting():
        assert queue.remove(request)
        names.append(request.name)
    return names


@given(st.lists(st.integers(-3, 3), max_size=30))
def test_priority_then_arrival(priorities: list[int]) -> None:
    queue: RequestQueue[Request] = RequestQueue(100)
    for index, priority in enumerate(priorities):
        add(queue, index, priority=priority)
    assert drain(queue) == [index for _, index in sorted((p, i) for i, p in enumerate(priorities))]


@given(st.lists(st.integers(-1, 1), min_size=1, max_size=10), st.data())
def test_a_refused_request_keeps_its_place(priorities: list[int], data: st.DataObject) -> None:
    queue: RequestQueue[Request] = RequestQueue(100)
    places = [add(queue, index, priority=priority) for index, priority in enumerate(priorities)]
    for waiting in data.draw(st.lists(st.sampled_from(places), unique=True)):
        assert queue.remove(waiting)
        queue.put_back(waiting)
    assert drain(queue) == [index for _, index in sorted((p, i) for i, p in enumerate(priorities))]


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    queue: RequestQueue[Request] = RequestQueue(1)
    first = add(queue, "a")
    with pytest.raises(ResourceExhaustedError, match="1 requests wait, the limit is 1") as caught:
        add(queue, "b")
    assert caught.value.retry_after_ms
    queue.remove(first)
    add(queue, "c")
    queue.put_back(first)  # never refused: it was accepted before
    assert drain(queue) == ["a", "c"]


def test_what_is_past_its_deadline_leaves() -> None:
    queue: RequestQueue[Request] = RequestQueue(10)
    late, early, never = add(queue, 0, deadline=9.0), add(queue, 1, deadline=5.0), add(queue, 2)
    assert queue.expire(4.9) == []
    assert queue.expire(5.0) == [early]
    assert not queue.remove(early)
    assert queue.expire(100.0) == [late]
    assert queue.waiting()[0] is never


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 5)), max_size=30))
def test_among_equals_of_priority_the_lower_rank_goes_first_then_the_earlier(places: list[tuple[int, int]]) -> None:
    queue: RequestQueue[Request] = RequestQueue(100)
    for index, (priority, rank) in enumerate(places):
        item = Request(index, priority=priority, rank=rank)
        assert queue.num_before(item) == sum(place <= (priority, rank) for place in places[:index])
        queue.add(item)
    assert drain(queue) == [index for _, index in sorted((place, i) for i, place in enumerate(places))]


def test_a_full_queue_tells_when_half_of_it_can_have_gone() -> None:
    queue: RequestQueue[Request] = RequestQueue(20)
    waiting = [add(queue, index) for index in range(20)]
    queue.note_waiting(0.0)
    for number, item in enumerate(waiting[:10], 1):
        queue.take(item, now=0.5 * number)
        queue.put_back(item)
    with pytest.raises(ResourceExhaustedError) as caught:
        queue.check_room()
    assert caught.value.retry_after_ms == 5000
