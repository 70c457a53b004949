"""Requests by their profiles: who may go, who waits for what, and what is seen of it."""

import asyncio
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import asking
import pytest
from fake_workers import LAYOUT, TOKENS, FakeWorker, Make, Rig, Script, eventually
from hand_clock import HandClock

from pageferry.core.config import Config, RouterConfig
from pageferry.core.errors import FailedPreconditionError, InvalidArgumentError, PermissionDeniedError
from pageferry.core.formats import PageFormat
from pageferry.core.tenants import Tenant
from pageferry.router.ask import Ask
from pageferry.router.candidates import Demand
from pageferry.router.lanes import Lanes
from pageferry.router.metrics import RouterMetrics
from pageferry.router.profiles import Profiles
from pageferry.router.watched_file import CHECK_S
from pageferry.v1 import inference_pb2 as pb

FP32, BF16 = (replace(LAYOUT, format=PageFormat.parse(text)) for text in ("fp32", "bf16"))
ask = partial(asking.ask, max_tokens=2)


@pytest.fixture
def rig(tiny_model: Path, tmp_path: Path) -> Make:
    def make(text: str = "", **options: Any) -> Rig:
        path = tmp_path / "profiles.toml"
        path.write_text(text)
        router = RouterConfig(local_prefill_tokens=0, profiles_file=str(path))
        return Rig(str(tiny_model), Script(TOKENS), **{"router": router, "config": Config()} | options)

    return make


def counts(router: Rig, name: str) -> tuple[int, int]:
    """Queued and running requests of a profile."""
    status = next(status for status in router.frontend.get_status().profiles if status.name == name)
    return status.queued, status.running


async def load(router: Rig, worker: FakeWorker, **changes: Any) -> None:
    """Let a worker tell of a load, and wait until the router has heard."""
    worker.publish(**changes)
    view = next(one.view for one in router.fleet.workers if one.address == worker.address)
    await router.until(lambda: all(getattr(view.load, name) == value for name, value in changes.items()))


async def under_way(router: Rig, *requests: pb.GenerateRequest) -> list["asyncio.Task[Any]"]:
    """Requests that come one after the other, and stay with the decode worker until its `admit` is set."""
    router.decode.admit.clear()
    answers = []
    for request in requests:
        before = router.frontend.num_live
        answers.append(asyncio.create_task(router.generate(request)))
        await eventually(lambda before=before: router.frontend.num_live == before + 1)
    return answers


async def finish(router: Rig, answers: list["asyncio.Task[Any]"]) -> None:
    router.decode.admit.set()
    await asyncio.gather(*answers)
    await router.check_idle()


async def test_a_profile_decides_what_workers_are_asked(rig: Make) -> None:
    async with rig() as router:
        for profile in ("", "throughput", "interactive"):
            await router.generate(ask(profile=profile, priority=3))
        works = [(work.profile, work.priority, work.speculate) for work in router.decode.works]
        assert works == [("interactive", 3, True), ("throughput", 103, False), ("interactive", 3, True)]


async def test_an_unknown_profile_is_refused_with_those_that_are_there(rig: Make) -> None:
    async with rig("[profiles.vip]") as router:
        message = "profile is 'slow', must be one of interactive, throughput, quality, vip"
        with pytest.raises(InvalidArgumentError, match=message):
            await router.generate(ask(profile="slow"))


async def test_spans_and_status_tell_what_was_asked_and_what_is_in_effect(rig: Make) -> None:
    text = "[[profiles.throughput.switch]]\nuse = 'interactive'\nhours = '00:00-23:59'\n"
    text += "[[profiles.throughput.switch]]\nuse = 'interactive'\nhours = '23:59-00:00'"
    async with rig(text) as router:
        await router.generate(ask(profile="throughput"))
        spans = [span for span in router.log.spans if span.name == "pageferry.request"]
        attributes = spans[0].attributes
        assert attributes["pageferry.profile"] == "throughput"
        assert attributes["pageferry.profile.in_effect"] == "interactive"
        assert {one.name: one.in_effect for one in router.frontend.get_status().profiles} == {
            "interactive": "interactive",
            "throughput": "interactive",
            "quality": "quality",
        }
        labels = {"profile": "throughput", "in_effect": "interactive"}
        assert router.value("pageferry_profile_info", **labels) == 1
        assert router.value("pageferry_profile_info", profile="throughput", in_effect="throughput") == 0
        assert router.value("pageferry_profile_switches_total", profile="throughput", to="interactive") == 1


async def test_no_more_of_a_profile_run_than_it_may_and_others_pass(rig: Make) -> None:
    async with rig("[profiles.throughput]\nmax_running = 2\nbatch_window_ms = 0") as router:
        answers = await under_way(router, *[ask(profile="throughput")] * 4)
        assert counts(router, "throughput") == (2, 2)
        answers += await under_way(router, ask(priority=200))
        assert counts(router, "interactive") == (0, 1)
        await finish(router, answers)
        assert counts(router, "throughput") == (0, 0)


async def test_a_batch_goes_when_it_is_complete(rig: Make) -> None:
    async with rig("[profiles.throughput]\nbatch_window_ms = 3_600_000\nbatch_size = 3") as router:
        answers = await under_way(router, ask(profile="throughput"), ask(profile="throughput"))
        assert counts(router, "throughput") == (2, 0)
        answers += await under_way(router, ask(priority=200))
        assert counts(router, "interactive") == (0, 1)
        answers += await under_way(router, ask(profile="throughput"))
        assert counts(router, "throughput") == (0, 3)
        await finish(router, answers)


async def test_a_batch_counts_nobody_who_has_left(rig: Make) -> None:
    text = "[profiles.throughput]\nbatch_window_ms = 3_600_000\nbatch_size = 2"
    async with rig(text) as router:
        (gone,) = await under_way(router, ask(profile="throughput"))
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        answers = await under_way(router, ask(profile="throughput"))
        assert counts(router, "throughput") == (1, 0)
        answers += await under_way(router, ask(profile="throughput"))
        assert counts(router, "throughput") == (0, 2)
        await finish(router, answers)


async def test_the_end_of_a_window_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "profiles.toml"
    path.write_text("[profiles.throughput]\nbatch_window_ms = 1")
    profiles, opened = Profiles(str(path)), asyncio.Event()
    lanes = Lanes(profiles, opened.set)
    asks = [Ask([1], Demand(1, 1), profiles.choose("throughput")) for _ in range(2)]
    for one in asks:
        lanes.join(one)
    assert [lanes.holds(one) for one in asks] == [True, True]
    await asyncio.wait_for(opened.wait(), 60)
    assert [lanes.holds(one) for one in asks] == [False, False]


async def test_slots_are_kept_for_a_profile_that_goes_before(rig: Make) -> None:
    text = "[profiles.throughput]\nbatch_window_ms = 0\n[profiles.vip]\npriority = -10\nreserved_seqs = 2"
    async with rig(text) as router:
        await load(router, router.decode, running=4)  # of 8 slots
        answers = await under_way(router, *[ask(profile="throughput")] * 4)
        assert counts(router, "throughput") == (2, 2)
        answers += await under_way(router, ask(profile="vip"))
        assert counts(router, "vip") == (0, 1)
        answers += await under_way(router, ask(profile="throughput"))
        assert counts(router, "throughput") == (3, 2)  # one is taken, one still kept
        answers += await under_way(router, ask(profile="vip"))
        assert counts(router, "vip") == (0, 2)
        await load(router, router.decode, running=3)
        await eventually(lambda: counts(router, "throughput") == (2, 3))
        await finish(router, answers)


async def test_a_profile_goes_where_the_pages_are_that_it_wants_and_holds_nobody_up(rig: Make) -> None:
    async with rig(num_decode=2, prefill_layout=FP32, decode_layouts=[BF16]) as router:
        exact, coarse = router.decodes
        for _ in range(3):
            await router.generate(ask(profile="quality"))
        assert (len(exact.works), len(coarse.works)) == (3, 0)
        await load(router, exact, running=8)
        waiting = asyncio.create_task(router.generate(ask(profile="quality")))
        await eventually(lambda: counts(router, "quality") == (1, 0))
        await router.generate(ask(priority=1))  # behind it, for a worker that it can't use
        assert len(coarse.works) == 1
        await load(router, exact, running=0)
        await waiting
        await router.check_idle()


async def test_a_request_takes_nothing_that_one_before_it_waits_for(rig: Make) -> None:
    async with rig(num_decode=2, prefill_layout=FP32, decode_layouts=[BF16]) as router:
        exact, coarse = router.decodes
        await load(router, exact, running=7, pages_free=4)  # a slot, and pages for a short prompt
        await load(router, coarse, running=8)
        long = asyncio.create_task(router.generate(ask(profile="quality", num_prompt=200)))
        await eventually(lambda: counts(router, "quality") == (1, 0))
        short = asyncio.create_task(router.generate(ask(priority=1)))
        await eventually(lambda: counts(router, "interactive") == (1, 0))
        await load(router, exact, running=0, pages_free=100)
        await load(router, coarse, running=0)
        await asyncio.gather(long, short)
        assert len(exact.works[0].prompt_ids) == 200


async def test_a_profile_whose_pages_nobody_has_is_refused_by_name(rig: Make) -> None:
    async with rig() as router:
        with pytest.raises(
            FailedPreconditionError, match=r"wants pages in one of fp32, bf16, fp16; .* have int8"
        ) as no:
            await router.generate(ask(profile="quality"))
        assert no.value.reason == "NO_PAGE_FORMAT"
        with pytest.raises(FailedPreconditionError):
            await router.generate(ask(profile="quality", max_tokens=1))  # its prompt's pages would be no better


async def test_an_urgent_prompt_goes_to_a_prefill_worker_full_of_others(rig: Make) -> None:
    async with rig() as router:
        full = [pb.PriorityLoad(priority=100, waiting=20, queued_prompt_tokens=10_000)]
        router.prefill.snapshot.load.priorities.extend(full)
        await load(router, router.prefill, waiting=20, running=4, queued_prompt_tokens=10_000)
        answers = await under_way(router, ask(profile="throughput"))
        await eventually(lambda: counts(router, "throughput") == (1, 0))
        answers += await under_way(router, ask())
        assert counts(router, "interactive") == (0, 1)
        del router.prefill.snapshot.load.priorities[:]
        await load(router, router.prefill, waiting=0, running=0, queued_prompt_tokens=0)
        await finish(router, answers)


async def test_objectives_are_counted_and_told(rig: Make) -> None:
    text = "[profiles.strict]\nttft_slo_ms = 0.001\ntoken_slo_ms = 3_600_000\n"
    async with rig(text) as router:
        await router.generate(ask(profile="strict"))
        await router.generate(ask())
        span = next(span for span in router.log.spans if span.name == "pageferry.request")
        assert span.attributes["pageferry.slo.ttft_met"] is False
        assert span.attributes["pageferry.slo.token_met"] is True
        assert router.value("pageferry_slo_total", profile="strict", objective="ttft", result="missed") == 1
        assert router.value("pageferry_slo_total", profile="strict", objective="token", result="met") == 1
        names = {sample.name for family in router.metrics.registry.collect() for sample in family.samples}
        assert "pageferry_slo_total" in names
        assert router.value("pageferry_slo_total", profile="interactive", objective="ttft", result="met") == 0


def test_tenants_may_name_theirs_and_have_the_first_by_default() -> None:
    profiles = Profiles()
    tenant = Tenant("acme", profiles=("throughput", "quality", "gone"))
    assert profiles.choose("", tenant).name == "throughput"
    assert profiles.choose("quality", tenant).name == "quality"
    assert profiles.choose("", Tenant("b", profiles=("quality", "interactive"))).name == "interactive"
    with pytest.raises(PermissionDeniedError, match="'interactive', tenant acme may name throughput, quality") as no:
        profiles.choose("interactive", tenant)
    assert no.value.reason == "PROFILE_DENIED"
    with pytest.raises(PermissionDeniedError, match="none that is there"):
        profiles.choose("", Tenant("c", profiles=("gone",)))


def test_the_file_is_read_again_and_a_wrong_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path = HandClock(), tmp_path / "profiles.toml"
    path.write_text("[profiles.vip]")
    profiles = Profiles(str(path), RouterMetrics(), clock)
    came = profiles.choose("vip")

    def change(text: str) -> None:
        path.write_text(text)
        os.utime(path, ns=(0, round(clock.now * 1e9)))
        clock.now += CHECK_S
        profiles.look(0, lambda: 0.0)

    change("[profiles.vip]\nmax_running = 3")
    assert profiles.now(came).max_running == 3
    change("[profiles.vip")
    assert profiles.now(came).max_running == 3
    assert "profiles_refused" in caplog.messages
    change("")
    assert "vip" not in profiles.names
    assert profiles.now(came) == came.profile
    with pytest.raises(InvalidArgumentError, match="can't be read"):
        Profiles(str(tmp_path / "none.toml"))


def test_a_profile_switches_by_load_and_back_on_the_clocks_that_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "profiles.toml"
    path.write_text(
        "[[profiles.throughput.switch]]\nuse = 'quality'\nqueued_above = 10\nqueued_below = 2\nfor_s = 5\n"
        "[[profiles.interactive.switch]]\nuse = 'throughput'\nhours = '00:00-01:00'\n"
    )
    clock, wall, metrics = HandClock(), HandClock(7200.0), RouterMetrics()
    profiles = Profiles(str(path), metrics, clock, wall)

    def look(now: float, queued: int) -> list[str]:
        clock.now = now
        profiles.look(queued, lambda: 0.0)
        return [profiles.choose(name).profile.name for name in ("throughput", "interactive")]

    assert look(0, 11) == ["throughput", "interactive"]
    assert look(5, 11) == ["quality", "interactive"]
    assert look(6, 5) == ["quality", "interactive"]
    wall.now += 86_400 - 7200
    assert look(7, 1) == ["quality", "throughput"]
    os.utime(path, ns=(0, 1))  # read again: what is on stays on
    assert look(9, 1) == ["quality", "throughput"]
    assert look(12, 1) == ["throughput", "throughput"]
    value = metrics.registry.get_sample_value(
        "pageferry_profile_switches_total", {"profile": "throughput", "to": "quality"}
    )
    assert value == 1
