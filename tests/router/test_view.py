"""What the router makes of a worker's Watch stream: gaps, new incarnations, and work that reports do not count yet."""

from dataclasses import replace

import pytest
from fake_workers import LAYOUT

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.groups import CacheGroup
from pageferry.router.view import WatchGapError, WorkerView
from pageferry.runtime.convert import layout_to_proto
from pageferry.v1.inference_pb2 import PoolLoad, WorkerLoad
from pageferry.v1.worker_pb2 import CacheEvents, Draining, Snapshot, WatchResponse

GROUPED = replace(LAYOUT, groups=(CacheGroup((0,), window=64), CacheGroup((1,))))
OLD, NEW = b"o" * 16, b"n" * 16
HASHES = [bytes([i]) * 16 for i in range(5)]


def snapshot(incarnation: bytes = OLD, sequence: int = 1, **fields: object) -> WatchResponse:
    body = Snapshot(layout=layout_to_proto(LAYOUT), load=WorkerLoad(running=1), **fields)
    return WatchResponse(incarnation=incarnation, sequence=sequence, snapshot=body)


def load(sequence: int, running: int = 2, incarnation: bytes = OLD) -> WatchResponse:
    return WatchResponse(incarnation=incarnation, sequence=sequence, load=WorkerLoad(running=running))


def cache(sequence: int, stored: list[bytes], removed: list[bytes]) -> WatchResponse:
    events = CacheEvents(stored=b"".join(stored), removed=b"".join(removed))
    return WatchResponse(incarnation=OLD, sequence=sequence, cache=events)


@pytest.fixture
def view() -> WorkerView:
    view = WorkerView()
    view.apply(snapshot(cached_hashes=b"".join(HASHES[:2])))
    return view


def test_messages_in_order_are_applied(view: WorkerView) -> None:
    view.apply(load(2))
    view.apply(cache(3, HASHES[2:4], HASHES[1:2]))
    view.apply(WatchResponse(incarnation=OLD, sequence=4, draining=Draining()))
    assert (view.load.running, view.layout, view.draining) == (2, LAYOUT, True)
    assert view.cached_tokens(HASHES) == 16  # the run ends at the page that was removed
    assert view.cached_tokens(HASHES[2:4]) == 32


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (load(3), "message 3 came after 1"),
        (load(1), "message 1 came after 1"),
        (snapshot(sequence=2), "message 2 of the stream is snapshot"),
        (load(2, incarnation=NEW), "incarnation changed"),
    ],
)
def test_a_gap_is_told_and_changes_nothing(view: WorkerView, message: WatchResponse, problem: str) -> None:
    with pytest.raises(WatchGapError, match=problem):
        view.apply(message)
    assert view.load.running == 1
    view.apply(load(2))  # the message that was missing still fits


def test_a_stream_begins_with_a_snapshot(view: WorkerView) -> None:
    view.start_over()
    with pytest.raises(WatchGapError, match="message 1 of the stream is load"):
        view.apply(load(1))


def test_a_new_incarnation_forgets_everything(view: WorkerView) -> None:
    view.dispatch(100, (7,))
    view.start_over()
    view.apply(snapshot(NEW, cached_hashes=HASHES[4]))
    assert view.cached_tokens(HASHES) == 0
    assert not view.uncounted


def test_the_same_incarnation_keeps_what_was_sent(view: WorkerView) -> None:
    work = view.dispatch(100, (7,))
    view.start_over()
    view.apply(snapshot(cached_hashes=b""))
    assert view.cached_tokens(HASHES) == 0
    assert list(view.uncounted) == [work]


def test_sent_work_counts_until_a_report_after_its_acceptance(view: WorkerView) -> None:
    work = view.dispatch(100, (7,))
    view.apply(load(2))
    assert list(view.uncounted) == [work]  # the report may be older than the call
    work.accepted = True
    view.apply(load(3))
    assert not view.uncounted
    view.forget(work)  # again, when the call ends


def test_a_refusal_holds_until_the_next_report(view: WorkerView) -> None:
    view.refusing = True
    view.apply(cache(2, [], []))
    assert view.refusing
    view.apply(load(3))
    assert not view.refusing


def test_a_layout_that_is_not_understood_is_an_error() -> None:
    message = snapshot()
    message.snapshot.layout.page_bytes += 1
    with pytest.raises(InvalidArgumentError, match="page_bytes"):
        WorkerView().apply(message)


def grouped(*pools: PoolLoad) -> WatchResponse:
    body = Snapshot(
        layout=layout_to_proto(GROUPED), load=WorkerLoad(pools=pools), max_model_tokens=2000, chunk_tokens=128
    )
    return WatchResponse(incarnation=OLD, sequence=1, snapshot=body)


def test_pages_are_known_pool_by_pool() -> None:
    view = WorkerView()
    view.apply(
        grouped(
            PoolLoad(group=0, pages_total=20, pages_free=20, pages_promised=11),
            PoolLoad(group=1, pages_total=50, pages_cached=8),
        )
    )
    assert view.available_pages == (9, 8)
    view.dispatch(100, (3, 7))
    view.dispatch(100)
    assert view.available_pages == (6, 1)
    assert view.capacity_tokens() == 50 * 16  # a window of 64 and a chunk of 128 never hold more than 13 pages
    view.start_over()
    view.apply(grouped(PoolLoad(group=0, pages_total=12), PoolLoad(group=1, pages_total=500)))
    assert view.capacity_tokens() == 12 * 16


def test_a_worker_that_knows_no_pools_has_one(view: WorkerView) -> None:
    view.apply(WatchResponse(incarnation=OLD, sequence=2, load=WorkerLoad(pages_free=5, pages_cached=2)))
    assert view.available_pages == (7,)


@pytest.mark.parametrize("num_pools", [0, 1, 3])
def test_pools_that_are_not_those_of_the_layout_are_an_error(num_pools: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"load.pools is {num_pools}, must be 2"):
        WorkerView().apply(grouped(*[PoolLoad()] * num_pools))
