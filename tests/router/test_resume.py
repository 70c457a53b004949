"""A decode worker that is lost while it generates: another goes on, and the client sees nothing of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import asking
import pytest
from answer import Answer
from fake_workers import LAYOUT, TOKENS, FakeDecode, FakePrefill, Make, Rig, Script, eventually
from hand_clock import HandClock
from spans import assert_one_tree

from pageferry.core.config import RouterConfig
from pageferry.core.errors import (
    DeadlineExceededError,
    PageferryError,
    UnavailableError,
)
from pageferry.router import progress
from pageferry.runtime.convert import layout_to_proto
from pageferry.v1 import decode_pb2, inference_pb2 as pb, types_pb2 as types

PUSHED, LOCAL = decode_pb2.PROMPT_SOURCE_PUSHED, decode_pb2.PROMPT_SOURCE_LOCAL
KILLED = UnavailableError("killed")
ask = partial(asking.ask, max_tokens=30)


@pytest.fixture(params=[True, False], ids=["feed", "calls"])
def rig(tiny_model: Path, request: pytest.FixtureRequest) -> Make:
    def make(tokens: list[int] = TOKENS, **options: object) -> Rig:
        return Rig(str(tiny_model), Script(tokens), **{"subscriptions": request.param, "num_decode": 2} | options)

    return make


def resumes(router: Rig, outcome: str) -> float:
    return router.value("pageferry_resumes_total", outcome=outcome)


def lose_at(router: Rig, *positions: int, error: PageferryError = KILLED) -> None:
    """Let whichever worker comes to one of the positions end its call there; the next that comes there does not."""

    class Once(dict[int, PageferryError]):
        def __getitem__(self, key: int) -> PageferryError:
            return self.pop(key)

    once = Once(dict.fromkeys(positions, error))
    for decode in router.decodes:
        decode.fail_at = once


async def pause(
    router: Rig, request: pb.GenerateRequest, position: int
) -> tuple[FakeDecode, FakeDecode, Answer, object]:
    """Begin a request and read it up to a position; the worker that has it, the other, and what is still to read."""
    gates = {position: asyncio.Event()}
    for decode in router.decodes:
        decode.pause_at = gates
    answer, stream = Answer(), router.stream(request)
    while len(answer.token_ids) < position:
        answer.take(await anext(stream))
    first, second = sorted(router.decodes, key=lambda decode: -decode.num_live)
    second.pause_at = {}
    return first, second, answer, stream


def fall_silent(router: Rig, fake: FakeDecode | FakePrefill) -> None:
    """Let a worker say nothing any more, and the router notice soon; only of this one, however busy the machine."""
    fake.awake.clear()
    for worker in router.fleet.workers:
        if worker.address == fake.address:
            router.fleet._tasks[worker].cancel()
            router.fleet._tasks[worker] = asyncio.create_task(
                worker.watch(partial(router.fleet._look, worker), silence_s=0.1)
            )


@pytest.mark.field("ai-dynamo/dynamo#7930", "ai-dynamo/dynamo#1930", "ai-dynamo/dynamo#2310")
@pytest.mark.parametrize("local", [False, True], ids=["pushed", "local"])
@pytest.mark.parametrize("position", [1, 2, 10, 28])
async def test_another_worker_goes_on_where_one_died(rig: Make, position: int, local: bool) -> None:
    async with rig(num_prefill=0 if local else 1) as router:
        lose_at(router, position)
        request = ask(request_id="r")
        request.stop.min_tokens = 20
        request.sampling.temperature = 1
        request.sampling.seed = 7
        request.sampling.repetition_penalty = 1.5
        request.sampling.logprobs = 2
        answer = await router.generate(request)
        assert answer.token_ids == TOKENS[:30]
        assert answer.positions == [*range(30)]
        assert (answer.reason, answer.text) == ("length", router.tokenizer.decode(TOKENS[:30]))
        assert answer.usage == types.Usage(prompt_tokens=40, completion_tokens=30)
        (one,), (other,) = sorted(
            (decode.works for decode in router.decodes), key=lambda works: len(works[0].output_ids)
        )
        assert (one.request_id, list(one.output_ids)) == ("r", [])
        assert (other.request_id, list(other.output_ids)) == ("r.2", TOKENS[:position])
        for field in ("prompt_ids", "sampling", "stop", "cache_salt"):
            assert getattr(one, field) == getattr(other, field)
        assert resumes(router, "resumed") == 1
        assert router.value("pageferry_prefill_failures_total", next="local") == 0
        await router.check_idle()
        root = assert_one_tree(await router.log.wait(9 if local else 13))
        (event,) = root.events
        assert (event.name, event.attributes["outcome"], event.attributes["tokens"]) == (
            "pageferry.decode_lost",
            "resumed",
            position,
        )
        assert root.attributes["pageferry.resumed_at"] == position


async def test_a_worker_that_dies_before_its_first_token_is_not_the_prefill_workers_fault(router: Rig) -> None:
    router.prefill.push.clear()
    reading = asyncio.create_task(router.generate(ask(max_tokens=5)))
    await eventually(lambda: len(router.prefill.works) == 1)
    first = max(router.decodes, key=lambda decode: decode.num_live)
    for commit in router.tickets.values():
        commit.set_exception(UnavailableError("killed"))
    await eventually(lambda: len(router.prefill.works) == 2)
    router.prefill.push.set()
    assert (await reading).token_ids == TOKENS[:5]
    assert len(first.works) == 1
    assert resumes(router, "resumed") == 1
    assert router.value("pageferry_prefill_failures_total", next="other_prefill") == 0
    assert router.value("pageferry_prefill_failures_total", next="local") == 0


async def test_nor_is_it_where_the_prefill_worker_is_the_first_to_tell(
    router: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "CAUSE_S", 60)
    router.prefill.compute.clear()
    reading = asyncio.create_task(router.generate(ask(max_tokens=5)))
    await router.prefill.accepted.wait()
    router.prefill.failure = UnavailableError("the hand-off broke off: Socket closed", reason="STREAM_BROKEN")
    router.prefill.compute.set()
    await router.prefill.wait_idle()
    router.prefill.failure = None
    for commit in router.tickets.values():
        commit.set_exception(UnavailableError("killed"))
    assert (await reading).token_ids == TOKENS[:5]
    assert resumes(router, "resumed") == 1
    assert [len(prefill.works) for prefill in router.prefills] == [2]
    assert router.value("pageferry_prefill_failures_total", next="local") == 0


async def test_the_worker_that_says_why_a_hand_off_broke_is_believed(
    router: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "CAUSE_S", 60)
    router.prefill.push_failure = UnavailableError("push ended while it was written to", reason="STREAM_BROKEN")
    assert (await router.generate(ask(max_tokens=5))).token_ids == TOKENS[:5]
    (failed,) = [record.pageferry_fields for record in caplog.records if record.getMessage() == "prefill_failed"]
    assert failed["failure"]["reason"] == "HANDOFF_BROKEN"


async def test_a_process_that_is_killed_leaves_nothing_undone(router: Rig) -> None:
    first, second, answer, stream = await pause(router, ask(), 10)
    await first.server.__aexit__(None, None, None)
    assert (await answer.read(stream)).token_ids == TOKENS[:30]
    assert list(second.works[0].output_ids) == TOKENS[:10]


@pytest.mark.field("ai-dynamo/dynamo#7930")
async def test_a_stop_string_that_was_half_there_is_found_by_the_next_worker(rig: Make) -> None:
    tokens = [4 + byte for byte in b"abcdefghij"]  # the tiny vocabulary: special tokens, then the bytes
    async with rig(tokens) as router:
        lose_at(router, 4)
        answer = await router.generate(ask(max_tokens=10, stop_strings=["defg"]))
        assert (answer.text, answer.reason, answer.finished.matched_stop) == ("abc", "stop", "defg")
        assert answer.token_ids == tokens[:7]
        lose_at(router, 4)
        answer = await router.generate(ask(max_tokens=6, stop_strings=["deFg"]))
        assert (answer.text, answer.reason) == ("abcdef", "length")
        await router.check_idle()


async def test_a_request_is_resumed_as_often_as_is_set_and_then_fails(rig: Make) -> None:
    async with rig(router=RouterConfig(resumes=2, local_prefill_tokens=0)) as router:
        lose_at(router, 5, 10, 15)
        answer, stream = Answer(), router.stream(ask())
        with pytest.raises(UnavailableError, match="failed after 15 tokens: killed"):
            await answer.read(stream)
        assert answer.token_ids == TOKENS[:15]
        assert (resumes(router, "resumed"), resumes(router, "given_up")) == (2, 1)
        assert router.value("pageferry_requests_total", outcome="unavailable") == 1
        await router.check_idle()


async def test_a_worker_that_drains_has_its_streams_moved_for_free(rig: Make) -> None:
    async with rig(router=RouterConfig(resumes=0, local_prefill_tokens=0)) as router:
        draining = UnavailableError("the server drained before the call was over", reason="DRAINING")
        lose_at(router, 5, 10, 15, error=draining)
        answer = await router.generate(ask())
        assert (answer.token_ids, answer.reason) == (TOKENS[:30], "length")
        assert (resumes(router, "moved"), resumes(router, "resumed")) == (3, 0)
        await router.check_idle()


@pytest.mark.parametrize(("last", "reason"), [(129, "length"), (2, "stop")])
async def test_where_only_the_end_was_lost_nothing_is_left_to_do(rig: Make, last: int, reason: str) -> None:
    tokens = [*TOKENS[:29], last, 50]
    async with rig(tokens) as router:
        for decode in router.decodes:
            whole = decode._generate

            async def without_end(
                work: types.WorkItem, position: int, whole: Callable[..., AsyncIterator[object]] = whole
            ) -> AsyncIterator[object]:
                async for event in whole(work, position):
                    if event.HasField("completed"):
                        raise UnavailableError("killed")
                    yield event

            decode._generate = without_end
        answer = await router.generate(ask(max_tokens=30 if reason == "length" else 31))
        assert (answer.token_ids, answer.reason) == (tokens[:30], reason)
        assert sum(len(decode.works) for decode in router.decodes) == 1
        assert (resumes(router, "complete"), resumes(router, "resumed")) == (1, 0)
        await router.check_idle()


async def test_a_stop_id_before_min_tokens_is_no_end(rig: Make) -> None:
    async with rig([100, 101, 2, 102, 103, 104]) as router:
        lose_at(router, 3)
        request = ask(max_tokens=6)
        request.stop.min_tokens = 5
        assert (await router.generate(request)).token_ids == [100, 101, 2, 102, 103, 104]


async def test_a_worker_that_falls_silent_loses_its_streams(rig: Make) -> None:
    async with rig() as router:
        first, _, answer, stream = await pause(router, ask(), 10)
        fall_silent(router, first)
        async with asyncio.timeout(60):
            await answer.read(stream)
        assert answer.token_ids == TOKENS[:30]
        first.awake.set()
        await router.check_idle()


async def test_a_worker_whose_engine_stands_still_loses_its_streams(router: Rig) -> None:
    first, second, answer, stream = await pause(router, ask(), 10)
    first.publish(stalled=True)
    assert (await answer.read(stream)).token_ids == TOKENS[:30]
    status = {worker.address: worker for worker in router.frontend.get_status().workers}
    assert (status[first.address].state, status[first.address].reason) == ("stale", "its engine makes no progress")
    assert (await router.generate(ask(max_tokens=5))).token_ids == TOKENS[:5]
    assert (len(first.works), len(second.works)) == (1, 2)
    second.publish(stalled=True)
    await router.until(lambda: not router.frontend.ready)
    with pytest.raises(UnavailableError, match=r"is stale \(its engine makes no progress"):
        await router.generate(ask(max_tokens=5))
    first.publish(stalled=False)
    await router.until(lambda: router.frontend.ready)
    first.pause_at = {}
    assert (await router.generate(ask(max_tokens=5))).token_ids == TOKENS[:5]


async def test_where_no_other_has_room_the_same_worker_goes_on(router: Rig) -> None:
    first, second, answer, stream = await pause(router, ask(), 10)
    second.publish(running=8)
    await router.until(lambda: any(worker.view.load.running == 8 for worker in router.fleet.workers))
    lose_at(router, 10)
    first.pause_at[10].set()
    assert (await answer.read(stream)).token_ids == TOKENS[:30]
    assert (len(first.works), len(second.works)) == (2, 0)


async def test_a_silent_prefill_worker_loses_its_prompts(rig: Make) -> None:
    async with rig(num_prefill=2) as router:
        for prefill in router.prefills:
            prefill.compute.clear()
        reading = asyncio.create_task(router.generate(ask(max_tokens=5)))
        await eventually(lambda: any(prefill.works for prefill in router.prefills))
        silent, other = sorted(router.prefills, key=lambda prefill: -len(prefill.works))
        fall_silent(router, silent)
        other.compute.set()
        async with asyncio.timeout(60):
            assert (await reading).token_ids == TOKENS[:5]
        assert router.value("pageferry_prefill_failures_total", next="other_prefill") == 1
        silent.awake.set()
        silent.compute.set()
        await router.check_idle()


def end_watch(worker: FakeDecode) -> None:
    """Let the streams that watch it break; its calls go on."""
    for watcher in worker.hub._watchers:
        watcher.overflown = True
        watcher.ready.set()


async def test_another_process_at_the_address_means_that_the_streams_are_lost(router: Rig) -> None:
    first, _, answer, stream = await pause(router, ask(), 10)
    worker = next(worker for worker in router.fleet.workers if worker.address == first.address)
    old = worker.view.incarnation
    end_watch(first)
    first.restart()
    first.pause_at = {}  # it is another process, and may get the request as well as the other worker
    assert (await answer.read(stream)).token_ids == TOKENS[:30]
    await router.until(lambda: worker.view.incarnation != old)
    assert resumes(router, "resumed") == 1


async def test_a_watch_stream_that_breaks_costs_no_request_its_worker(router: Rig) -> None:
    first, second, answer, stream = await pause(router, ask(), 10)
    worker = next(worker for worker in router.fleet.workers if worker.address == first.address)
    end_watch(first)
    await router.until(lambda: not worker.is_ready)
    await router.until(lambda: worker.is_ready)
    first.pause_at[10].set()
    assert (await answer.read(stream)).token_ids == TOKENS[:30]
    assert second.works == []


async def test_what_a_lost_worker_says_late_is_not_heard(rig: Make) -> None:
    async with rig() as router:
        first, second, answer, stream = await pause(router, ask(), 10)
        gate = first.pause_at[10]
        second.pause_at = {20: asyncio.Event()}
        fall_silent(router, first)
        while len(answer.token_ids) < 20:
            answer.take(await anext(stream))
        gate.set()
        first.awake.set()
        await first.wait_idle()
        second.pause_at[20].set()
        assert (await answer.read(stream)).token_ids == TOKENS[:30]
        await router.check_idle()


async def test_a_client_that_leaves_while_its_request_waits_to_go_on_leaves_nothing(router: Rig) -> None:
    first, second, _, stream = await pause(router, ask(), 10)
    await router.fill()
    first.fail_at = {10: KILLED}
    reading = asyncio.create_task(anext(stream))
    first.pause_at[10].set()
    await eventually(lambda: router.frontend.get_status().queued == 1)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await stream.aclose()
    assert second.works == []
    assert router.value("pageferry_requests_total", outcome="cancelled") == 1


async def test_a_deadline_passes_while_a_request_waits_to_go_on(rig: Make) -> None:
    clock = HandClock()
    async with rig(clock=clock) as router:
        second_request = asyncio.Event()
        for decode in router.decodes:
            decode.fail_at = {3: KILLED}
            decode.pause_at = {3: second_request}
        stream, answer = router.stream(ask(), deadline=3600.0), Answer()
        while len(answer.token_ids) < 3:
            answer.take(await anext(stream))
        await router.fill()
        second_request.set()
        reading = asyncio.create_task(answer.read(stream))
        await eventually(lambda: router.frontend.get_status().queued == 1)
        clock.now = 3601.0
        router.decode.publish(running=7)  # else the queue would be looked at when its timer ends
        with pytest.raises(DeadlineExceededError):
            await reading
        assert answer.token_ids == TOKENS[:3]
        assert sum(len(decode.works) for decode in router.decodes) == 1
        await router.check_idle()


async def test_a_router_that_drains_ends_what_waits_to_go_on(router: Rig) -> None:
    first, _, answer, stream = await pause(router, ask(), 10)
    await router.fill()
    first.fail_at = {10: KILLED}
    first.pause_at[10].set()
    reading = asyncio.create_task(answer.read(stream))
    await eventually(lambda: router.frontend.get_status().queued == 1)
    assert await router.frontend.drain(grace_s=0) == 1
    with pytest.raises(UnavailableError, match="its grace of 0 s is over"):
        await reading


async def test_another_model_does_not_go_on_with_an_answer(rig: Make) -> None:
    async with rig(num_prefill=0) as router:
        second = router.decodes[1]
        second.snapshot.layout.CopyFrom(layout_to_proto(replace(LAYOUT, fingerprint="0" * 32)))
        second.restart()
        await second.server.__aexit__(None, None, None)
        await router.serve(second, router.log.tracer())
        await router.until(lambda: router.fleet.workers[1].view.identity.fingerprint == "0" * 32)
        second.publish(running=7)  # so that the first is chosen
        await router.until(lambda: router.fleet.workers[1].view.load.running == 7)
        first, _, answer, stream = await pause(router, ask(), 10)
        await first.server.__aexit__(None, None, None)
        with pytest.raises(UnavailableError, match="no decode worker has the model that the answer began with"):
            await answer.read(stream)
        assert (answer.token_ids, second.works) == (TOKENS[:10], [])
        assert len((await router.generate(ask(max_tokens=5))).token_ids) == 5  # a new answer may be the other model's


async def test_the_only_worker_goes_on_where_its_fault_has_passed(rig: Make) -> None:
    async with rig(num_decode=1) as router:
        lose_at(router, 10)
        assert (await router.generate(ask())).token_ids == TOKENS[:30]
        assert [list(work.output_ids) for work in router.decode.works] == [[], TOKENS[:10]]


async def test_the_only_worker_is_killed(rig: Make) -> None:
    async with rig(num_decode=1) as router:
        first, answer = router.decode, Answer()
        first.pause_at = {10: asyncio.Event()}
        stream = router.stream(ask())
        while len(answer.token_ids) < 10:
            answer.take(await anext(stream))
        await first.server.__aexit__(None, None, None)
        async with asyncio.timeout(60):
            with pytest.raises(UnavailableError, match=r"failed: .*; then no decode worker is ready"):
                await answer.read(stream)
        assert answer.token_ids == TOKENS[:10]
        await router.check_idle()


async def test_a_worker_that_can_never_be_reached_is_not_tried_for_ever(rig: Make) -> None:
    async with rig(num_decode=1) as router:
        router.decode.refusals = [UnavailableError("no way") for _ in range(100)]
        async with asyncio.timeout(60):
            with pytest.raises(UnavailableError, match="no way"):
                await router.generate(ask())
        assert 5 < len(router.decode.works) < 20
        await router.check_idle()


async def test_a_prefill_worker_that_was_started_again_is_used_again(rig: Make) -> None:
    async with rig(num_prefill=2, router=RouterConfig(prefill_retries=2, local_prefill_tokens=0)) as router:
        first, second = router.prefills
        second.publish(queued_prompt_tokens=10)  # so that the first is chosen first
        await router.until(lambda: router.fleet.workers[1].view.load.queued_prompt_tokens == 10)
        first.failure = second.failure = UnavailableError("out of order")
        second.compute.clear()
        reading = asyncio.create_task(router.generate(ask(max_tokens=5, request_id="r")))
        await second.accepted.wait()
        old, first.failure = router.fleet.workers[0].view.incarnation, None
        first.restart()
        await first.server.__aexit__(None, None, None)
        await router.serve(first, router.log.tracer())
        await router.until(lambda: router.fleet.workers[0].view.incarnation != old)
        second.compute.set()
        assert (await reading).token_ids == TOKENS[:5]
        assert [work.request_id for work in first.works] == ["r", "r.3"]
        assert all(source == PUSHED for decode in router.decodes for source in decode.sources)
        await router.check_idle()


async def test_a_prefill_worker_that_drains_is_left_for_free(rig: Make) -> None:
    async with rig(num_prefill=2, router=RouterConfig(prefill_retries=0, local_prefill_tokens=0)) as router:
        for prefill in router.prefills:
            prefill.refusal = UnavailableError("the server is draining", reason="DRAINING")
        reading = asyncio.create_task(router.generate(ask(max_tokens=5)))
        await eventually(lambda: any(prefill.works for prefill in router.prefills))
        draining, other = sorted(router.prefills, key=lambda prefill: -len(prefill.works))
        other.refusal = None
        draining.hub.publish_draining()
        assert (await reading).token_ids == TOKENS[:5]
        assert all(source == PUSHED for decode in router.decodes for source in decode.sources)
        assert router.value("pageferry_prefill_failures_total", next="other_prefill") == 0
