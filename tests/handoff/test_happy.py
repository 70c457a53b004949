"""Whole hand-offs between a prefill and a decode worker."""

import asyncio
from dataclasses import replace

import pytest
from fake_engine import GROUPED, LAYOUT, LAYOUTS, golden
from handoff_bench import Bench, Gate, Settings, Side, drain, failure, target_of, until

from pageferry.core.config import SchedulerConfig, ServerConfig
from pageferry.core.groups import full_group
from pageferry.core.layout import CacheLayout, PageKey
from pageferry.core.plan import Plan
from pageferry.v1 import types_pb2
from pageferry.v1.inference_pb2 import WorkerLoad

B = LAYOUT.page_size
FRAME_BYTES = sum(length for _, length in LAYOUT.pages[0].ranges(0, LAYOUT.num_layers))


@pytest.mark.parametrize("num_prompt", [1, B - 1, B, B + 1, 5 * B, 40])
async def test_tokens_are_golden_and_pages_are_counted_alike(num_prompt: int) -> None:
    async with Bench() as bench:
        result = await bench.generate("r", range(num_prompt), max_tokens=6)
        expected = list(enumerate(golden(range(num_prompt), 6)))
        assert result.tokens == expected
        token = result.first_token.token
        assert (token.position, token.token_id) == expected[0]
        num_pages = LAYOUT.num_pages(num_prompt)
        assert (result.shipped.pages, result.shipped.bytes) == (num_pages, num_pages * FRAME_BYTES)
        assert (result.completed.reason, result.completed.steps) == (types_pb2.FINISH_REASON_LENGTH, 5)
        assert result.completed.first_step_ms > 0
        await bench.until_idle()


async def test_both_sides_loads_tell_what_was_handed_over_and_what_broke_off() -> None:
    def told(side: Side) -> tuple[int, ...]:
        load = side.publisher.hub.load or WorkerLoad()
        return (load.handoffs, load.handoff_pages, load.handoff_bytes, load.handoff_failures)

    async with Bench() as bench:
        sides = (bench.p, bench.d)

        async def have_told(*expected: int) -> bool:
            return [told(side) for side in sides] == [expected, expected]

        for number in (1, 2):
            shipped = (await bench.generate(f"r{number}", range(100 * number, 100 * number + 2 * B + 1))).shipped
            assert (shipped.pages, shipped.bytes) == (3, 3 * FRAME_BYTES)
        await until(lambda: have_told(2, 6, 6 * FRAME_BYTES, 0))
        gate = bench.p.runner.before = Gate(after=1)  # when the first chunk has been shipped
        decode = bench.decode("r", range(6 * B))
        prefill = bench.prefill("r", range(6 * B), (await anext(decode)).reserved)
        assert (await anext(prefill)).HasField("accepted")
        await until(bench.d.has_received(8))
        decode.cancel()
        gate.open()
        await until(lambda: have_told(2, 6, 6 * FRAME_BYTES, 1))
        await failure(prefill)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("num_prompt", [3, 5 * B, 5 * B + 2, 40])
@pytest.mark.field("sgl-project/sglang#27004")
async def test_pages_are_equal_byte_for_byte_on_both_sides(num_prompt: int, layout: CacheLayout) -> None:
    prompt = range(num_prompt)
    async with Bench(Settings(layout=layout)) as bench:
        received: dict[PageKey, bytes] = {}

        def note(plan: Plan) -> None:
            if not bench.d.runner.plans:
                (ticket,) = bench.d.tickets.issued
                received.update({key: bytes(bench.d.pages.at(place)) for key, place in ticket.places.items()})

        bench.d.runner.before = note
        result = await bench.generate("r", prompt, max_tokens=6)
        assert result.tokens == list(enumerate(golden(prompt, 6, layout)))
        assert received == {key: bench.p.pages.content(key, prompt) for key in received}
        assert result.shipped.pages == len(received)
        sizes = [layout.of(key).ranges(0, layout.of(key).num_layers) for key in received]
        assert result.shipped.bytes == sum(length for ranges in sizes for _, length in ranges)
        await bench.until_idle()


async def test_a_prompt_shares_what_is_cached_of_every_group() -> None:
    prompt = range(6 * B + 1)
    async with Bench(Settings(layout=GROUPED)) as bench:
        await bench.generate("first", prompt, max_tokens=3)
        longer = [*prompt, *range(500, 500 + B)]
        result = await bench.generate("longer", longer, max_tokens=3)
        assert result.tokens == list(enumerate(golden(longer, 3, GROUPED)))
        assert (result.reserved.cached_tokens, result.reserved.cached_pages) == (6 * B, 6)
        assert result.first_token.cached_tokens == 6 * B
        assert result.shipped.pages == 2 * 2  # of both groups, a full page and a tail
        await bench.until_idle()


@pytest.mark.field("llm-d/llm-d-router#1155", "laike9m/Cyberbrain#39")
async def test_more_bytes_than_a_message_may_have_travel_in_pieces() -> None:
    layout = replace(LAYOUT, page_size=16, groups=(full_group(8),), num_kv_heads=4, head_dim=128)
    settings = Settings(layout=layout, num_pages=40, scheduler=SchedulerConfig(chunk_tokens=128))
    async with Bench(settings) as bench:
        prompt = [position % 900 for position in range(32 * 16)]
        result = await bench.generate("r", prompt, max_tokens=2)
        assert result.shipped.bytes > ServerConfig().max_message_bytes
        assert result.shipped.pages == 32
        assert [token_id for _, token_id in result.tokens] == golden(prompt, 2, layout)
        await bench.until_idle()


async def test_what_the_decode_worker_has_cached_is_not_sent() -> None:
    async with Bench() as bench:
        await bench.generate("first", range(4 * B), max_tokens=3)
        result = await bench.generate("again", [*range(4 * B), 900], max_tokens=3)
        assert (result.reserved.cached_tokens, result.reserved.cached_pages) == (4 * B, 4)
        assert (result.accepted.cached_tokens, result.first_token.cached_tokens) == (4 * B, 4 * B)
        assert (result.shipped.pages, result.completed.cached_tokens) == (1, 4 * B)
        assert result.tokens == list(enumerate(golden([*range(4 * B), 900], 3)))
        await bench.until_idle()


async def test_a_prompt_cached_whole_is_sent_again_but_for_the_pages_before_its_last_token() -> None:
    async with Bench() as bench:
        await bench.generate("first", range(4 * B), max_tokens=3)
        result = await bench.generate("again", range(4 * B), max_tokens=3)
        assert (result.reserved.cached_tokens, result.first_token.cached_tokens) == (3 * B, 4 * B - 1)
        assert result.shipped.pages == 1
        assert result.tokens == list(enumerate(golden(range(4 * B), 3)))


async def test_a_resume_continues_behind_the_forced_tokens() -> None:
    whole = golden(range(7), 8)
    async with Bench() as bench:
        result = await bench.generate("r", range(7), max_tokens=8, output_ids=tuple(whole[:3]))
        assert result.tokens == list(enumerate(whole))[3:]
        await bench.until_idle()


async def test_a_prompt_computed_by_the_decode_worker_gives_the_same_tokens() -> None:
    async with Bench() as bench:
        (reserved, *rest) = await drain(bench.decode("r", range(3 * B + 1), local=True, max_tokens=5))
        assert reserved.reserved.ticket == b""
        tokens = [token.token_id for message in rest for token in message.tokens.tokens]
        assert tokens == golden(range(3 * B + 1), 5)
        assert rest[-1].completed.prefill_ms > 0
        assert bench.p.runner.plans == []
        await bench.until_idle()


async def test_a_prefill_without_a_target_is_one_token() -> None:
    async with Bench() as bench:
        accepted, first = await drain(bench.prefill("r", range(5), max_tokens=1))
        assert accepted.HasField("accepted")
        assert first.first_token.token.token_id == golden(range(5), 1)[0]
        assert first.first_token.finish_reason == types_pb2.FINISH_REASON_LENGTH
        assert bench.d.runner.plans == []
        await bench.until_idle()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 1}, types_pb2.FINISH_REASON_LENGTH),
        ({"max_tokens": 9, "stop_ids": (7,)}, types_pb2.FINISH_REASON_STOP),
    ],
)
async def test_a_first_token_that_ends_it_commits_nothing(fields: dict[str, object], reason: int) -> None:
    async with Bench() as bench:
        bench.p.runner.script["r", 0] = 7
        decode = bench.decode("r", range(3 * B), **fields)
        reserved = (await anext(decode)).reserved
        _, first = await drain(bench.prefill("r", range(3 * B), reserved, **fields))
        assert (first.first_token.token.token_id, first.first_token.finish_reason) == (7, reason)
        decode.cancel()  # the router's duty: the push may be given up before it has reached the decode worker
        assert bench.d.runner.plans == []
        await bench.until_idle()


async def test_pages_travel_while_the_next_chunk_is_computed() -> None:
    async with Bench() as bench:
        gate = bench.p.runner.before = Gate(after=1)
        request = asyncio.create_task(bench.generate("r", range(6 * B), max_tokens=3))
        await gate.reached()
        await until(bench.d.has_received(2))
        gate.open()
        assert (await request).tokens == list(enumerate(golden(range(6 * B), 3)))
        await bench.until_idle()


async def test_the_first_token_does_not_wait_for_the_transfer() -> None:
    async with Bench() as bench:
        gate = Gate()
        bench.d.executor.submit(gate)
        decode = bench.decode("r", range(3 * B), max_tokens=3)
        prefill = bench.prefill("r", range(3 * B), (await anext(decode)).reserved, max_tokens=3)
        kinds = [(await anext(prefill)).WhichOneof("event") for _ in range(2)]
        assert kinds == ["accepted", "first_token"]
        assert bench.d.runner.plans == []
        gate.open()
        assert (await anext(prefill)).WhichOneof("event") == "shipped"
        assert (await drain(decode))[-1].HasField("completed")
        await bench.until_idle()


async def test_many_requests_at_once_keep_apart() -> None:
    settings = Settings(num_pages=40, scheduler=SchedulerConfig(chunk_tokens=16, max_num_seqs=8))
    async with Bench(settings) as bench:
        prompts = {f"r{i}": range(i * 20, i * 20 + 5 + i) for i in range(8)}
        requests = [bench.generate(name, prompt, max_tokens=6) for name, prompt in prompts.items()]
        results = await asyncio.gather(*requests)
        for result, prompt in zip(results, prompts.values(), strict=True):
            assert result.tokens == list(enumerate(golden(prompt, 6)))
        await bench.until_idle()


async def test_the_hand_off_is_one_trace_with_both_ends_of_the_push() -> None:
    async with Bench() as bench:
        await bench.generate("r", range(5 * B), max_tokens=4)
        await bench.until_idle()
        names = sorted(span.name for span in bench.exporter.get_finished_spans())
        prefill = next(span for span in bench.exporter.get_finished_spans() if span.name.endswith("/Prefill"))
        trace = [
            span for span in bench.exporter.get_finished_spans() if span.context.trace_id == prefill.context.trace_id
        ]
        assert names.count("kv.push") == 2
        assert names.count("prefill.queue") == names.count("decode.queue") == names.count("decode.generate") == 1
        assert names.count("prefill.chunk") == 3
        children = [span.name for span in trace if span.parent and span.parent.span_id == prefill.context.span_id]
        assert sorted(children) == ["kv.push", "prefill.chunk", "prefill.chunk", "prefill.chunk", "prefill.queue"]
        sent, received = (span for span in trace if span.name == "kv.push")
        for span in (sent, received):
            assert span.attributes is not None
            assert span.attributes["pageferry.handoff.pages"] == 5
            assert span.attributes["pageferry.handoff.bytes"] == 5 * FRAME_BYTES
            assert span.attributes["pageferry.handoff.format"] == "int8"


async def test_the_target_is_checked_before_any_work() -> None:
    async with Bench() as bench:
        decode = bench.decode("r", range(3 * B))
        reserved = (await anext(decode)).reserved
        for field, value in (("ticket", b"short"), ("kv_endpoint", ""), ("cached_tokens", 3), ("cached_tokens", 3 * B)):
            wrong = target_of(reserved)
            setattr(wrong, field, value)
            error = await failure(bench.prefill("r", range(3 * B), wrong))
            assert error.code == "INVALID_ARGUMENT"
            assert field in error.message
        decode.cancel()
        assert bench.p.runner.plans == []
        await bench.until_idle()
