"""Token ids that the vocabulary does not have, and prompts without a token: refused by name, others unharmed."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from answer import Answer
from replay import VOCABULARY, Replay, word_id, write_replay_model
from services import Deployment

from pageferry.v1 import inference_pb2 as pb, types_pb2 as types

SOURCES = ("vllm-project/vllm#54195", "vllm-project/vllm#16529", "sgl-project/sglang#28088")
EMPTY = ("vllm-project/vllm#7283", "vllm-project/vllm#6521")
BAD_GRPC: dict[str, dict[str, Any]] = {
    "stop id": {"stop": types.StopConditions(max_tokens=4, min_tokens=1, stop_token_ids=[1500])},
    "bias": {"sampling": types.SamplingParams(logit_bias={1500: -100})},
    "prompt id": {"token_ids": pb.TokenIds(ids=[VOCABULARY])},
    "no prompt ids": {"token_ids": pb.TokenIds()},
    "no prompt": {"prompt": ""},
    "no tokens": {"stop": types.StopConditions(max_tokens=0)},
}
NAMED = {
    "stop id": "stop_token_ids is 1500",
    "bias": "logit_bias",
    "prompt id": "is 1000",
    "negative prompt id": "-1",
    "no prompt ids": "token",
    "no prompt": "prompt",
    "no tokens": "max_tokens is 0",
}
BAD_HTTP: dict[str, dict[str, Any]] = {
    "stop id": {"min_tokens": 1, "stop_token_ids": [1500]},
    "bias": {"logit_bias": {"1500": -100}},
    "prompt id": {"prompt": [1000]},
    "negative prompt id": {"prompt": [-1]},
    "no prompt ids": {"prompt": []},
    "no prompt": {"prompt": ""},
    "no tokens": {"max_tokens": 0},
}


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_replay_model(tmp_path_factory.mktemp("vocabulary") / "tiny", tiny_model, ["word "])


@pytest.fixture
async def replay(model: Path) -> AsyncIterator[Replay]:
    """With another client's stream in the middle of its answer; it is found as undisturbed."""
    async with Replay(model) as replay:
        replay.script([word_id(0)] * 10)
        gate = replay.rig.decode.pause_at[5] = asyncio.Event()
        request = pb.GenerateRequest(prompt="Say it.")
        request.stop.max_tokens = 10
        call, answer = replay.stub.Generate(request), Answer()
        while len(answer.token_ids) < 5:
            answer.take(await call.read())
        yield replay
        gate.set()
        while (event := await call.read()) is not grpc.aio.EOF:
            answer.take(event)
        assert (answer.text, answer.reason) == ("word " * 10, "length")
        await replay.rig.check_idle()
        assert len(replay.rig.prefill.works) == 1


@pytest.mark.field(*SOURCES, *EMPTY)
@pytest.mark.parametrize("what", BAD_GRPC)
async def test_grpc_refuses_what_is_no_token_and_what_has_none(replay: Replay, what: str) -> None:
    fields = BAD_GRPC[what]
    request = pb.GenerateRequest(**({"stop": types.StopConditions(max_tokens=4)} | fields))
    if request.WhichOneof("input") is None:
        request.prompt = "a"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in replay.stub.Generate(request):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert NAMED[what] in (caught.value.details() or "")


@pytest.mark.field(*SOURCES, *EMPTY)
@pytest.mark.parametrize("what", BAD_HTTP)
async def test_http_refuses_what_is_no_token_and_what_has_none(replay: Replay, what: str) -> None:
    response = await replay.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4} | BAD_HTTP[what])
    assert response.status_code == 400
    assert NAMED[what] in response.json()["error"]["message"]


def strictly(text: str) -> Any:
    """JSON as others read it: without NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.field("sgl-project/sglang#4097")
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_beside_top_k_one_are_json(linked: Deployment, chat: bool, stream: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 6, "top_k": 1, "ignore_eos": True, "stream": stream, "logprobs": 5}
    if chat:
        body |= {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 5}
    else:
        body["prompt"] = "Hi"
    path = "/v1/chat/completions" if chat else "/v1/completions"
    async with httpx.AsyncClient(base_url=linked.routers[0].http, timeout=60) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200
    if stream:
        *blocks, done = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
        assert done == "[DONE]"
        parts = [strictly(block) for block in blocks]
    else:
        parts = [strictly(response.text)]
    found = [choice["logprobs"] for part in parts for choice in part["choices"] if choice.get("logprobs")]
    tops = [top for one in found for top in one.get("top_logprobs", [])]  # a completion's
    tops += [token["top_logprobs"] for one in found for token in one.get("content", [])]  # a chat's
    assert len(tops) == 6
    assert all(0 < len(top) <= 5 for top in tops)
