"""Many requests at once that end in every way, in an order that nobody planned."""

import asyncio
import random
from typing import Any

import grpc
import pytest
from fake_engine import LAYOUT, LAYOUTS, golden
from handoff_bench import Bench, RawPush, Settings, until

from pageferry.core.config import SchedulerConfig
from pageferry.core.layout import CacheLayout
from pageferry.v1 import decode_pb2 as pb

B = LAYOUT.page_size
NUM_REQUESTS = 40


async def _one(bench: Bench, index: int, chance: random.Random) -> str:
    """A request that is handed over, and cut off at some point or left alone; returns what became of it."""
    prompt = [(7 * index + position) % 300 for position in range(chance.randrange(1, 8 * B))]
    max_tokens = chance.randrange(1, 12)
    kind = chance.choice(["whole", "whole", "cancel", "cancel", "broken sender"])
    decode, reserved = await _reserved(bench, f"r{index}", prompt, max_tokens)
    try:
        if kind == "broken sender":
            push = RawPush(bench, reserved, f"r{index}")
            await push.open()
            issued = next(ticket for ticket in bench.d.tickets.issued if ticket.id == reserved.ticket)
            await push.send_page(chance.choice(sorted(issued.places)), prompt)
            push.call.cancel()
            async for _ in decode:
                pass
            raise AssertionError("a request went on without its pages")
        prefill = bench.prefill(f"r{index}", prompt, reserved, max_tokens=max_tokens)
        num_messages = chance.randrange(6) if kind == "cancel" else 10**6
        ends_at_once = False
        async for message in prefill:
            ends_at_once |= bool(message.first_token.finish_reason)
            num_messages -= 1
            if num_messages < 0:
                return kind
        if ends_at_once:
            return kind
        tokens = []
        async for message in decode:
            tokens += [token.token_id for token in message.tokens.tokens]
            num_messages -= 1
            if num_messages < 0:
                return kind
        assert tokens == golden(prompt, max_tokens, bench.d.settings.layout)
    except grpc.aio.AioRpcError as error:
        assert (kind, error.code()) == ("broken sender", grpc.StatusCode.UNAVAILABLE)
        return kind
    else:
        return kind
    finally:
        decode.cancel()


async def _reserved(bench: Bench, name: str, prompt: list[int], max_tokens: int) -> tuple[Any, pb.Reserved]:
    """The call and what it holds, as soon as there is room."""
    found = []

    async def has_room() -> bool:
        decode = bench.decode(name, prompt, max_tokens=max_tokens)
        try:
            found.append((decode, (await anext(decode)).reserved))
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return bool(found)

    await until(has_room)
    return found[0]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_tokens_are_golden_and_nothing_stays_behind(seed: int, layout: CacheLayout) -> None:
    prefill = Settings(40, layout=layout, scheduler=SchedulerConfig(chunk_tokens=8, max_num_seqs=4))
    decode = Settings(40, layout=layout, scheduler=SchedulerConfig(max_num_seqs=8, headroom_pages=1))
    async with Bench(prefill, decode) as bench:
        chance = random.Random(seed)
        requests = [_one(bench, index, random.Random(chance.random())) for index in range(NUM_REQUESTS)]
        outcomes = await asyncio.gather(*requests)
        assert set(outcomes) == {"whole", "cancel", "broken sender"}
        await bench.until_idle()
        result = await bench.generate("last", range(5 * B), max_tokens=5)
        assert result.tokens == list(enumerate(golden(range(5 * B), 5, layout)))
        await bench.until_idle()
