"""Every request's spans are one tree over all services, and its times add up, as a collector is told."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from answer import Answer
from cluster import LONG_LEASES, Cluster, connected, generate, greedy, running, wait_idle
from collectors import Collector, collecting
from trace_tree import assert_sums, assert_tree, whole_trace
from traces import DECODE_RPC, PREFILL_RPC, SPLIT_SPANS, Span, conventional_names, counts

from pageferry.v1 import inference_pb2 as pb

SLOTS = 3
PROMPT = [9 + (index * 13) % 200 for index in range(100)]
SETTINGS = {
    "router.local_prefill_tokens": "8",
    "router.local_advantage": "1e9",
    "scheduler.chunk_tokens": "64",
    "scheduler.local_chunk_tokens": "64",
    "scheduler.max_num_seqs": str(SLOTS),
    "scheduler.prefix_cache": "false",  # so that every prompt is computed, whatever was asked before
    "engine.num_pages": "1024",
    "telemetry.trace_steps": "true",
    **LONG_LEASES,
}
LOCAL_SPANS = Counter(
    {key: 1 for key in SPLIT_SPANS if not key[0].endswith("Prefill") and key[0] not in ("kv.push", "prefill.queue")}
)
ONE_TOKEN = Counter(
    {key: 1 for key in SPLIT_SPANS if not key[0].endswith("Decode") and not key[0].startswith(("kv.", "decode."))}
)


@pytest.fixture(scope="module")
def sink() -> Iterator[Collector]:
    """To which processes that are started from now on send their spans."""
    with collecting() as sink, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.url)
        yield sink


@pytest.fixture(scope="module")
def cluster(sink: Collector, tiny_model: Path) -> Iterator[Cluster]:
    with running("--prefill", "1", "--decode", "1", "--model", str(tiny_model), settings=SETTINGS) as cluster:
        yield cluster


async def answered(cluster: Cluster, request: pb.GenerateRequest, **metadata: str) -> Answer:
    async with connected(cluster) as stub:
        return await generate(stub, request, **metadata)


def trace_id_of(answer: Answer) -> str:
    assert answer.started is not None
    return answer.started.trace_id


def with_fields(request: pb.GenerateRequest, **fields: Any) -> pb.GenerateRequest:
    request.MergeFrom(pb.GenerateRequest(**fields))
    return request


@pytest.mark.parametrize(
    ("request_", "expected", "num_chunks"),
    [
        pytest.param(greedy(PROMPT, 10), SPLIT_SPANS, 2, id="handed over"),
        pytest.param(greedy(PROMPT * 3, 10), SPLIT_SPANS, 5, id="in many chunks"),
        pytest.param(greedy(PROMPT[:6], 10), LOCAL_SPANS, 1, id="computed by the decode worker"),
        pytest.param(greedy(PROMPT, 1), ONE_TOKEN, 2, id="of one token"),
    ],
)
async def test_spans_are_one_tree_whose_times_add_up(
    cluster: Cluster, sink: Collector, request_: pb.GenerateRequest, expected: Counter[tuple[str, str]], num_chunks: int
) -> None:
    answer = await answered(cluster, request_)
    spans = whole_trace(sink, trace_id_of(answer))
    request = assert_tree(spans)
    assert counts(spans) == expected + Counter({("prefill.chunk", "INTERNAL"): num_chunks - 1})
    assert_sums(request, answer)
    assert answer.finished is not None
    assert request.attributes["gen_ai.server.time_to_first_token"] * 1000 == answer.finished.timings.ttft_ms
    assert request.attributes["gen_ai.operation.name"] == "text_completion"
    assert request.attributes["rpc.method"] == "pageferry.v1.InferenceService/Generate"
    assert request.attributes["pageferry.profile.in_effect"] == "interactive"
    for span in spans:
        if span.kind == "CLIENT":
            assert (span.attributes["server.address"], span.attributes["rpc.system.name"]) == ("127.0.0.1", "grpc")
        if span.kind in ("CLIENT", "SERVER"):
            assert span.attributes["rpc.response.status_code"] == "OK"


async def test_each_of_several_answers_is_a_branch(cluster: Cluster, sink: Collector) -> None:
    answer = await answered(cluster, with_fields(greedy(PROMPT, 6), n=2))
    spans = whole_trace(sink, trace_id_of(answer))
    assert_sums(assert_tree(spans), answer)
    assert sorted(span.attributes["pageferry.choice"] for span in spans if span.name == "choice") == [0, 1]
    assert counts(spans)["decode.generate", "INTERNAL"] == 2


async def test_a_preempted_request_is_one_tree(cluster: Cluster, sink: Collector) -> None:
    async with connected(cluster) as stub:
        started = [asyncio.Event() for _ in range(SLOTS)]
        answers = [Answer() for _ in range(SLOTS)]

        async def stream(number: int) -> None:
            request = with_fields(greedy([number + 1, *PROMPT[1:40]], 1500), priority=5)
            async for response in stub.Generate(request, timeout=120):
                answers[number].take(response)
                if len(answers[number].token_ids) > 5:
                    started[number].set()

        streams = [asyncio.create_task(stream(number)) for number in range(SLOTS)]
        await asyncio.gather(*(event.wait() for event in started))
        urgent = await generate(stub, greedy(PROMPT[:40], 4))
        await asyncio.gather(*streams)
    num_preemptions = 0
    for answer in (urgent, *answers):
        spans = whole_trace(sink, trace_id_of(answer))
        assert_sums(assert_tree(spans), answer)
        (generated,) = (span for span in spans if span.name == "decode.generate")
        num_preemptions += generated.attributes["pageferry.preemptions"]
    assert num_preemptions >= 1


@pytest.mark.parametrize("how", ["CANCELLED", "DEADLINE_EXCEEDED"])
async def test_a_request_that_fails_is_one_tree(cluster: Cluster, sink: Collector, how: str) -> None:
    request, trace_id = with_fields(greedy(PROMPT, 3900), n=3), ""
    async with connected(cluster) as stub:
        for timeout_s in (120.0,) if how == "CANCELLED" else (1.0, 5.0, 25.0):
            call, num_seen = stub.Generate(request, timeout=timeout_s), 0
            with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
                async for response in call:
                    trace_id = response.started.trace_id or trace_id
                    num_seen += len(response.delta.tokens)
                    if how == "CANCELLED" and num_seen >= 3:
                        call.cancel()
            if trace_id:  # else the machine is so busy that it was not let in before its deadline
                break
        spans = whole_trace(sink, trace_id)
        await wait_idle(stub)
    root = assert_tree(spans)
    assert root.attributes["error.type"] == root.attributes["rpc.response.status_code"] == how
    assert root.seconds == pytest.approx(root.attributes["gen_ai.server.request.duration"], rel=0.01)


async def test_a_request_that_is_refused_is_one_span(cluster: Cluster, sink: Collector) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await answered(cluster, greedy(PROMPT, 1_000_000), traceparent=f"00-{'e' * 32}-{'f' * 16}-01")
    (request,) = whole_trace(sink, "e" * 32)
    assert assert_tree([request], remote_parent=b"\xff" * 8).attributes["error.type"] == "INVALID_ARGUMENT"


@pytest.mark.field("sgl-project/sglang#36243", "vllm-project/vllm#38678", "pegainfer-project/pegainfer#790")
async def test_each_request_keeps_to_its_callers_trace(cluster: Cluster, sink: Collector) -> None:
    caller = bytes.fromhex("00000000000000ab")
    trace_ids = [f"{index + 1:032x}" for index in range(10)]
    parents = [f"00-{trace_id}-{caller.hex()}-01" for trace_id in trace_ids]
    async with connected(cluster) as stub, httpx.AsyncClient(base_url=cluster.http, timeout=60) as client:
        body = {"model": "tiny", "prompt": PROMPT[:40], "max_tokens": 6, "temperature": 0}
        *_, last, reply = await asyncio.gather(
            *(generate(stub, greedy([*PROMPT[:40], index], 6), traceparent=parents[index]) for index in range(9)),
            generate(stub, greedy(PROMPT[:50], 6)),
            client.post("/v1/completions", json=body, headers={"Traceparent": parents[9]}),
        )
    assert reply.status_code == 200, reply.text
    assert trace_id_of(last) not in trace_ids
    for trace_id in trace_ids:
        assert assert_tree(whole_trace(sink, trace_id), remote_parent=caller).parent_id == caller
    assert assert_tree(whole_trace(sink, trace_id_of(last))).parent_id == b""
    of_http = assert_tree(whole_trace(sink, trace_ids[9]), remote_parent=caller).attributes
    assert (of_http["http.request.method"], of_http["http.route"]) == ("POST", "/v1/completions")


async def test_each_step_is_a_trace_of_its_own_and_linked_to_its_requests(cluster: Cluster, sink: Collector) -> None:
    answer, other = await asyncio.gather(
        answered(cluster, greedy(PROMPT, 9)),
        answered(cluster, greedy(PROMPT[:90], 9), traceparent=f"00-{'d' * 32}-{'f' * 16}-00"),  # not sampled
    )
    trace_id = trace_id_of(answer)
    spans = whole_trace(sink, trace_id)
    (generated,) = (span for span in spans if span.name == "decode.generate")
    served = {span.name: (trace_id, span.span_id) for span in spans if span.kind == "SERVER"}

    def steps(name: str, rpc: str) -> list[Span]:
        return [span for span in sink.spans if span.name == name and served[rpc] in span.links]

    num_steps = generated.attributes["pageferry.steps"]
    sink.wait(lambda _: len(steps("decode.step", DECODE_RPC)) >= num_steps)
    decode_steps, prefill_steps = steps("decode.step", DECODE_RPC), steps("prefill.step", PREFILL_RPC)
    assert len(decode_steps) == num_steps
    assert sum(span.name == "prefill.chunk" for span in spans) == len(prefill_steps) == 2
    for step in (*decode_steps, *prefill_steps):
        assert step.parent_id == b""
        assert step.trace_id != trace_id
        assert [link for link in step.links if link[0] != trace_id] == []
        assert step.attributes["pageferry.step.tokens"] >= step.attributes["pageferry.step.sequences"] >= 1
        assert step.attributes["pageferry.step.pages_used"] > 0
    linked = {link for span in sink.spans for link in span.links}
    assert "d" * 32 not in {trace for trace, _ in linked}
    assert "d" * 32 == trace_id_of(other) not in {span.trace_id for span in sink.spans}


async def test_names_of_attributes_are_current(cluster: Cluster, sink: Collector) -> None:
    """What is not our own is as the installed version of OpenTelemetry's conventions has it, and not deprecated."""
    answer = await answered(cluster, with_fields(greedy(PROMPT, 6), n=2))
    whole_trace(sink, trace_id_of(answer))
    names = {name for span in sink.spans for name in span.attributes if not name.startswith("pageferry.")}
    assert {"gen_ai.provider.name", "rpc.method", "server.address"} <= names
    assert names - conventional_names() == set()
