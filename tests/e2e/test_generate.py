"""Requests through three processes: text, tokens, figures, and nothing left behind."""

import asyncio
import json

import httpx
import pytest
from cluster import Cluster, connected, generate, greedy, pageferry, wait_idle

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import SamplingParams, StopConditions

PROMPT = "The ferry carries pages of keys and values across the water, one after the other, to the other side."


async def test_a_stream_has_every_token_once_and_its_figures_add_up(split: Cluster) -> None:
    async with connected(split) as stub:
        answer = await generate(stub, greedy(PROMPT, 24))
        assert answer.finished is not None
        assert len(answer.token_ids) == 24
        assert answer.reason == "length"
        timings, pages = answer.finished.timings, answer.finished.pages
        parts = (
            timings.tokenize_ms,
            timings.queue_ms,
            timings.reserve_ms,
            timings.prefill_queue_ms,
            timings.prefill_ms,
            timings.delivery_ms,
        )
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(timings.ttft_ms, abs=1.0)
        assert timings.ttft_ms <= timings.total_ms
        assert pages.shipped + pages.cached == -(-answer.usage.prompt_tokens // 16)
        assert pages.bytes > 0
        assert 0 <= pages.hidden <= 1
        await wait_idle(stub)


async def test_the_text_is_what_the_tokens_decode_to(split: Cluster) -> None:
    async with connected(split) as stub:
        sampled = pb.GenerateRequest(
            prompt=PROMPT,
            sampling=SamplingParams(temperature=1, seed=7),
            stop=StopConditions(max_tokens=64, ignore_eos=True),
            skip_special_tokens=False,
        )
        answer = await generate(stub, sampled)
        again = await generate(stub, sampled)
        assert again.token_ids == answer.token_ids
        assert again.text == answer.text
        prompt_ids = (await stub.Tokenize(pb.TokenizeRequest(text=PROMPT))).ids
        assert answer.usage.prompt_tokens == len(prompt_ids)


@pytest.mark.field("sgl-project/sglang#7147", "sgl-project/sglang#7598")
async def test_one_token_ships_nothing(split: Cluster) -> None:
    async with connected(split) as stub:
        answer = await generate(stub, greedy("Count: one, two,", 1))
        assert answer.finished is not None
        assert len(answer.token_ids) == 1
        assert answer.reason == "length"
        assert answer.finished.pages.shipped == 0


@pytest.mark.field("sgl-project/sglang#7147", "sgl-project/sglang#7598")
@pytest.mark.parametrize("stream", [False, True])
async def test_one_token_over_http_touches_no_decode_worker(split: Cluster, stream: bool) -> None:
    async with connected(split) as stub, httpx.AsyncClient(base_url=split.http, timeout=60) as client:
        before = await wait_idle(stub)
        body = {"prompt": "Count: one, two,", "max_tokens": 1, "temperature": 0, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        response = await client.post("/v1/completions", json=body)
        lines = response.text.splitlines() if stream else [f"data: {response.text}"]
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert [reason for reason in reasons if reason] == ["length"]
        assert chunks[-1]["usage"]["completion_tokens"] == 1
        after = await wait_idle(stub)
    for old, new in zip(before.workers, after.workers, strict=True):
        assert new.role != "decode" or (old.load.pages_free, old.load.pages_cached, old.load.generated_tokens) == (
            new.load.pages_free,
            new.load.pages_cached,
            new.load.generated_tokens,
        )


@pytest.mark.parametrize("num_prompt", [63, 64, 65, 127, 128])
@pytest.mark.field("sgl-project/sglang#27004")
async def test_both_sides_count_the_same_pages_whether_cached_or_not(
    split: Cluster, colocated: Cluster, num_prompt: int
) -> None:
    prompt = [6 + (index * 41 + 7 * num_prompt) % 251 for index in range(num_prompt)]
    async with connected(split) as split_stub, connected(colocated) as colocated_stub:
        expected = (await generate(colocated_stub, greedy(prompt, 2))).token_ids
        for attempt in range(3):
            answer = await generate(split_stub, greedy(prompt, 2))
            assert answer.finished is not None
            assert answer.token_ids == expected
            assert answer.finished.pages.shipped + answer.finished.pages.cached == -(-num_prompt // 16)
            assert (answer.usage.cached_tokens > 0) == (attempt > 0)
        await wait_idle(split_stub)


@pytest.mark.field("NVIDIA/TensorRT-LLM#5762", "sgl-project/sglang#32897")
@pytest.mark.parametrize("num_prompt", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129])
async def test_split_output_equals_colocated_output(split: Cluster, colocated: Cluster, num_prompt: int) -> None:
    prompt = [4 + (index * 37 + num_prompt) % 250 for index in range(num_prompt)]
    async with connected(split) as split_stub, connected(colocated) as colocated_stub:
        handed_over = await generate(split_stub, greedy(prompt, 20))
        alone = await generate(colocated_stub, greedy(prompt, 20))
    assert handed_over.finished is not None
    assert alone.finished is not None
    assert handed_over.finished.pages.shipped == -(-num_prompt // 16)
    assert alone.finished.pages.shipped == 0
    assert handed_over.token_ids == alone.token_ids
    assert handed_over.text == alone.text


async def test_a_repeated_prompt_is_cached_and_answers_the_same(split: Cluster) -> None:
    prompt = [5 + (index * 11) % 240 for index in range(96)]
    async with connected(split) as stub:
        cold = await generate(stub, greedy(prompt, 8))
        warm = await generate(stub, greedy(prompt, 8))
    assert cold.usage.cached_tokens == 0
    assert 80 <= warm.usage.cached_tokens <= 95  # the last token is always computed
    assert warm.token_ids == cold.token_ids


@pytest.mark.field("vllm-project/vllm#11186", "vllm-project/vllm#17999")
async def test_a_prompt_cached_whole_computes_its_last_token_and_a_longer_one_reuses_all_its_pages(
    split: Cluster,
) -> None:
    prompt = [8 + (index * 23) % 245 for index in range(80)]
    async with connected(split) as stub:
        cold, warm, longer = [await generate(stub, greedy(prompt[:length], 4)) for length in (64, 64, 80)]
        assert [answer.usage.cached_tokens for answer in (cold, warm, longer)] == [0, 63, 64]
        assert warm.token_ids == cold.token_ids
        await wait_idle(stub)


async def test_many_at_once_use_both_decode_workers(split: Cluster) -> None:
    async with connected(split) as stub:
        before = {worker.address: worker.load.generated_tokens for worker in (await wait_idle(stub)).workers}
        prompts = [f"Story number {index}: once upon a time" for index in range(32)]
        answers = await asyncio.gather(*(generate(stub, greedy(prompt, 128)) for prompt in prompts))
        assert [len(answer.token_ids) for answer in answers] == [128] * 32
        after = await wait_idle(stub)
    grown = [
        worker.load.generated_tokens - before[worker.address] for worker in after.workers if worker.role == "decode"
    ]
    assert len(grown) == 2
    assert min(grown) > 0


async def test_http_streams_and_answers_whole(split: Cluster) -> None:
    body = {"model": "", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    async with httpx.AsyncClient(base_url=split.http, timeout=60) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        body["model"] = model
        whole = (await client.post("/v1/completions", json=body)).json()
        text, done = "", 0
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    done += 1
                elif line.startswith("data: "):
                    text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
        assert done == 1
        assert text == whole["choices"][0]["text"]
        messages = [{"role": "user", "content": "Hello"}]
        chat = {"model": model, "messages": messages, "max_tokens": 5, "temperature": 0}
        reply = (await client.post("/v1/chat/completions", json=chat)).json()
        assert reply["choices"][0]["message"]["role"] == "assistant"
        assert (await client.get("/health")).status_code == 200
        assert "pageferry" in (await client.get("/metrics")).text


def test_the_command_line_generates_and_shows_status(split: Cluster) -> None:
    options = ("--address", split.address, "--max-tokens", "6", "--temperature", "0", "--json")
    result = pageferry("generate", PROMPT, *options)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert {"text", "token_ids", "finish_reason", "usage", "trace_id", "timings_ms", "pages"} <= answer.keys()
    assert {"prompt_tokens", "completion_tokens", "cached_tokens"} == answer["usage"].keys()
    assert {"queue", "prefill", "transfer_tail", "ttft", "total"} <= answer["timings_ms"].keys()
    assert {"format", "shipped", "cached", "bytes"} <= answer["pages"].keys()
    status = pageferry("status", "--json", "--address", split.address)
    assert status.returncode == 0, status.stderr
    workers = json.loads(status.stdout)["workers"]
    assert [worker["role"] for worker in workers] == ["prefill", "decode", "decode"]
    shown = pageferry("trace", answer["trace_id"], "--address", split.address)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("kv.push") == 2
