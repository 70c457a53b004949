"""Several answers, their usage, and what is asked of the sampler: the same over gRPC, HTTP and the open protocol."""

import json
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_workers import Script
from replay import WAYS, Replay, word_id, write_replay_model
from tiny_model import EOS_ID

from pageferry.oip import open_inference_pb2 as oip

WORDS = ["one ", "two ", "three "]


@pytest.fixture
async def replay(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Replay]:
    """Workers that say a word for each choice; as the second one they end early."""
    async with Replay(write_replay_model(tmp_path / "tiny", tiny_model, WORDS)) as replay:
        one, two, three = (word_id(number) for number in range(3))
        script = Script([one] * 6, others={1: [two, two, EOS_ID], 2: [three] * 6})
        replay.rig.prefill.script = replay.rig.decode.script = script
        yield replay
        await replay.rig.check_idle()


async def streamed(replay: Replay, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await replay.http.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    assert response.status_code == 200, response.text
    *blocks, done = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert done == "[DONE]"
    return [json.loads(block) for block in blocks]


@pytest.mark.field(
    "vllm-project/vllm#11898", "ggml-org/llama.cpp#18700", "vllm-project/vllm#8625", "vllm-project/vllm#9357"
)
@pytest.mark.parametrize("chat", [False, True])
async def test_each_streamed_answer_reaches_its_own_end_and_usage_is_of_all(replay: Replay, chat: bool) -> None:
    body: dict[str, Any] = {"n": 3, "seed": 42, "temperature": 1, "max_tokens": 6}
    if chat:
        chunks = await streamed(
            replay, "/v1/chat/completions", body | {"messages": [{"role": "user", "content": "Hi"}]}
        )
    else:
        chunks = await streamed(replay, "/v1/completions", body | {"prompt": "Hi"})
    texts: defaultdict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        assert choice["index"] not in reasons, "more of an answer after its end"
        texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content", "")
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "one " * 6, 1: "two " * 2, 2: "three " * 6}
    assert reasons == {0: "length", 1: "stop", 2: "length"}
    assert chunks[-1]["usage"]["completion_tokens"] == 6 + 3 + 6
    assert [work.sampling.seed for work in replay.rig.prefill.works] == [42] * len(replay.rig.prefill.works)
    assert sorted(work.choice for work in replay.rig.decode.works) == [0, 1, 2]  # by which draws differ


@pytest.mark.field("vllm-project/vllm#2754")
@pytest.mark.parametrize("way", WAYS)
async def test_every_sampling_field_reaches_the_sampler(replay: Replay, way: str) -> None:
    asked = {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.125, "seed": 11}
    asked |= {"repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    await replay.ask(way, [word_id(0)] * 3, **asked)
    (work,) = replay.rig.prefill.works
    assert {name: getattr(work.sampling, name) for name in asked} == asked


@pytest.mark.field("vllm-project/vllm#2754")
async def test_a_field_that_nobody_knows_is_told_and_not_dropped(replay: Replay) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        response = await replay.http.post(path, json=body | {"top_key": 7})
        assert response.status_code == 400
        assert "top_key is not a field of" in response.json()["error"]["message"]
    request = oip.ModelInferRequest(model_name="tiny")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    request.parameters["top_key"].int64_param = 7
    (response,) = [response async for response in replay.oip.ModelStreamInfer(iter([request]))]
    assert "top_key is not a field of" in response.error_message
    assert replay.rig.prefill.works == []
