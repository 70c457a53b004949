"""Tokens in one stream for all calls: what is told, in which order, and what happens when the stream breaks."""

import asyncio
from pathlib import Path

import pytest
from answer import Answer
from asking import ask
from fake_workers import Make, Rig, Script, eventually

from pageferry.core.errors import InternalError, UnavailableError
from pageferry.router import feed
from pageferry.router.merged_calls import MergedCalls
from pageferry.v1 import decode_pb2, types_pb2 as types

TOKENS = [*range(100, 180)]


@pytest.fixture
def rig(tiny_model: Path) -> Make:
    return lambda **options: Rig(str(tiny_model), Script(TOKENS), **options)


async def test_one_stream_tells_of_all_calls(router: Rig) -> None:
    answers = await asyncio.gather(*(router.generate(ask(max_tokens=number)) for number in range(2, 8)))
    assert [answer.token_ids for answer in answers] == [TOKENS[:number] for number in range(2, 8)]
    assert all(answer.finished.timings.decode_queue_ms == 0.5 for answer in answers)
    assert len(router.decode.feeds) == 1
    assert router.decode.num_fed == sum(range(2, 8)) + 6  # each token, each end


async def test_the_end_of_a_call_may_come_before_what_it_generated(router: Rig) -> None:
    router.decode.feed.clear()
    answer = asyncio.create_task(router.generate(ask()))
    await eventually(lambda: router.decode.num_live == 1)
    await router.decode.wait_idle()
    assert not answer.done()
    router.decode.feed.set()
    assert (await answer).token_ids == TOKENS[:5]


async def test_a_reader_that_is_slow_gets_few_messages_and_holds_nobody_up(router: Rig) -> None:
    gate = asyncio.Event()
    router.decode.pause_at = {2: gate}
    async with asyncio.timeout(60):
        slow = router.stream(ask(max_tokens=70))
        answer = Answer()
        answer.take(await anext(slow))
        answer.take(await anext(slow))  # from here on it does not read
        gate.set()
        await router.decode.wait_idle()
        assert (await router.generate(ask(max_tokens=30))).token_ids == TOKENS[:30]
        num_before = len(answer.positions)
        num_messages = 0
        async for event in slow:
            answer.take(event)
            num_messages += event.HasField("delta")
    assert answer.token_ids == TOKENS[:70]
    assert num_before <= 2
    assert num_messages <= 5  # what the prefill worker says may come between tokens


async def test_a_call_that_fails_fails_after_its_last_tokens(router: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_PATIENCE_S", 60)
    router.decode.feed.clear()
    router.decode.fail_at = {4: InternalError("no luck")}
    answer = Answer()
    stream = router.stream(ask())
    for _ in range(2):
        answer.take(await anext(stream))
    await router.decode.wait_idle()
    router.decode.feed.set()
    with pytest.raises(InternalError, match="no luck"):
        await answer.read(stream)
    assert answer.token_ids == TOKENS[:4]


async def test_an_error_does_not_wait_long(router: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "_PATIENCE_S", 0.01)
    router.decode.feed.clear()
    router.decode.fail_at = {4: InternalError("no luck")}
    with pytest.raises(InternalError, match="no luck"):
        await router.generate(ask())
    router.decode.feed.set()


async def test_where_the_stream_breaks_before_an_end_the_worker_counts_as_lost(router: Rig) -> None:
    router.decode.feed.clear()
    answer = asyncio.create_task(router.generate(ask()))
    await eventually(lambda: router.decode.num_live == 1)
    await router.decode.wait_idle()
    router.decode.feed_failure = UnavailableError("broken")
    router.decode.feed.set()
    await router.until(lambda: router.value("pageferry_resumes_total", outcome="resumed") == 1)
    router.decode.feed_failure = None
    assert (await answer).token_ids == TOKENS[:5]


async def test_after_a_stream_that_ended_the_next_call_begins_another(router: Rig) -> None:
    await router.generate(ask())
    (name,) = router.decode.feeds
    router.decode.feeds[name].put_nowait(None)
    await eventually(lambda: not router.decode.feeds)
    async with asyncio.timeout(60):
        while not router.decode.feeds:  # at the next word of the worker, and a call's end is one
            assert (await router.generate(ask())).token_ids == TOKENS[:5]
    assert name not in router.decode.feeds


async def test_a_worker_that_has_lost_the_subscription_tells_in_the_call(router: Rig) -> None:
    await router.generate(ask())
    num_fed = router.decode.num_fed
    router.decode.feeds = {key + b"?": feed for key, feed in router.decode.feeds.items()}
    assert (await router.generate(ask())).token_ids == TOKENS[:5]
    assert router.decode.num_fed == num_fed


async def test_unread_messages_of_a_kind_are_merged() -> None:
    calls: MergedCalls[str] = MergedCalls()

    def put(name: str, position: int, completed: decode_pb2.Completed | None = None) -> None:
        tokens = [types.GeneratedToken(position=position)]
        calls.put(name, decode_pb2.CallEvents(tokens=tokens, completed=completed))

    put("one", 0)
    put("one", 1)
    put("two", 7)
    put("one", 2)
    put("one", 3, decode_pb2.Completed(steps=4))
    items = [await calls.get(None) for _ in range(3)]
    told = [(item.name, [token.position for token in item.message.tokens]) for item in items if item is not None]
    assert told == [("one", [0, 1]), ("two", [7]), ("one", [2, 3])]
    assert items[-1] is not None
    assert items[-1].message.completed.steps == 4
    assert await calls.get(0.001) is None
