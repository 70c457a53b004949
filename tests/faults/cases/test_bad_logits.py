"""Logits that are not numbers: the request that has them fails with a reason, on every way, and no other does."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fake_engine import golden
from gateway import serving
from handoff_bench import Bench
from replay import Replay, word_id, write_replay_model

from pageferry.core.errors import InternalError
from pageferry.v1 import inference_pb2 as pb

REASON = "logits of position 5 are not finite numbers"
SOURCES = ("vllm-project/vllm#14126", "EricLBuehler/mistral.rs#2051", "vllm-project/vllm#48231")


@pytest.mark.field(*SOURCES)
async def test_one_of_four_fails_at_step_five_and_the_others_are_as_undisturbed() -> None:
    """Through both workers' services, over real gRPC."""
    async with Bench() as bench:
        bench.d.runner.failures["bad", 5] = REASON
        prompts = {name: range(100 * number, 100 * number + 21) for number, name in enumerate(["a", "b", "bad", "c"])}
        results = await asyncio.gather(
            *(bench.generate(name, prompt, max_tokens=10) for name, prompt in prompts.items()), return_exceptions=True
        )
        for (name, prompt), result in zip(prompts.items(), results, strict=True):
            if name == "bad":
                assert isinstance(result, grpc.aio.AioRpcError)
                assert (result.code(), result.details()) == (grpc.StatusCode.INTERNAL, REASON)
            else:
                assert not isinstance(result, BaseException), result
                assert [token_id for _, token_id in result.tokens] == golden(prompt, 10)
        await bench.until_idle()


@pytest.fixture
async def broken(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Replay]:
    """Workers that say a word five times, and then that they can't go on."""
    model = write_replay_model(tmp_path / "tiny", tiny_model, ["word "])
    async with Replay(model) as replay:
        replay.script([word_id(0)] * 10)
        replay.rig.decode.fail_at = {5: InternalError(REASON)}
        yield replay
        await replay.rig.check_idle()


@pytest.mark.field(*SOURCES)
async def test_grpc_tells_it_by_its_status(broken: Replay) -> None:
    request = pb.GenerateRequest(prompt="Say it.")
    request.stop.max_tokens = 10
    text = ""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for event in broken.stub.Generate(request):
            assert not event.HasField("finished")
            text += event.delta.text
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert REASON in (caught.value.details() or "")
    assert text == "word " * 5


@pytest.mark.field(*SOURCES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_http_tells_it_by_its_status_or_by_an_event_and_never_as_text(broken: Replay, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 10}
    body |= {"messages": [{"role": "user", "content": "Say it."}]} if "chat" in path else {"prompt": "Say it."}
    received = ""
    async with serving(broken.rig.frontend) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        whole = await client.post(path, json=body)
        assert whole.status_code == 500
        assert REASON in whole.json()["error"]["message"]
        with pytest.raises(httpx.RemoteProtocolError):  # nor does the transport call it a good end
            async with client.stream("POST", path, json=body | {"stream": True}) as response:
                async for part in response.aiter_text():
                    received += part
    events = [json.loads(block.removeprefix("data: ")) for block in received.split("\n\n") if block]
    assert REASON in events[-1]["error"]["message"]
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices]
    assert "".join(texts) == "word " * 5
    assert not any(choice["finish_reason"] for choice in choices)
