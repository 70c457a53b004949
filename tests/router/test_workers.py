"""The fleet: workers that come, go, start over, fall silent, or do not fit."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import asking
import grpc
import pytest
from fake_workers import LAYOUT, FakeWorker, Make, Rig, eventually

from pageferry.core.errors import InternalError, InvalidArgumentError, PageferryError, UnavailableError
from pageferry.core.formats import PageFormat
from pageferry.core.groups import CacheGroup, groups_text
from pageferry.core.layout import CacheLayout
from pageferry.router import dispatch, workers
from pageferry.router.workers import Role, Worker, WorkerState
from pageferry.runtime.convert import layout_to_proto
from pageferry.v1 import inference_pb2 as pb, worker_pb2
from pageferry.v1.worker_pb2 import WatchResponse

ask = partial(asking.ask, max_tokens=3)


def inject(fake: FakeWorker, **changes: object) -> None:
    """Put a message into the watch streams that does not follow the one before."""
    watch = fake.hub.Watch

    async def broken(request: object, context: object) -> object:
        fake.hub.Watch = watch  # the next one is whole
        sequence = 0
        async for message in watch(request, context):
            sequence += 1
            yield (
                message
                if sequence < 2
                else WatchResponse(incarnation=message.incarnation, load=pb.WorkerLoad(), **changes)
            )

    fake.hub.Watch = broken


def states(router: Rig) -> list[str]:
    return [worker.state for worker in router.frontend.get_status().workers]


async def test_status_tells_role_state_load_and_layout(rig: Make) -> None:
    async with rig() as router:
        prefill, decode = router.frontend.get_status().workers
        assert (prefill.role, prefill.state, prefill.address) == ("prefill", "ready", router.prefill.address)
        assert (decode.role, decode.load.pages_total, decode.layout.page_size) == ("decode", 100, 16)
        assert len(bytes.fromhex(decode.incarnation)) == 16


@pytest.mark.field("vllm-project/vllm#42895", "ROCm/ATOM#2249")
@pytest.mark.parametrize(
    "layout",
    [
        replace(LAYOUT, page_size=32),
        replace(LAYOUT, format=PageFormat.parse("int4")),
        replace(LAYOUT, format=PageFormat.parse("k=bf16,v=int8")),
        replace(LAYOUT, format=PageFormat.parse("int8:channel")),
        replace(LAYOUT, fingerprint="0" * 32),
        replace(LAYOUT, version=2),
        replace(LAYOUT, groups=(CacheGroup((0,), 64), CacheGroup((1,)))),
    ],
)
async def test_workers_whose_pages_differ_are_refused_with_both_values(rig: Make, layout: object) -> None:
    async with rig(prefill_layout=layout, wait_ready=False) as router:
        await router.until(lambda: states(router) == ["refused", "refused"])
        assert not router.frontend.ready
        assert not router.frontend.list_models().models[0].ready
        reason = router.frontend.get_status().workers[0].reason
        assert router.prefill.address in reason and router.decode.address in reason
        differing = next(name for name in ("page_size", "format", "fingerprint", "version", "groups")
                         if getattr(layout, name) != getattr(LAYOUT, name))  # fmt: skip
        assert f"{differing} " in reason
        for value in (getattr(layout, differing), getattr(LAYOUT, differing)):
            assert (groups_text(value) if differing == "groups" else str(value)) in reason
        with pytest.raises(UnavailableError, match="is refused"):
            await router.generate(ask())
        assert router.decode.works == []


@pytest.mark.field("vllm-project/vllm#42895", "ROCm/ATOM#2249")
async def test_a_worker_that_comes_back_with_another_page_size_gets_no_work(rig: Make) -> None:
    async def come_back(worker: FakeWorker, layout: CacheLayout) -> None:
        worker.snapshot.layout.CopyFrom(layout_to_proto(layout))
        worker.restart()
        await worker.server.__aexit__(None, None, None)
        await router.serve(worker, router.log.tracer())

    async with rig() as router:
        await router.generate(ask())
        await come_back(router.prefill, replace(LAYOUT, page_size=32))
        await router.until(lambda: states(router) == ["refused", "refused"])
        assert not router.frontend.ready
        assert "page_size 32" in router.frontend.get_status().workers[0].reason
        assert "16" in router.frontend.get_status().workers[0].reason
        with pytest.raises(UnavailableError, match="is refused"):
            await router.generate(ask())
        assert (len(router.prefill.works), len(router.decode.works)) == (1, 1)
        await come_back(router.prefill, LAYOUT)
        await router.until(lambda: states(router) == ["ready", "ready"])
        assert len((await router.generate(ask())).token_ids) == 3
        await router.check_idle()


async def test_a_prefill_worker_that_can_convert_its_pages_fits(rig: Make) -> None:
    async with rig(prefill_layout=replace(LAYOUT, format=PageFormat.parse("bf16"))) as router:
        assert states(router) == ["ready", "ready"]
        await router.generate(ask())
        assert len(router.prefill.works) == 1


@pytest.mark.field("vllm-project/vllm#42895", "ROCm/ATOM#2249")
async def test_a_pair_that_fits_is_used_beside_one_that_does_not(rig: Make) -> None:
    async with rig(num_prefill=2) as router:
        odd = router.prefills[1]
        odd.snapshot.layout.fingerprint = "0" * 32
        odd.restart()
        await odd.server.__aexit__(None, None, None)
        await router.serve(odd, router.log.tracer())
        await router.until(lambda: states(router) == ["ready", "refused", "ready"])
        assert router.frontend.ready
        for _ in range(3):
            await router.generate(ask())
        assert (len(router.prefills[0].works), odd.works) == (3, [])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "other"}, "its model is 'other', the router's is 'tiny'"),
        ({"role": worker_pb2.WORKER_ROLE_PREFILL}, "it is no decode worker"),
    ],
)
async def test_a_worker_of_another_kind_is_refused_and_logged_once(
    rig: Make, change: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig(num_prefill=0, num_decode=1) as router:
        for name, value in change.items():
            setattr(router.decode.snapshot, name, value)
        await router.decode.server.__aexit__(None, None, None)
        await router.until(lambda: states(router) == ["down"])
        await router.serve(router.decode, router.log.tracer())
        await router.until(lambda: states(router) == ["refused"])
        assert reason in router.frontend.get_status().workers[0].reason
        await asyncio.sleep(0)  # later messages say the same, which is no news
    (refused,) = [record for record in caplog.records if record.getMessage() == "worker_refused"]
    assert reason in refused.pageferry_fields["reason"]


@pytest.mark.field("vllm-project/vllm#42895")
async def test_a_lone_prefill_worker_with_another_model_shows_as_not_ready(rig: Make) -> None:
    async with rig() as router:
        assert router.frontend.ready
        router.prefill.snapshot.model = "other"
        await router.prefill.server.__aexit__(None, None, None)
        await router.until(lambda: states(router) == ["down", "ready"])
        assert router.frontend.ready  # the decode worker can do it all
        await router.serve(router.prefill, router.log.tracer())
        await router.until(lambda: states(router) == ["refused", "ready"])
        assert not router.frontend.ready


async def test_a_gap_makes_the_view_stale_until_it_is_made_anew(rig: Make) -> None:
    async with rig(num_prefill=0) as router:
        worker = router.fleet.workers[0]
        seen: list[tuple[str, bool, str]] = []
        router.fleet.listeners.append(lambda: seen.append((worker.state.value, router.frontend.ready, worker.reason)))
        inject(router.decode, sequence=7)
        await router.decode.server.__aexit__(None, None, None)
        await router.serve(router.decode, router.log.tracer())
        await router.until(lambda: ("stale", False, "watch stream has a gap: message 7 came after 1") in seen)
        answer = await router.generate(ask())  # waits until the view is whole again, if it is not yet
        assert len(answer.token_ids) == 3
        assert worker.state is WorkerState.READY


@pytest.mark.field("llm-d/llm-d-router#2853")
async def test_another_process_on_the_address_starts_from_nothing(rig: Make) -> None:
    async with rig() as router:
        worker = router.fleet.workers[1]
        router.decode.hub.publish_cache([b"h" * 16], [])
        await router.until(lambda: worker.view.num_cached_pages == 1)
        old = worker.view.incarnation
        router.decode.restart()
        await router.decode.server.__aexit__(None, None, None)
        await router.serve(router.decode, router.log.tracer())
        await router.until(lambda: worker.view.incarnation != old)
        assert worker.view.num_cached_pages == 0
        await router.until(lambda: states(router) == ["ready", "ready"])
        assert len((await router.generate(ask())).token_ids) == 3


async def test_a_silent_worker_is_stale_then_down_and_comes_back(rig: Make) -> None:
    async with rig(num_prefill=0) as router:
        worker = router.fleet.workers[0]
        seen = [WorkerState.READY]
        pause = asyncio.Event()
        watch = router.decode.hub.Watch

        async def silent(request: object, context: object) -> object:
            await pause.wait()
            async for message in watch(request, context):
                yield message

        router.decode.hub.Watch = silent
        following = asyncio.create_task(
            worker.watch(lambda: seen.append(worker.state) if worker.state is not seen[-1] else None, silence_s=0.05)
        )
        await eventually(lambda: seen[1:] == [WorkerState.STALE, WorkerState.DOWN])
        pause.set()
        await eventually(lambda: seen[-1] is WorkerState.READY)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_fault_of_our_own_amid_a_change_costs_no_worker_for_good(rig: Make) -> None:
    async with rig() as router:
        broken = iter([True])

        def fail_once() -> None:
            if next(broken, False):
                raise AssertionError("a mistake")

        seen: list[str] = []
        router.fleet.listeners.append(lambda: seen.extend(worker.reason for worker in router.fleet.workers))
        router.fleet.listeners.append(fail_once)
        await router.until(lambda: "internal error: AssertionError" in seen)
        await router.until(lambda: states(router) == ["ready", "ready"])
        assert len((await router.generate(ask())).token_ids) == 3


async def test_a_request_that_cannot_be_dispatched_holds_nobody_up(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as router:

        def fail(*_: object) -> None:
            raise AssertionError("a mistake")

        with monkeypatch.context() as broken:
            broken.setattr(dispatch, "choose", fail)
            with pytest.raises(InternalError, match="AssertionError"):
                await router.generate(ask())
        assert len((await router.generate(ask())).token_ids) == 3


async def test_a_draining_worker_gets_nothing_new(rig: Make) -> None:
    async with rig(num_decode=2) as router:
        router.decode.hub.publish_draining()
        await router.until(lambda: "draining" in states(router))
        for _ in range(3):
            await router.generate(ask())
        assert (router.decodes[0].works, len(router.decodes[1].works)) == ([], 3)
        router.decodes[1].hub.publish_draining()
        await router.until(lambda: not router.frontend.ready)
        with pytest.raises(UnavailableError, match="is draining") as caught:
            await router.generate(ask())
        assert caught.value.retry_after_ms


async def test_not_ready_before_the_workers_were_seen(rig: Make) -> None:
    async with rig(wait_ready=False) as router:
        assert states(router) == ["warming", "warming"]
        with pytest.raises(UnavailableError, match="is warming"):
            await router.generate(ask())
        await router.until(lambda: router.frontend.ready)


async def test_requests_go_on_without_prefill_workers(rig: Make) -> None:
    async with rig() as router:
        await router.prefill.server.__aexit__(None, None, None)
        await router.until(lambda: states(router) == ["down", "ready"])
        assert router.frontend.ready
        assert len((await router.generate(ask())).token_ids) == 3


async def test_an_untried_prefill_worker_that_fails_does_not_draw_all_requests(rig: Make) -> None:
    async with rig(num_prefill=2) as router:
        broken, good = router.prefills
        broken.failure = InternalError("engine failed")
        good.publish(prefill_tokens_per_s=1e6)
        await router.until(lambda: router.fleet.workers[1].view.load.prefill_tokens_per_s == 1e6)
        for _ in range(5):
            assert len((await router.generate(ask())).token_ids) == 3
        assert (len(broken.works), len(good.works)) == (1, 5)


async def test_both_decode_workers_are_used(rig: Make) -> None:
    async with rig(num_decode=2) as router:
        for decode in router.decodes:
            decode.pause_at = {1: asyncio.Event()}
        reading = [asyncio.create_task(router.generate(ask())) for _ in range(8)]
        await eventually(lambda: sum(len(decode.works) for decode in router.decodes) == 8)
        assert [len(decode.works) for decode in router.decodes] == [4, 4]
        for decode in router.decodes:
            decode.pause_at[1].set()
        await asyncio.gather(*reading)
        await router.check_idle()


async def test_a_request_is_told_once_that_a_worker_is_lost_however_long_it_stays_away(rig: Make) -> None:
    async with rig() as router:
        (worker,) = router.fleet.of(Role.PREFILL)
        told: list[PageferryError] = []
        changes: list[WorkerState] = []
        with worker.relied_on(told.append):
            router.fleet.listeners.append(lambda: changes.append(worker.state))
            await router.prefill.server.__aexit__(None, None, None)
            await eventually(lambda: changes.count(WorkerState.DOWN) >= 3)
        assert len(told) == 1


async def test_an_attempt_that_ends_as_the_one_before_is_no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers and the queue are looked at after each change: hundreds that are away would take a whole core."""
    monkeypatch.setattr(workers, "_FIRST_PAUSE_S", 0)
    news: list[WorkerState] = []
    outcomes: Iterator[Exception] = iter([*3 * [TimeoutError()], *2 * [InvalidArgumentError("odd")]])
    over = asyncio.Event()

    async def fail(*_: object) -> None:
        outcome = next(outcomes, None)
        if outcome is None:
            over.set()
            await asyncio.Event().wait()
        assert outcome is not None
        raise outcome

    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        worker = Worker(Role.DECODE, "127.0.0.1:1", channel, "tiny")
        monkeypatch.setattr(worker, "_follow", fail)
        watching = asyncio.create_task(worker.watch(lambda: news.append(worker.state), 1))
        await over.wait()
        watching.cancel()
        await worker.feed.close()
    assert news == [WorkerState.DOWN, WorkerState.REFUSED]
