"""Workers behind names: they come, go and come back under other addresses, and requests see nothing of it."""

import asyncio
import gc
import logging
import socket
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import asking
import pytest
from fake_workers import LAYOUT, FakeDecode, FakePrefill, FakeWorker, Make, Rig, eventually

from pageferry.core.addresses import host_port
from pageferry.core.errors import UnavailableError
from pageferry.router.workers import Role, WorkerState

UNREACHED = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
ask = partial(asking.ask, max_tokens=3)


@asynccontextmanager
async def whole(rig: Make) -> AsyncIterator[Rig]:
    """One worker of each role, 10.0.0.1 and 10.0.1.1, which are known."""
    async with rig(behind={"prefill": set(), "decode": set()}, wait_ready=False) as router:
        await put(router, router.prefill, "10.0.0.1")
        await put(router, router.decode, "10.0.1.1")
        await router.until(lambda: router.frontend.ready)
        yield router


async def put(router: Rig, worker: FakeWorker, host: str) -> None:
    """Let the worker's role's name lead there, too."""
    if not worker.address:
        await router.serve(worker, router.log.tracer())
    router.at[host_port(host, 1)] = worker.address
    behind(router, worker).add(host)


def behind(router: Rig, worker: FakeWorker) -> set[str]:
    assert router.behind is not None
    hosts = router.behind["prefill" if isinstance(worker, FakePrefill) else "decode"]
    assert isinstance(hosts, set)
    return hosts


def another(router: Rig) -> FakeDecode:
    decode = FakeDecode(router.script, router, LAYOUT)
    router.decodes.append(decode)
    return decode


def states(router: Rig) -> dict[str, str]:
    return {worker.address: worker.state for worker in router.frontend.get_status().workers}


def reason(router: Rig, address: str) -> str:
    return next(worker.reason for worker in router.frontend.get_status().workers if worker.address == address)


async def cut(worker: FakeWorker) -> None:
    """It is gone, and its port refuses connections."""
    await worker.server.__aexit__(None, None, None)


async def test_every_address_behind_a_name_is_a_worker(rig: Make) -> None:
    async with whole(rig) as router:
        await put(router, another(router), "10.0.1.2")
        await put(router, another(router), "fd00::3")
        await router.until(lambda: len(router.fleet.ready(Role.DECODE)) == 3)
        assert states(router) == dict.fromkeys(("10.0.0.1:1", "10.0.1.1:1", "10.0.1.2:1", "[fd00::3]:1"), "ready")
        await asyncio.gather(*(router.generate(ask()) for _ in range(12)))
        assert all(decode.works for decode in router.decodes)


async def test_a_name_without_addresses_yet_is_not_ready_and_says_so(rig: Make) -> None:
    async with rig(behind={"prefill": set(), "decode": set()}, wait_ready=False) as router:
        await router.until(lambda: reason(router, "dns:///decode:1") == "it has no address")
        assert states(router) == {"dns:///prefill:1": "warming", "dns:///decode:1": "warming"}
        assert not router.frontend.ready
        with pytest.raises(UnavailableError, match=r"dns:///decode:1 is warming \(it has no address\)") as caught:
            await router.generate(ask())
        assert caught.value.retry_after_ms == 1000
        await put(router, router.decode, "10.0.1.1")
        await router.until(lambda: states(router).get("10.0.1.1:1") == "ready")
        assert not router.frontend.ready  # a prefill worker is yet to be seen: its name may be wrong
        await put(router, router.prefill, "10.0.0.1")
        await router.until(lambda: router.frontend.ready)
        assert states(router) == {"10.0.0.1:1": "ready", "10.0.1.1:1": "ready"}


async def test_a_prefill_worker_that_is_replaced_leaves_the_router_ready(rig: Make) -> None:
    async with whole(rig) as router:
        await cut(router.prefill)
        behind(router, router.prefill).clear()
        await router.until(lambda: "10.0.0.1:1" not in states(router))
        assert router.frontend.ready and states(router)["dns:///prefill:1"] == "down"
        behind(router, router.prefill).add("127.0.0.1")  # whose port 1 nobody serves
        await router.until(lambda: states(router).get("127.0.0.1:1") == "warming")
        assert router.frontend.ready
        assert len((await router.generate(ask())).token_ids) == 3


@pytest.mark.parametrize("answer", [UNREACHED, set()], ids=["failing", "empty"])
async def test_a_lookup_without_an_answer_keeps_what_lives_and_is_logged_once(
    rig: Make, answer: OSError | set[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with whole(rig) as router:
        assert router.behind is not None
        router.behind["decode"] = answer
        caplog.set_level(logging.INFO)
        await router.until(lambda: "dns:///decode:1" in states(router))
        await looks(router, 5)
        assert states(router) == {"10.0.0.1:1": "ready", "10.0.1.1:1": "ready", "dns:///decode:1": "stale"}
        assert len((await router.generate(ask())).token_ids) == 3
        router.behind["decode"] = {"10.0.1.1"}
        await router.until(lambda: "dns:///decode:1" not in states(router))
        told = [record.pageferry_fields["problem"] for record in caplog.records if record.msg == "name_looked_up"]  # type: ignore[attr-defined]
        assert len(told) == 2 and told[0] and not told[1]


async def looks(router: Rig, number: int) -> None:
    """As many lookups and more."""
    for _ in range(2 * number):  # of two names
        changed = asyncio.Event()
        router.fleet.listeners.append(changed.set)
        await changed.wait()
        router.fleet.listeners.remove(changed.set)


async def test_a_dead_worker_goes_with_an_empty_answer_and_stays_with_a_failing_one(rig: Make) -> None:
    async with whole(rig) as router:
        assert router.behind is not None
        router.behind["decode"] = UNREACHED
        await cut(router.decode)
        await router.until(lambda: states(router)["10.0.1.1:1"] == "down")
        await looks(router, 5)
        assert states(router)["10.0.1.1:1"] == "down"  # it may come back there, and nobody else would say so
        router.behind["decode"] = set()
        await router.until(lambda: "10.0.1.1:1" not in states(router))
        assert not router.frontend.ready and states(router)["dns:///decode:1"] == "down"


async def test_a_worker_that_a_name_leaves_ends_what_it_has_and_gets_nothing_more(rig: Make) -> None:
    async with whole(rig) as router:
        first, second = router.decode, another(router)
        gate = first.pause_at[2] = asyncio.Event()
        live = asyncio.create_task(router.generate(ask()))
        await eventually(lambda: first.num_live == 1)
        await put(router, second, "10.0.1.2")
        behind(router, first).remove("10.0.1.1")
        await router.until(lambda: states(router)["10.0.1.1:1"] == "draining")
        assert reason(router, "10.0.1.1:1") == "dns:///decode:1 leads there no more"
        await looks(router, 5)
        for _ in range(4):
            await router.generate(ask())
        assert (len(first.works), len(second.works)) == (1, 4)
        gate.set()
        assert len((await live).token_ids) == 3
        await router.until(lambda: "10.0.1.1:1" not in states(router))
        await eventually(lambda: first.hub.num_watchers == 0)
        await router.check_idle()


async def test_of_a_worker_that_is_removed_nothing_is_heard_any_more(rig: Make) -> None:
    """What it told last may be there and not read yet: it would be a worker again, to the others' layouts."""
    async with whole(rig) as router:
        await put(router, another(router), "10.0.1.2")
        await router.until(lambda: states(router).get("10.0.1.2:1") == "ready")
        (watch,) = [task for task in asyncio.all_tasks() if task.get_name() == "watch 10.0.1.1:1"]
        is_ending: list[bool] = []

        def look() -> None:
            if "10.0.1.1:1" not in states(router):
                is_ending.append(watch.done() or watch.cancelling() > 0)

        router.fleet.listeners.append(look)
        behind(router, router.decode).remove("10.0.1.1")
        await router.until(lambda: bool(is_ending))
        assert is_ending[0]


async def test_a_worker_that_a_name_leaves_and_finds_again_goes_on(rig: Make) -> None:
    async with whole(rig) as router:
        first = router.decode
        gate = first.pause_at[2] = asyncio.Event()
        live = asyncio.create_task(router.generate(ask()))
        await eventually(lambda: first.num_live == 1)
        await put(router, another(router), "10.0.1.2")
        behind(router, first).remove("10.0.1.1")
        await router.until(lambda: states(router)["10.0.1.1:1"] == "draining")
        behind(router, first).add("10.0.1.1")
        await router.until(lambda: states(router)["10.0.1.1:1"] == "ready")
        gate.set()
        assert len((await live).token_ids) == 3


async def test_the_only_worker_is_used_until_another_one_is_ready(rig: Make) -> None:
    async with whole(rig) as router:
        behind(router, router.decode).clear()
        behind(router, router.decode).add("127.0.0.1")  # which is loading, say
        await router.until(lambda: "127.0.0.1:1" in states(router))
        await looks(router, 5)
        assert len((await router.generate(ask())).token_ids) == 3
        await put(router, another(router), "10.0.1.2")
        await router.until(lambda: "10.0.1.1:1" not in states(router))
        assert len((await router.generate(ask())).token_ids) == 3
        assert len(router.decode.works) == 1


async def test_a_worker_that_dies_with_requests_is_removed_and_they_go_on(rig: Make) -> None:
    async with whole(rig) as router:
        first = router.decode
        first.pause_at[2] = asyncio.Event()
        live = asyncio.create_task(router.generate(ask()))
        await eventually(lambda: first.num_live == 1)
        await put(router, another(router), "10.0.1.2")
        await router.until(lambda: states(router).get("10.0.1.2:1") == "ready")
        behind(router, first).remove("10.0.1.1")
        await cut(first)
        assert len((await live).token_ids) == 3
        await router.until(lambda: "10.0.1.1:1" not in states(router))


async def test_one_process_behind_two_addresses_is_one_worker(rig: Make) -> None:
    async with whole(rig) as router:
        await put(router, router.decode, "fd00::1")
        await router.until(lambda: states(router).get("[fd00::1]:1") == "refused")
        assert reason(router, "[fd00::1]:1") == "it is the process that 10.0.1.1:1 leads to"
        assert states(router)["10.0.1.1:1"] == "ready" and router.frontend.ready


async def test_an_address_that_is_there_twice_counts_its_work_where_it_is_used(rig: Make) -> None:
    async with whole(rig) as router:
        router.fleet._add(Role.DECODE, "10.0.1.1:1")
        first, second = router.fleet.of(Role.DECODE)
        await router.until(lambda: second.state is WorkerState.REFUSED)
        pause = router.decode.pause_at[1] = asyncio.Event()
        live = asyncio.create_task(router.generate(ask()))
        await eventually(lambda: router.decode.num_live == 1)
        assert (first.num_granted, second.num_granted) == (1, 0)
        pause.set()
        assert len((await live).token_ids) == 3


async def test_a_fault_of_our_own_does_not_end_the_lookups(rig: Make, caplog: pytest.LogCaptureFixture) -> None:
    async with whole(rig) as router:

        def fail_once() -> None:
            if router.fleet._names[0].addresses != {"10.0.0.1:1"}:
                router.fleet.listeners.remove(fail_once)
                raise RuntimeError("a fault")

        router.fleet.listeners.append(fail_once)
        behind(router, router.prefill).clear()
        await eventually(lambda: "discovery_failed" in caplog.messages)
        await put(router, router.prefill, "10.0.0.2")
        await router.until(lambda: states(router).get("10.0.0.2:1") is not None)


def own_tasks() -> Counter[str]:
    """The router's, by what they run; the workers' servers have others."""
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return Counter(name for name in names if name.startswith(("Worker.", "Feed.", "Discovery.", "_AioCall.", "_end")))


async def test_nothing_is_left_of_workers_that_came_and_went(rig: Make) -> None:
    async with whole(rig) as router:
        await eventually(lambda: router.fleet.of(Role.DECODE)[0].feed.is_live)
        tasks, gone = own_tasks(), []
        for _ in range(5):
            decode = another(router)
            await put(router, decode, "10.0.1.2")
            await router.until(lambda: states(router).get("10.0.1.2:1") == "ready")
            await asyncio.gather(*(router.generate(ask()) for _ in range(4)))
            gone.append(weakref.ref(router.fleet.workers[-1]))
            behind(router, decode).remove("10.0.1.2")
            await router.until(lambda: "10.0.1.2:1" not in states(router))
            await eventually(lambda: decode.hub.num_watchers == 0)  # noqa: B023 - it is over before the next one
        await eventually(lambda: own_tasks() == tasks)
        gc.collect()
        assert [worker() for worker in gone] == [None] * 5
        await router.check_idle()
