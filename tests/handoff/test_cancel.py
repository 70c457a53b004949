"""Calls that are cancelled, in every state: what they held is free again on both sides, and nothing runs on."""

import asyncio

import pytest
from fake_engine import LAYOUT, LAYOUTS, golden
from handoff_bench import Bench, Gate, Settings, drain, failure, until

from pageferry.core.config import SchedulerConfig
from pageferry.core.layout import CacheLayout

B = LAYOUT.page_size
PROMPT = range(6 * B)  # three chunks
STATES = ("queued", "computing", "drawn", "shipped", "decoding")


async def _reach(bench: Bench, state: str) -> tuple[list[object], list[Gate]]:
    """Bring a request into a state; returns its calls and what holds it there."""
    gates = [Gate(after=1 if state == "computing" else 0)]
    if state in ("queued", "computing"):
        bench.p.runner.before = gates[0]
    elif state == "drawn":
        bench.d.executor.submit(gates[0])
    else:
        gates[0] = bench.d.runner.before = Gate(after=0 if state == "shipped" else 2)
    calls: list[object] = []
    if state == "queued":
        calls.append(bench.prefill("before", range(900, 900 + B), max_tokens=1))
    decode = bench.decode("r", PROMPT, max_tokens=50)
    reserved = (await anext(decode)).reserved
    prefill = bench.prefill("r", PROMPT, reserved, max_tokens=50)
    if state == "queued":  # not even looked at: the engine's thread is busy

        async def waits() -> bool:
            return bench.p.worker.num_calls == 2

        await until(waits)
        return [prefill, decode, *calls], gates
    assert (await anext(prefill)).HasField("accepted")
    if state not in ("queued", "computing"):
        assert (await anext(prefill)).HasField("first_token")
    if state in ("shipped", "decoding"):
        assert (await anext(prefill)).HasField("shipped")
    if state != "drawn":
        await gates[0].reached()
    return [prefill, decode, *calls], gates


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("cancelled", ["prefill", "decode", "both"])
@pytest.mark.parametrize("state", STATES)
async def test_a_cancel_frees_all_on_both_sides(state: str, cancelled: str, layout: CacheLayout) -> None:
    async with Bench(Settings(layout=layout)) as bench:
        (prefill, decode, *others), gates = await _reach(bench, state)
        for name, call in (("prefill", prefill), ("decode", decode)):
            if cancelled in (name, "both"):
                call.cancel()  # type: ignore[attr-defined]
        for gate in gates:
            gate.open()
        if cancelled == "prefill" and state in ("queued", "computing", "drawn"):
            decode.cancel()  # type: ignore[attr-defined]
        elif cancelled == "prefill":
            assert (await drain(decode))[-1].HasField("completed")  # the prefill worker's part was over
        elif cancelled == "decode" and state in ("queued", "computing", "drawn"):
            error = await failure(prefill)
            assert (error.code, error.retryable) == ("UNAVAILABLE", True)
        for other in others:
            other.cancel()  # type: ignore[attr-defined]
        await bench.until_idle()
        assert (await bench.generate("next", range(700, 709), max_tokens=4)).tokens == list(
            enumerate(golden(range(700, 709), 4, layout))
        )
        await bench.until_idle()


@pytest.mark.field("vllm-project/vllm#46283", "vllm-project/vllm#46289")
async def test_a_cancelled_decode_gives_its_pages_back_although_its_sender_is_stuck() -> None:
    async with Bench() as bench:
        gate = bench.p.runner.before = Gate(after=1)
        decode = bench.decode("r", PROMPT)
        prefill = bench.prefill("r", PROMPT, (await anext(decode)).reserved)
        await gate.reached()
        await until(bench.d.has_received(2))
        decode.cancel()
        await until(bench.d.is_idle)
        gate.open()
        assert "over" in (await failure(prefill)).message
        await bench.until_idle()


@pytest.mark.field("vllm-project/vllm#50425", "llm-d/llm-d#1138")
async def test_a_prefill_given_up_when_its_token_is_there_leaves_nothing_behind_each_time() -> None:
    settings = Settings(num_pages=300, scheduler=SchedulerConfig(chunk_tokens=512, headroom_pages=0))
    async with Bench(settings) as bench:
        for index in range(50):
            gate = Gate()
            bench.d.executor.submit(gate)  # the decode worker takes no page
            prompt = [(index + position) % 1000 for position in range(1000)]
            decode = bench.decode(f"r{index}", prompt)
            prefill = bench.prefill(f"r{index}", prompt, (await anext(decode)).reserved)
            while not (await anext(prefill)).HasField("first_token"):
                pass
            prefill.cancel()
            await until(bench.p.is_idle)  # while the decode worker is still stuck
            decode.cancel()
            gate.open()
            await until(bench.d.is_idle)
        result = await bench.generate("last", PROMPT, max_tokens=3)
        assert result.tokens == list(enumerate(golden(PROMPT, 3)))


@pytest.mark.field("ollama/ollama#11889", "ggml-org/llama.cpp#15232", "ikawrakow/ik_llama.cpp#1020")
async def test_a_cancel_during_a_long_prefill_stops_it_at_the_next_chunk() -> None:
    settings = Settings(num_pages=2100, scheduler=SchedulerConfig(chunk_tokens=512, headroom_pages=0))
    async with Bench(settings) as bench:
        gate = bench.p.runner.before = Gate(after=1)
        prompt = [position % 1000 for position in range(8192)]
        decode = bench.decode("r", prompt)
        prefill = bench.prefill("r", prompt, (await anext(decode)).reserved)
        await gate.reached()
        prefill.cancel()
        decode.cancel()

        async def has_heard() -> bool:
            return not bench.p.worker.num_calls

        await until(has_heard)
        await until(bench.d.is_idle)
        gate.open()
        await bench.until_idle()
        assert bench.p.runner.num_tokens == 2 * 512
        assert bench.d.runner.plans == []


@pytest.mark.field("sgl-project/sglang#36333", "sgl-project/sglang#37833", "ggml-org/llama.cpp#24496")
async def test_an_endless_generation_stops_within_a_step_of_its_cancel() -> None:
    async with Bench(Settings(), Settings(num_pages=5000)) as bench:
        prompt = range(32)
        gate = bench.d.runner.before = Gate(after=3)
        decode = bench.decode("r", prompt, max_tokens=2000)
        await drain(bench.prefill("r", prompt, (await anext(decode)).reserved, max_tokens=2000))
        num_tokens = 0
        while num_tokens < 3:
            num_tokens += len((await anext(decode)).tokens.tokens)
        await gate.reached()  # in the fourth step
        decode.cancel()

        async def has_heard() -> bool:
            return not bench.d.worker.num_calls

        await until(has_heard)
        gate.open()
        await until(bench.d.is_idle)
        assert len(bench.d.runner.plans) == 4

        async def is_recorded() -> bool:
            return "decode.generate" in [span.name for span in bench.exporter.get_finished_spans()]

        await until(is_recorded)


@pytest.mark.field("Avarok-Cybersecurity/atlas#482", "tensorflow/serving#1265")
async def test_a_deadline_that_passes_in_the_queue_is_one_and_costs_no_work() -> None:
    settings = Settings(scheduler=SchedulerConfig(chunk_tokens=8, max_num_seqs=1))
    async with Bench(settings) as bench:
        gate = bench.p.runner.before = Gate()
        busy = bench.prefill("busy", PROMPT)
        await gate.reached()
        for timeout_s in (0.2, 2.0, 20.0):
            late = bench.prefill(f"within {timeout_s} s", range(900, 900 + B), timeout=timeout_s)
            while not (is_there := len(bench.p.worker._calls) == 2) and not late.done():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert (await failure(late)).code == "DEADLINE_EXCEEDED"
            if is_there:  # else it never got to its worker, on a machine that is so busy
                break
        assert is_there
        gate.open()
        await drain(busy)
        await bench.until_idle()
        computed = {chunk.sequence.work.request_id for plan in bench.p.runner.plans for chunk in plan.chunks}
        assert computed == {"busy"}
        chunks = [span for span in bench.exporter.get_finished_spans() if span.name.startswith("prefill.")]
        assert len({span.context.trace_id for span in chunks}) == 1


@pytest.mark.field("vllm-project/vllm#10583", "sgl-project/sglang#19035")
async def test_a_live_id_is_refused_and_free_again_afterwards() -> None:
    async with Bench() as bench:
        gate = bench.d.runner.before = Gate()
        first = bench.decode("id-7", range(5), local=True, max_tokens=3)
        await gate.reached()
        for call in (bench.decode("id-7", range(5), local=True), bench.decode("id-7", range(5))):
            error = await failure(call)
            assert (error.code, "id-7" in error.message) == ("ALREADY_EXISTS", True)
        gate.open()
        assert (await drain(first))[-1].HasField("completed")
        again = await drain(bench.decode("id-7", range(5), local=True, max_tokens=3))
        assert again[-1].HasField("completed")
        assert bench.d.step.load().running == 0

        gate = bench.p.runner.before = Gate()
        first = bench.prefill("id-7", range(5))
        await gate.reached()
        assert (await failure(bench.prefill("id-7", range(5)))).code == "ALREADY_EXISTS"
        gate.open()
        await drain(first)
        await drain(bench.prefill("id-7", range(5)))
        await bench.until_idle()
