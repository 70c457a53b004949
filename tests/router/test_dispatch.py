"""Who goes first and who is let wait at all, over workers whose load a test sets."""

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import asking
import pytest
from fake_workers import LAYOUT, TOKENS, Make, Rig, Script, eventually

from pageferry.core.config import Config, RouterConfig, SchedulerConfig
from pageferry.core.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from pageferry.core.prefix import page_hashes
from pageferry.v1 import inference_pb2 as pb

ask = partial(asking.ask, max_tokens=2)


@pytest.fixture
def rig(tiny_model: Path) -> Make:
    def make(*, ageing: float = 250.0, **options: Any) -> Rig:
        config = Config(scheduler=SchedulerConfig(ageing_tokens_per_s=ageing))
        return Rig(str(tiny_model), Script(TOKENS), **{"config": config} | options)

    return make


async def set_load(router: Rig, **load: Any) -> None:
    router.decode.publish(**load)
    name, value = next(iter(load.items()))
    await router.until(lambda: getattr(router.fleet.workers[-1].view.load, name) == value)


async def in_order(router: Rig, *requests: pb.GenerateRequest) -> list[int]:
    """Lengths of the prompts in the order in which they were sent off, after they have come in the given one."""
    await set_load(router, running=8)  # all of its slots
    answers = []
    for number, request in enumerate(requests, 1):
        answers.append(asyncio.create_task(router.generate(request)))
        await eventually(lambda number=number: router.frontend.get_status().queued == number)
    await set_load(router, running=7)  # room for one that the worker has not told of yet
    await asyncio.gather(*answers)
    await router.check_idle()
    return [len(work.prompt_ids) for work in router.decode.works]


@pytest.mark.field("sgl-project/sglang#32549", "ROCm/ATOM#1835", "sgl-project/sglang#34623")
async def test_short_prompts_go_before_long_ones_and_equal_ones_as_they_came(rig: Make) -> None:
    async with rig(ageing=0.001) as router:  # a busy machine takes its time between two
        sent = await in_order(router, ask(200), ask(40), ask(200, token_id=201), ask(39))
        assert sent == [39, 40, 200, 200]
        assert [work.prompt_ids[0] for work in router.decode.works if len(work.prompt_ids) == 200] == [200, 201]


async def test_a_long_prompt_that_has_waited_goes_before_short_ones_that_come_later(rig: Make) -> None:
    async with rig(ageing=1e9) as router:
        assert await in_order(router, ask(200), ask(40), ask(39)) == [200, 40, 39]


async def test_priority_goes_before_length(rig: Make) -> None:
    async with rig(ageing=0.001) as router:
        assert await in_order(router, ask(40), ask(200, priority=-1), ask(39)) == [200, 39, 40]


async def test_what_is_cached_does_not_count_as_long(rig: Make) -> None:
    async with rig(ageing=0.001) as router:
        hashes = page_hashes([200] * 200, LAYOUT.page_size, salt="", layout_key=LAYOUT.cache_key)
        router.decode.hub.publish_cache(hashes, [])
        await router.until(lambda: router.fleet.workers[-1].view.num_cached_pages > 0)
        assert await in_order(router, ask(40, token_id=201), ask(200)) == [200, 40]


@pytest.mark.field("Avarok-Cybersecurity/atlas#482", "tensorflow/serving#1265")
async def test_what_would_come_too_late_is_refused_at_once(rig: Make) -> None:
    async with rig() as router:
        await set_load(router, running=8)
        router.prefill.publish(queued_prompt_tokens=10_000, waiting=50, prefill_tokens_per_s=100.0)
        await router.until(lambda: router.fleet.workers[0].view.load.waiting == 50)
        with pytest.raises(ResourceExhaustedError, match="the first token is expected in") as caught:
            await router.generate(ask(400), deadline=time.monotonic() + 60)
        assert caught.value.reason == "TTFT_BEYOND_DEADLINE"
        assert caught.value.retry_after_ms
        assert router.prefill.works == router.decode.works == []
        spans = await router.log.wait(1)
        assert [span.attributes["pageferry.reason"] for span in spans] == ["TTFT_BEYOND_DEADLINE"]
        patient = asyncio.create_task(router.generate(ask(400)))  # it has no deadline
        await eventually(lambda: router.frontend.get_status().queued == 1)
        patient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await patient
        await router.check_idle()


@pytest.mark.field("vllm-project/vllm#18826", "vllm-project/vllm#49330")
async def test_a_full_queue_refuses_before_any_work(rig: Make) -> None:
    async with rig(router=RouterConfig(max_queue=1, local_prefill_tokens=0)) as router:
        await set_load(router, running=8)
        waiting = asyncio.create_task(router.generate(ask(40)))
        await eventually(lambda: router.frontend.get_status().queued == 1)
        nonsense = pb.GenerateRequest(prompt="x" * 100)
        nonsense.stop.max_tokens = 0  # were it looked at, it would be an INVALID_ARGUMENT
        with pytest.raises(ResourceExhaustedError, match="queue is full") as caught:
            await router.generate(nonsense)
        assert caught.value.retry_after_ms
        await set_load(router, running=0)
        await waiting
        await router.check_idle()


@pytest.mark.field("vllm-project/vllm#35541", "vllm-project/vllm#39734", "RBLN-SW/vllm-rbln#957")
async def test_a_request_that_fits_nowhere_any_more_does_not_hold_up_the_queue(rig: Make) -> None:
    async with rig(num_decode=2) as router:
        small, large = router.decodes
        for decode, pages in ((small, 8), (large, 64)):
            decode.publish(running=8, pages_total=pages, pages_free=pages)
        decodes = router.fleet.workers[1:]
        await router.until(lambda: [worker.view.capacity_tokens() for worker in decodes] == [128, 1024])
        big = asyncio.create_task(router.generate(ask(100, max_tokens=500)))
        await eventually(lambda: router.frontend.get_status().queued == 1)
        short = asyncio.create_task(router.generate(ask(100, max_tokens=2, priority=1)))
        await eventually(lambda: router.frontend.get_status().queued == 2)
        large.hub.publish_draining()
        with pytest.raises(UnavailableError, match="hold 128 tokens, the request needs 599"):
            await big
        small.publish(running=0, pages_total=8, pages_free=8)
        await short
        await router.check_idle()


@pytest.mark.field("vllm-project/vllm#35541", "vllm-project/vllm#39734", "RBLN-SW/vllm-rbln#957")
async def test_a_request_goes_to_the_workers_that_can_hold_all_of_it(rig: Make) -> None:
    async with rig(num_prefill=2, num_decode=2) as router:
        small, large = (router.prefills[0], router.decodes[0]), (router.prefills[1], router.decodes[1])
        for worker in small:
            worker.publish(pages_total=8, pages_free=8)
        for worker in large:
            worker.publish(pages_total=64, pages_free=64, waiting=1, queued_prompt_tokens=1)  # else preferred
        workers = router.fleet.workers
        await router.until(lambda: [worker.view.capacity_tokens() for worker in workers] == [128, 1024] * 2)
        await router.generate(ask(129))
        assert [len(worker.works) for worker in (*small, *large)] == [0, 0, 1, 1]
        # Its answer needs the large decode worker, its prompt no large prefill one.
        await router.generate(ask(100, max_tokens=30))
        assert [len(worker.works) for worker in (*small, *large)] == [1, 0, 1, 2]
        await router.generate(ask(129, max_tokens=1))
        assert [len(worker.works) for worker in (*small, *large)] == [1, 0, 2, 2]
        with pytest.raises(InvalidArgumentError, match="hold 1024"):
            await router.generate(ask(1025, max_tokens=2))
        await router.check_idle()


@pytest.mark.field("vllm-project/vllm#35541", "vllm-project/vllm#39734", "RBLN-SW/vllm-rbln#957")
@pytest.mark.parametrize("small", ["prefill", "decode"])
async def test_what_exceeds_a_pool_is_refused_with_both_numbers_and_a_short_one_gets_by(rig: Make, small: str) -> None:
    num_usable = 50 * 16
    async with rig() as router:
        for worker, name in ((router.prefill, "prefill"), (router.decode, "decode")):
            pages = 50 if name == small else 100
            worker.publish(pages_total=pages, pages_free=pages)
        await router.until(lambda: {worker.view.load.pages_total for worker in router.fleet.workers} == {50, 100})
        max_tokens = 1 if small == "prefill" else 2  # the last token is not stored; one token needs no decode worker
        for num_prompt in (num_usable - 1, num_usable, num_usable + 1, 1002):
            fits = num_prompt + max_tokens - 1 <= num_usable
            try:
                answer = await router.generate(ask(num_prompt, max_tokens=max_tokens))
            except InvalidArgumentError as error:
                assert not fits and str(num_prompt) in error.message and str(num_usable) in error.message
            else:
                assert fits and len(answer.token_ids) == max_tokens
            assert len((await router.generate(ask(5, max_tokens=max_tokens))).token_ids) == max_tokens
        await router.check_idle()
