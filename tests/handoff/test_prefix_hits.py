"""What counts as found in a prefix cache, and that pages from elsewhere are looked at before they are used."""

import asyncio
import struct
from typing import Any

import pytest
from fake_engine import LAYOUT, golden
from handoff_bench import Bench, Gate, Settings, Side, drain, failure, until
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

B = LAYOUT.page_size


def tokens_of(side: Side) -> tuple[float, float]:
    """Prompt tokens, and those of them that were cached, as the worker counts them."""
    families = text_string_to_metric_families(generate_latest(side.publisher.metrics.registry).decode())
    samples = [sample for family in families for sample in family.samples if sample.name == "pageferry_tokens_total"]
    values = {sample.labels["kind"]: sample.value for sample in samples}
    return values["prompt"], values["cached"]


async def test_each_worker_counts_what_it_looked_up_and_what_it_found() -> None:
    async with Bench() as bench:
        await bench.generate("first", range(4 * B), max_tokens=3)
        await bench.generate("again", [*range(4 * B), 900], max_tokens=3)
        await bench.until_idle()
        assert tokens_of(bench.p) == tokens_of(bench.d) == (8 * B + 1, 4 * B)
        await drain(bench.decode("alone", [*range(4 * B), 900, 901], local=True, max_tokens=3))
        await bench.until_idle()
        assert tokens_of(bench.d) == (12 * B + 3, 8 * B)


async def test_what_is_found_of_forced_tokens_is_no_hit_of_the_prompt() -> None:
    output = golden(range(2 * B), 6 * B)
    async with Bench() as bench:
        for name in ("first", "again"):
            forced = bench.decode(name, range(2 * B), local=True, output_ids=tuple(output[:-1]), max_tokens=6 * B)
            await drain(forced)
        await bench.until_idle()
        assert tokens_of(bench.d) == (4 * B, 2 * B)


@pytest.mark.field("vllm-project/vllm#25780")
async def test_preempted_prompts_that_differ_are_no_hits() -> None:
    async with Bench(Settings(), Settings(num_pages=12)) as bench:
        prompts = [range(100 * number, 100 * number + 3 * B) for number in range(3)]
        gate = bench.d.runner.before = Gate()
        calls = [bench.decode(f"r{n}", prompt, local=True, max_tokens=6 * B) for n, prompt in enumerate(prompts)]

        async def have_come() -> bool:
            return bench.d.worker.num_calls == 3

        await until(have_come)
        gate.open()
        answers = await asyncio.gather(*map(drain, calls))
        for prompt, messages in zip(prompts, answers, strict=True):
            tokens = [token.token_id for message in messages for token in message.tokens.tokens]
            assert tokens == golden(prompt, 6 * B)
            assert messages[-1].completed.cached_tokens == 0
        await bench.until_idle()
        assert bench.d.step.load().preemptions > 0
        assert tokens_of(bench.d) == (9 * B, 0)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, 0.0])
async def test_a_page_with_a_bad_scale_is_never_run_on(scale: float) -> None:
    """Its checksum is right: so it was sent."""
    async with Bench() as bench:
        read, prompt = bench.p.pages.read, range(5 * B)

        def spoilt(*place: Any) -> bytes:
            payload = bytearray(read(*place))
            struct.pack_into("<e", payload, LAYOUT.num_layers * LAYOUT.pages[0].payload_layer_bytes, scale)
            return bytes(payload)

        bench.p.pages.read = spoilt
        decode = bench.decode("r", prompt)
        prefill = bench.prefill("r", prompt, (await anext(decode)).reserved)
        error = await failure(decode)
        assert (error.code, error.reason, error.retryable) == ("UNAVAILABLE", "BAD_SCALE", True)
        assert "page 0 of group 0, layer 0: a scale is" in error.message
        assert (await failure(prefill)).code == "UNAVAILABLE"
        assert bench.d.runner.plans == []
        bench.p.pages.read = read
        await until(bench.d.is_idle)
        again = await drain(bench.decode("r.2", prompt, local=True))
        assert again[-1].completed.cached_tokens == 0
        await bench.until_idle()
