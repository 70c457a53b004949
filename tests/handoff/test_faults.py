"""Hand-offs that go wrong: both sides say why, retryably where it is, and hold nothing afterwards."""

import asyncio
from dataclasses import replace

import grpc
import pytest
from fake_engine import GROUPED, LAYOUT, FakeClock, golden
from handoff_bench import Bench, Gate, RawPush, Settings, drain, error_of, failure, until

from pageferry.core.config import HandoffConfig, SchedulerConfig
from pageferry.core.errors import PageferryError
from pageferry.core.formats import PageFormat
from pageferry.core.groups import CacheGroup, full_group
from pageferry.core.layout import CacheLayout, PageKey

B = LAYOUT.page_size
PROMPT = range(6 * B)

OTHER_LAYOUTS = [
    (replace(LAYOUT, page_size=8), "page_size 4", "8"),
    (replace(LAYOUT, format=PageFormat.parse("fp32")), "format int8", "fp32"),
    (replace(LAYOUT, format=PageFormat.parse("int4")), "format int8", "int4"),
    (replace(LAYOUT, format=PageFormat.parse("k=int8,v=int4:asym")), "format int8", "k=int8,v=int4:asym"),
    (replace(LAYOUT, fingerprint="0" * 32), "fingerprint f", "0"),
    (replace(LAYOUT, format=PageFormat.parse("int8:channel")), "format int8", "int8:channel"),
    (replace(LAYOUT, groups=(full_group(2),)), "groups 0-2=full", "0-1=full"),
    (replace(LAYOUT, groups=(CacheGroup((0, 1, 2), 8, 2),)), "groups 0-2=full", "0-2=window:8,sinks:2"),
    (replace(LAYOUT, version=2), "version 1", "2"),
]


@pytest.mark.field("vllm-project/vllm#42895", "ROCm/ATOM#2249")
@pytest.mark.parametrize(("layout", "ours", "theirs"), OTHER_LAYOUTS)
async def test_workers_whose_layouts_differ_refuse_with_both_values(
    layout: CacheLayout, ours: str, theirs: str
) -> None:
    async with Bench(Settings(), Settings(layout=layout)) as bench:
        decode = bench.decode("r", PROMPT)
        error = await failure(bench.prefill("r", PROMPT, (await anext(decode)).reserved))
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", "LAYOUT_MISMATCH")
        assert ours in error.message
        assert theirs in error.message
        assert bench.p.runner.plans == []
        decode.cancel()
        await bench.until_idle()


@pytest.mark.field("vllm-project/vllm#42895", "ROCm/ATOM#2249")
@pytest.mark.parametrize(("layout", "ours", "theirs"), OTHER_LAYOUTS)
async def test_a_push_with_another_layout_is_refused_and_the_ticket_stays(
    layout: CacheLayout, ours: str, theirs: str
) -> None:
    async with Bench() as bench:
        decode = bench.decode("r", range(B), max_tokens=3)
        reserved = (await anext(decode)).reserved
        with pytest.raises(PageferryError) as caught:
            await RawPush(bench, reserved).open(layout)
        assert caught.value.code == "FAILED_PRECONDITION"
        assert ours in caught.value.message
        await drain(bench.prefill("r", range(B), reserved, max_tokens=3))
        assert (await drain(decode))[-1].HasField("completed")
        await bench.until_idle()


@pytest.mark.field("sgl-project/sglang#30233", "sgl-project/sglang#33507", "sgl-project/sglang#34208")
async def test_a_prompt_that_the_prefill_worker_can_never_hold_is_one_error_with_both_numbers() -> None:
    async with Bench(Settings(num_pages=4), Settings()) as bench:
        decode = bench.decode("r", range(4 * B + 1))
        error = await failure(bench.prefill("r", range(4 * B + 1), (await anext(decode)).reserved))
        assert error.code == "INVALID_ARGUMENT"
        assert "17 tokens" in error.message
        assert "16 tokens" in error.message
        decode.cancel()
        await bench.until_idle()
        assert bench.d.runner.plans == bench.p.runner.plans == []


@pytest.mark.field("vllm-project/aibrix#2289", "sgl-project/sglang#30233")
async def test_a_prefill_worker_whose_engine_fails_half_way_tells_both() -> None:
    async with Bench() as bench:
        num_steps = 0

        def fail(_: object) -> None:
            nonlocal num_steps
            num_steps += 1
            if num_steps == 2:
                raise MemoryError("no memory left")

        bench.p.runner.before = fail
        decode = bench.decode("r", PROMPT)
        prefill = bench.prefill("r", PROMPT, (await anext(decode)).reserved)
        error = await failure(prefill)
        assert (error.code, error.reason) == ("UNAVAILABLE", "ENGINE_FAILED")
        assert "MemoryError" in error.message
        decode.cancel()
        await until(bench.d.is_idle)
        assert bench.d.runner.plans == []


@pytest.mark.field("vllm-project/aibrix#2289", "tenstorrent/tt-inference-server#3926", "llm-d/llm-d#2433")
async def test_a_prefill_worker_that_dies_before_its_commit_fails_the_request_at_once() -> None:
    async with Bench() as bench:
        decode = bench.decode("r", PROMPT)
        push = RawPush(bench, (await anext(decode)).reserved)
        await push.open()
        await push.send_page(0, PROMPT)
        push.call.cancel()
        async with asyncio.timeout(60):
            error = await failure(decode)
        assert (error.code, error.retryable) == ("UNAVAILABLE", True)
        assert "broke" in error.message
        await until(bench.d.is_idle)


async def test_a_prefill_worker_that_stops_half_way_fails_the_request() -> None:
    async with Bench() as bench:
        gate = bench.p.runner.before = Gate(after=1)
        decode = bench.decode("r", PROMPT)
        prefill = bench.prefill("r", PROMPT, (await anext(decode)).reserved)
        await gate.reached()
        await until(bench.d.has_received(2))
        stopping = asyncio.create_task(bench.p.server.drain(0))
        error = await failure(prefill)
        assert error.code == "UNAVAILABLE"
        assert (await failure(decode)).code == "UNAVAILABLE"
        gate.open()
        assert await stopping == 1
        await bench.until_idle()


async def test_a_prefill_worker_dead_after_its_commit_is_no_failure() -> None:
    async with Bench() as bench:
        decode = bench.decode("r", PROMPT, max_tokens=4)
        push = RawPush(bench, (await anext(decode)).reserved)
        await push.open()
        for index in range(6):
            await push.send_page(index, PROMPT)
        first = golden(PROMPT, 1)[0]
        assert (await push.commit(len(PROMPT), first)).committed.pages == 6
        push.call.cancel()
        messages = await drain(decode)
        tokens = [token.token_id for message in messages for token in message.tokens.tokens]
        assert tokens == golden(PROMPT, 4)
        await until(bench.d.is_idle)


TAILED = range(6 * B + 1)


@pytest.mark.parametrize("num_sent", range(9))
async def test_a_push_of_groups_that_breaks_anywhere_gives_every_page_and_tail_back(num_sent: int) -> None:
    async with Bench(Settings(layout=GROUPED)) as bench:
        decode = bench.decode("r", TAILED)
        push = RawPush(bench, (await anext(decode)).reserved)
        await push.open()
        (ticket,) = bench.d.tickets.issued
        keys = sorted(ticket.places)
        # The sinks' page and what the window of 10 reaches from position 24 on; every page of the full group.
        assert [key.index for key in keys] == [0, 3, 4, 5, 6, *range(7)]
        assert [key.is_tail for key in keys] == [key.index == 6 for key in keys]
        for key in keys[:num_sent]:
            await push.send_page(key, TAILED)
        if num_sent % 2:
            push.call.cancel()
        else:
            decode.cancel()
        await until(bench.d.is_idle)
        result = await bench.generate("next", TAILED, max_tokens=4)
        assert result.tokens == list(enumerate(golden(TAILED, 4, GROUPED)))
        await bench.until_idle()


@pytest.mark.field("vllm-project/vllm-ascend#12522")
@pytest.mark.parametrize("lost", [PageKey(0, 3), PageKey(1, 0), PageKey(0, 6, is_tail=True)])
async def test_a_lost_page_of_any_group_is_never_run_on(lost: PageKey) -> None:
    async with Bench(Settings(layout=GROUPED)) as bench:
        decode = bench.decode("r", TAILED)
        push = RawPush(bench, (await anext(decode)).reserved)
        await push.open()
        (ticket,) = bench.d.tickets.issued
        for key in ticket.places:
            if key != lost:
                await push.send_page(key, TAILED)
        with pytest.raises(PageferryError, match="11 of 12 pages"):
            await push.commit(len(TAILED), 5)
        assert (await failure(decode)).reason == "PAGES_MISSING"
        await until(bench.d.is_idle)


@pytest.mark.field("vllm-project/vllm-ascend#12522", "vllm-project/vllm#49250", "vllm-project/vllm#50754")
async def test_a_corrupted_page_is_never_run_on() -> None:
    async with Bench() as bench:
        decode = bench.decode("r", PROMPT)
        push = RawPush(bench, (await anext(decode)).reserved)
        await push.open()
        await push.send_page(0, PROMPT)
        with pytest.raises(PageferryError) as caught:
            await push.send_page(1, PROMPT, crc_error=1)
        assert (caught.value.code, caught.value.reason) == ("DATA_LOSS", "CHECKSUM_MISMATCH")
        error = await failure(decode)
        assert (error.code, error.reason, error.retryable) == ("UNAVAILABLE", "CHECKSUM_MISMATCH", True)
        assert bench.d.runner.plans == []
        await until(bench.d.is_idle)


@pytest.mark.field("vllm-project/vllm-ascend#12522", "vllm-project/vllm#49250", "vllm-project/vllm#50754")
async def test_a_lost_page_is_never_run_on() -> None:
    async with Bench() as bench:
        decode = bench.decode("r", PROMPT)
        push = RawPush(bench, (await anext(decode)).reserved)
        await push.open()
        for index in (0, 1, 2, 4, 5):
            await push.send_page(index, PROMPT)
        with pytest.raises(PageferryError, match="5 of 6 pages"):
            await push.commit(len(PROMPT), 5)
        error = await failure(decode)
        assert (error.code, error.reason, error.retryable) == ("UNAVAILABLE", "PAGES_MISSING", True)
        assert bench.d.runner.plans == []
        await until(bench.d.is_idle)
        again = await drain(bench.decode("r.2", PROMPT, local=True))  # and finds nothing of it in the cache
        assert again[-1].completed.cached_tokens == 0
        assert [token.token_id for message in again for token in message.tokens.tokens] == golden(PROMPT, 8)
        await bench.until_idle()


@pytest.mark.field("aws-samples/aws-do-eks#84", "vllm-project/vllm#47021")
async def test_pages_that_the_decode_worker_has_not_taken_yet_are_not_used_again() -> None:
    async with Bench(Settings(num_pages=12), Settings()) as bench:
        gate = Gate()
        bench.d.executor.submit(gate)
        decode = bench.decode("r", PROMPT, max_tokens=5)
        prefill = bench.prefill("r", PROMPT, (await anext(decode)).reserved, max_tokens=5)
        while not (await anext(prefill)).HasField("first_token"):
            pass
        for number in range(20):  # each fills what is free of the pool
            start = 100 + 30 * number
            await drain(bench.prefill(f"other{number}", range(start, start + 6 * B), max_tokens=1))
        gate.open()
        await drain(prefill)
        tokens = [token.token_id for message in await drain(decode) for token in message.tokens.tokens]
        assert tokens == golden(PROMPT, 5)
        await bench.until_idle()


@pytest.mark.parametrize("page_index", [0, 6, 10**6])
async def test_a_page_that_is_not_expected_breaks_the_push(page_index: int) -> None:
    async with Bench() as bench:
        decode = bench.decode("r", PROMPT)
        push = RawPush(bench, (await anext(decode)).reserved)
        await push.open()
        await push.send_page(0, PROMPT)
        with pytest.raises(PageferryError, match="page_index"):
            await push.send_page(page_index, PROMPT)
        assert (await failure(decode)).code == "UNAVAILABLE"
        await until(bench.d.is_idle)


async def test_a_token_that_cannot_be_is_refused_at_the_commit() -> None:
    async with Bench() as bench:
        decode = bench.decode("r", range(B))
        push = RawPush(bench, (await anext(decode)).reserved)
        await push.open()
        await push.send_page(0, range(B))
        with pytest.raises(PageferryError, match=r"token_id.*1000"):
            await push.commit(B, 1000)
        assert (await failure(decode)).code == "UNAVAILABLE"
        await until(bench.d.is_idle)


@pytest.mark.field("aws-samples/aws-do-eks#84", "vllm-project/vllm#47021")
async def test_a_silent_sender_loses_its_lease_and_a_late_one_its_ticket() -> None:
    clock = FakeClock()
    settings = Settings(handoff=HandoffConfig(lease_ms=1000), clock=clock)
    async with Bench(Settings(), settings) as bench:
        decode = bench.decode("r", PROMPT)
        reserved = (await anext(decode)).reserved
        push = RawPush(bench, reserved)
        await push.open()
        await push.send_page(0, PROMPT)
        clock.advance(1.1)
        await bench.d.on_engine(lambda: None)  # wakes the thread up: its clock stood still
        error = await failure(decode)
        assert (error.code, error.reason, error.retryable) == ("UNAVAILABLE", "HANDOFF_EXPIRED", True)
        assert (await error_of(push.call)).reason == "HANDOFF_EXPIRED"
        await until(bench.d.is_idle)
        others = await drain(bench.decode("other", range(500, 500 + 60 * B - 8), local=True, max_tokens=2))
        assert others[-1].HasField("completed")  # it has written to the same pages
        with pytest.raises(PageferryError) as caught:
            await RawPush(bench, reserved).open()
        assert (caught.value.code, caught.value.reason) == ("FAILED_PRECONDITION", "HANDOFF_EXPIRED")
        late = await failure(bench.prefill("r", PROMPT, reserved))
        assert (late.code, late.retryable) == ("UNAVAILABLE", True)
        assert "expired" in late.message
        await bench.until_idle()


@pytest.mark.field("vllm-project/vllm#46283", "vllm-project/vllm#46289")
async def test_a_sender_that_hangs_while_the_client_leaves_costs_nothing_each_time() -> None:
    async with Bench() as bench:
        pushes = []
        for index in range(20):
            decode = bench.decode(f"r{index}", PROMPT)
            push = RawPush(bench, (await anext(decode)).reserved, f"r{index}")
            await push.open()
            await push.send_page(0, PROMPT)
            decode.cancel()
            await until(bench.d.is_idle)
            pushes.append(push)
        for push in pushes:  # late, and refused quietly
            with pytest.raises((PageferryError, grpc.aio.UsageError, asyncio.InvalidStateError)):
                await push.commit(len(PROMPT), 5)
        result = await bench.generate("last", PROMPT, max_tokens=3)
        assert result.tokens == list(enumerate(golden(PROMPT, 3)))


async def test_a_ticket_of_another_request_is_refused_and_both_requests_go_on() -> None:
    async with Bench() as bench:
        requests = {name: bench.decode(name, PROMPT, max_tokens=3) for name in ("r1", "r2")}
        reserved = {name: (await anext(decode)).reserved for name, decode in requests.items()}
        for taken_by in ("r2", ""):
            with pytest.raises(PageferryError, match="is of another request") as caught:
                await RawPush(bench, reserved["r1"], taken_by).open()
            assert (caught.value.code, caught.value.reason) == ("FAILED_PRECONDITION", "TICKET_OF_ANOTHER_REQUEST")
        for name, decode in requests.items():
            await drain(bench.prefill(name, PROMPT, reserved[name], max_tokens=3))
            assert (await drain(decode))[-1].HasField("completed")
        await bench.until_idle()


async def test_a_ticket_opens_once_and_only_at_its_own_incarnation() -> None:
    async with Bench() as bench:
        decode = bench.decode("r", PROMPT)
        reserved = (await anext(decode)).reserved
        push = RawPush(bench, reserved)
        await push.open()
        with pytest.raises(PageferryError) as caught:
            await RawPush(bench, reserved).open()
        assert caught.value.code == "FAILED_PRECONDITION"
        unknown = type(reserved)()
        unknown.CopyFrom(reserved)
        unknown.ticket = b"x" * 16
        with pytest.raises(PageferryError, match="unknown"):
            await RawPush(bench, unknown).open()
        await push.send_page(0, PROMPT)  # the first is unharmed
        decode.cancel()
        await until(bench.d.is_idle)


async def test_no_room_on_the_decode_worker_is_said_at_once_with_a_time_to_try_again() -> None:
    async with Bench(Settings(), Settings(num_pages=8)) as bench:
        first = bench.decode("first", PROMPT, max_tokens=2)
        await anext(first)
        error = await failure(bench.decode("second", range(500, 500 + 3 * B), max_tokens=2))
        assert error.code == "RESOURCE_EXHAUSTED"
        assert error.retry_after_ms
        first.cancel()
        await until(bench.d.is_idle)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [1000]}, "prompt_ids is 1000"),
        ({"prompt": [5], "stop_ids": (1500,)}, "stop_token_ids is 1500"),
        ({"prompt": range(60), "max_tokens": 41}, "60 tokens and max_tokens 41 are 101 tokens, the model takes 100"),
        ({"prompt": [5], "output_ids": (1, 2), "max_tokens": 2}, "output_ids"),
    ],
)
async def test_a_wrong_request_is_refused_by_both_workers(fields: dict[str, object], message: str) -> None:
    async with Bench(Settings(max_model_tokens=100)) as bench:
        for call in (
            bench.prefill("r", **fields),
            bench.decode("r", **fields),
            bench.decode("r", **fields, local=True),
        ):
            error = await failure(call)
            assert error.code == "INVALID_ARGUMENT"
            assert message in error.message
        await bench.until_idle()


async def test_a_full_queue_refuses_at_once() -> None:
    settings = Settings(scheduler=SchedulerConfig(chunk_tokens=8, max_num_seqs=1, max_waiting=1))
    async with Bench(settings) as bench:
        gate = bench.p.runner.before = Gate()
        running = bench.prefill("running", PROMPT)
        await gate.reached()
        others = [bench.prefill(name, PROMPT) for name in ("second", "third")]

        async def have_come() -> bool:
            return bench.p.worker.num_calls == 3

        await until(have_come)
        gate.open()
        assert sum([await _is_refused(call) for call in others]) == 1
        await drain(running)
        await bench.until_idle()


async def _is_refused(call: object) -> bool:
    try:
        await drain(call)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return True
    return False


async def test_a_draining_worker_refuses_new_work_and_ends_the_old() -> None:
    async with Bench() as bench:
        gate = bench.d.runner.before = Gate(after=2)
        live = bench.decode("live", range(5), local=True, max_tokens=6)
        await gate.reached()
        draining = asyncio.create_task(bench.d.server.drain(10))
        refused = await failure(bench.decode("new", range(5), local=True))
        assert refused.code == "UNAVAILABLE"
        gate.open()
        assert (await drain(live))[-1].HasField("completed")
        assert await draining == 0


async def test_a_drain_whose_grace_is_over_ends_calls_with_unavailable() -> None:
    async with Bench() as bench:
        gate = bench.d.runner.before = Gate(after=2)
        live = bench.decode("live", range(5), local=True, max_tokens=6)
        await gate.reached()
        draining = asyncio.create_task(bench.d.server.drain(0.01))
        assert (await failure(live)).code == "UNAVAILABLE"
        gate.open()
        assert await draining == 1
        await until(bench.d.is_idle)
