"""OpenAI's official clients against real processes: Python over the tiny model, both over the packaged one."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cluster import Cluster, connected, environment, running, wait_idle
from openai import AsyncOpenAI

SCRIPTS = Path(__file__).parent / "openai"
MESSAGES: Any = [{"role": "user", "content": "Hello there"}]


@pytest.fixture
async def client(split: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{split.http}/v1", api_key="none", max_retries=0) as client:
        yield client


async def model_of(client: AsyncOpenAI) -> str:
    return (await client.models.list()).data[0].id


async def text_of(stream: Any) -> str:
    return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])


async def test_streamed_and_whole_answers_are_the_same(client: AsyncOpenAI) -> None:
    asked: Any = {"model": await model_of(client), "messages": MESSAGES, "max_completion_tokens": 20, "seed": 3}
    whole = await client.chat.completions.create(**asked)
    text = await text_of(await client.chat.completions.create(**asked, stream=True))
    assert text == whole.choices[0].message.content
    assert whole.usage is not None and 1 <= whole.usage.completion_tokens <= 20


async def test_choices_of_several_prompts(client: AsyncOpenAI) -> None:
    model, prompts = await model_of(client), ["one one", "two two", [70, 71, 72]]
    several: Any = await client.completions.create(model=model, prompt=prompts, n=2, max_tokens=6, seed=4)
    assert [choice.index for choice in several.choices] == list(range(6))
    for number, prompt in enumerate(prompts):
        alone: Any = await client.completions.create(model=model, prompt=prompt, n=2, max_tokens=6, seed=4)
        assert [c.text for c in alone.choices] == [c.text for c in several.choices[2 * number : 2 * number + 2]]
    assert several.choices[0].text != several.choices[1].text


async def test_log_probabilities_are_those_of_the_greedy_tokens(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=await model_of(client), prompt="Hello", temperature=0, max_tokens=4, logprobs=3
    )
    logprobs: Any = answer.choices[0].logprobs
    assert len(logprobs.tokens) == 4 and all(len(top) == 3 for top in logprobs.top_logprobs)
    assert logprobs.token_logprobs == [max(top.values()) for top in logprobs.top_logprobs]


async def test_answers_match_what_they_must(client: AsyncOpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    asked: Any = {"model": await model_of(client), "seed": 5}
    chat = await client.chat.completions.create(messages=MESSAGES, response_format=form, **asked)
    assert json.loads(chat.choices[0].message.content or "")["a"] in ("x", "y")
    for extra, pattern in (({"guided_regex": "[0-9]{3}"}, r"\d{3}"), ({"guided_choice": ["yes", "no"]}, "yes|no")):
        answer = await client.completions.create(prompt="a", extra_body=extra, **asked)
        assert re.fullmatch(pattern, answer.choices[0].text) and answer.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(prompt="a", extra_body={"guided_json": {"type": "nope"}}, **asked)
    assert caught.value.param == "guided_json"


async def test_every_answer_to_an_echoed_prompt_tells_all_log_probabilities(client: AsyncOpenAI) -> None:
    prompt = [80 + number % 30 for number in range(40)]
    answer = await client.completions.create(
        model=await model_of(client), prompt=prompt, echo=True, logprobs=1, n=2, max_tokens=3, seed=5
    )
    first, second = [choice.logprobs for choice in answer.choices]
    assert first is not None and second is not None and first.tokens is not None and second.tokens is not None
    assert len(first.tokens) == len(second.tokens) == 43
    assert first.token_logprobs is not None and second.token_logprobs is not None
    assert first.token_logprobs[0] is None and first.token_logprobs[:40] == second.token_logprobs[:40]
    assert all(logprob is not None and logprob < 0 for logprob in first.token_logprobs[1:])
    assert answer.choices[0].text.startswith("".join(first.tokens[:40]))


async def test_a_client_that_leaves_frees_everything(client: AsyncOpenAI, split: Cluster) -> None:
    stream = await client.chat.completions.create(
        model=await model_of(client),
        messages=MESSAGES,
        max_completion_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for _ in stream:
        break
    await stream.close()
    async with connected(split) as stub:
        await wait_idle(stub)


async def test_a_deadline_in_a_header_ends_an_answer(client: AsyncOpenAI, split: Cluster) -> None:
    model = await model_of(client)
    for timeout_ms in ("300", "2000", "10000"):
        with pytest.raises(openai.APIError) as caught:
            stream = await client.completions.create(
                model=model,
                prompt="Hello",
                max_tokens=4000,
                stream=True,
                extra_headers={"x-envoy-expected-rq-timeout-ms": timeout_ms},
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                pass
        if caught.value.code != "ttft_beyond_deadline":  # as where the machine is too busy for so short a deadline
            break
    assert caught.value.code in ("deadline_exceeded", "deadline_in_queue")
    async with connected(split) as stub:
        await wait_idle(stub)


async def test_a_prompt_over_the_limit_is_413_before_tokenising(split: Cluster) -> None:
    async with httpx.AsyncClient(base_url=split.http, timeout=60) as http:
        responses = [
            await http.post("/v1/completions", json={"prompt": "a" * 2_000_000}),
            await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a" * 2_000_000}]}),
            await http.post("/v1/completions", json={"prompt": "a" * 20_000_000}),
        ]
    assert [response.status_code for response in responses] == [413, 413, 413]
    assert [response.json()["error"]["param"] for response in responses] == ["prompt", "messages", None]


@pytest.mark.slow
async def test_settings_say_what_becomes_of_unknown_fields_and_whose_pages_may_call(tiny_model: Path) -> None:
    origin = "https://app.example.org"
    settings = {"server.unknown_fields": "ignore", "server.cors_origins": origin}
    with running("--prefill", "0", "--decode", "1", "--model", str(tiny_model), settings=settings) as cluster:
        async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as http:
            response = await http.post("/v1/completions", json={"prompt": "a", "xyz": 1}, headers={"origin": origin})
    assert (response.status_code, response.headers["x-ignored-fields"]) == (200, "xyz")
    assert response.headers["access-control-allow-origin"] == origin


def run(command: list[str], **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def node_packages() -> Path | None:
    """The directory that holds node_modules/openai: OPENAI_NODE, or one above this file."""
    places = [Path(os.environ.get("OPENAI_NODE", "/nowhere")), *SCRIPTS.parents]
    return next((place for place in places if (place / "node_modules" / "openai").is_dir()), None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_python_client_with_the_packaged_model(real: Cluster) -> None:
    output = run([sys.executable, str(SCRIPTS / "client.py"), f"{real.http}/v1"], env=environment())
    assert "Paris" in output and "errors:" in output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_node_client_with_the_packaged_model(real: Cluster, tmp_path: Path) -> None:
    packages = node_packages()
    if packages is None or shutil.which("node") is None:
        pytest.skip("needs node and its package openai: npm install openai, OPENAI_NODE=directory of node_modules")
    shutil.copy(SCRIPTS / "client.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(packages / "node_modules")
    output = run(["node", "client.mjs", f"{real.http}/v1"], cwd=tmp_path)
    assert "Paris" in output and "errors:" in output
