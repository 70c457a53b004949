"""The life of a request over workers that replay tokens: hand-off, retries, cancels, stops, and always one end."""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from asking import ask
from fake_workers import TOKENS, Make, Rig, Script, eventually
from hand_clock import HandClock
from opentelemetry.trace import SpanKind, format_trace_id
from spans import assert_one_tree

from pageferry.core.config import RouterConfig
from pageferry.core.errors import (
    AlreadyExistsError,
    DataLossError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    PageferryError,
    ResourceExhaustedError,
    UnavailableError,
)
from pageferry.v1 import decode_pb2, inference_pb2 as pb, prefill_pb2, types_pb2 as types

PUSHED, LOCAL = decode_pb2.PROMPT_SOURCE_PUSHED, decode_pb2.PROMPT_SOURCE_LOCAL
EOS = 2


@pytest.fixture(params=[True, False], ids=["feed", "calls"])
def rig(tiny_model: Path, request: pytest.FixtureRequest) -> Make:
    def make(tokens: list[int] = TOKENS, **options: object) -> Rig:
        return Rig(str(tiny_model), Script(tokens), **{"subscriptions": request.param} | options)

    return make


async def read(stream: AsyncIterator[pb.GenerateResponse], num_tokens: int) -> None:
    """Take events until that many tokens have come."""
    async for event in stream:
        num_tokens -= len(event.delta.tokens)
        if num_tokens <= 0:
            return


@pytest.mark.field("NVIDIA/TensorRT-LLM#5762", "sgl-project/sglang#32897")
@pytest.mark.parametrize("num_prompt", [15, 16, 17])
async def test_first_token_is_neither_lost_nor_doubled(rig: Make, num_prompt: int) -> None:
    async with rig() as router:
        answer = await router.generate(ask(num_prompt, max_tokens=20))
        assert answer.token_ids == TOKENS[:20]
        assert answer.positions == list(range(20))
        assert answer.reason == "length"
        assert answer.finished.usage == types.Usage(prompt_tokens=num_prompt, completion_tokens=20)
        assert answer.text == router.tokenizer.decode(TOKENS[:20])
        assert router.decode.sources == [PUSHED]
        assert answer.finished.pages.shipped == -(-num_prompt // 16)
        assert answer.finished.pages.hidden == 0.75
        await router.check_idle()


async def test_first_token_does_not_wait_for_the_push(rig: Make) -> None:
    async with rig() as router:
        router.prefill.push.clear()
        stream = router.stream(ask())
        await read(stream, 1)
        assert router.decode.num_live == 1
        router.prefill.push.set()
        await read(stream, 4)
        await stream.aclose()
        await router.check_idle()


@pytest.mark.field("sgl-project/sglang#7147", "sgl-project/sglang#7598")
async def test_one_token_needs_no_decode_worker(rig: Make) -> None:
    async with rig() as router:
        answer = await router.generate(ask(max_tokens=1))
        assert (answer.token_ids, answer.reason) == (TOKENS[:1], "length")
        assert answer.finished.usage.completion_tokens == 1
        assert router.decode.works == []
        await router.check_idle()


async def test_stop_at_the_first_token_releases_the_decode_worker(rig: Make) -> None:
    async with rig([EOS, *TOKENS]) as router:
        answer = await router.generate(ask())
        assert (answer.token_ids, answer.reason, answer.text) == ([EOS], "stop", "")
        assert router.decode.sources == [PUSHED]
        await router.check_idle()
        assert router.decode.num_cancelled == 1


async def test_without_prefill_workers_the_decode_worker_computes_the_prompt(rig: Make) -> None:
    async with rig(num_prefill=0) as router:
        answer = await router.generate(ask(max_tokens=3))
        assert answer.token_ids == TOKENS[:3]
        assert router.decode.sources == [LOCAL]
        assert answer.finished.timings.prefill_queue_ms == 0.5
        assert answer.finished.pages == pb.HandoffStats()
        assert (await router.generate(ask(max_tokens=1))).token_ids == TOKENS[:1]
        await router.check_idle()


async def test_a_short_prompt_is_not_handed_over(rig: Make) -> None:
    async with rig(router=RouterConfig(local_prefill_tokens=32)) as router:
        await router.generate(ask(32))
        await router.generate(ask(33))
        assert router.decode.sources == [LOCAL, PUSHED]


async def test_several_tokens_of_a_message_become_one_delta(rig: Make) -> None:
    async with rig() as router:
        router.decode.batch = 3
        sizes = [len(event.delta.tokens) async for event in router.stream(ask(max_tokens=7)) if event.HasField("delta")]
        assert sum(sizes) == 7
        assert max(sizes) == 3


@pytest.mark.parametrize("from_prefill", [True, False])
async def test_stop_string_ends_both_calls(rig: Make, from_prefill: bool) -> None:
    tokens = [4 + byte for byte in b"abcdefghij"]  # the tiny vocabulary: special tokens, then the bytes
    async with rig(tokens) as router:
        text = router.tokenizer.decode(tokens)
        assert text == "abcdefghij"
        router.prefill.push.clear() if from_prefill else None
        stop = "a" if from_prefill else "cd"
        answer = await router.generate(ask(max_tokens=10, stop_strings=[stop, "zz"]))
        assert answer.text == text[: text.index(stop)]
        assert (answer.reason, answer.finished.matched_stop) == ("stop", stop)
        assert answer.finished.usage.completion_tokens == len(answer.token_ids) == text.index(stop) + len(stop)
        await router.check_idle()


@pytest.mark.field("NVIDIA/TensorRT-LLM#5762", "sgl-project/sglang#32897")
@pytest.mark.parametrize("num_prompt", [15, 16, 17])
@pytest.mark.parametrize("batch", [1, 3])
async def test_a_stop_string_completed_by_the_last_token_is_a_stop(rig: Make, num_prompt: int, batch: int) -> None:
    tokens = [4 + byte for byte in b"abcdefghijklmnopqrstuvwxyz"]
    async with rig(tokens) as router:
        router.decode.batch = batch
        answer = await router.generate(ask(num_prompt, max_tokens=20, stop_strings=["st"]))
        assert answer.token_ids == tokens[:20]
        assert answer.positions == list(range(20))
        assert (answer.text, answer.reason, answer.finished.matched_stop) == ("abcdefghijklmnopqr", "stop", "st")
        assert answer.finished.usage == types.Usage(prompt_tokens=num_prompt, completion_tokens=20)
        await router.check_idle()


async def test_only_an_unfinished_character_at_the_very_end_is_replaced(rig: Make) -> None:
    text = "😀 ďábel 北京 👩‍👩‍👧"
    tokens = [4 + byte for byte in text.encode()]  # a byte each
    async with rig(tokens) as router:
        assert (await router.generate(ask(max_tokens=len(tokens)))).text == text
        for num_tokens in range(1, len(tokens)):
            answer = await router.generate(ask(max_tokens=num_tokens))
            assert answer.text == router.tokenizer.decode(tokens[:num_tokens])
            assert "\N{REPLACEMENT CHARACTER}" not in answer.text[:-1]
            assert (len(answer.token_ids), answer.reason) == (num_tokens, "length")


async def test_every_end_id_of_the_model_ends_it_unless_ignored(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "tiny"))
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 106]}', encoding="utf-8")
    tokens = [100, 101, 106, 102, 1, 103, 104, 105]
    async with Rig(str(model), Script(tokens)) as router:
        assert (await router.generate(ask(max_tokens=8))).token_ids == [100, 101, 106]
        request = ask(max_tokens=8)
        request.stop.min_tokens = 4
        assert (await router.generate(request)).token_ids == [100, 101, 106, 102, 1]
        request.stop.ignore_eos = True
        answer = await router.generate(request)
        assert (answer.token_ids, answer.reason) == (tokens, "length")


async def test_min_tokens_wins_over_stop_strings_and_eos(rig: Make) -> None:
    newline = 4 + ord("\n")
    async with rig([100, newline, *[EOS] * 3, *range(100, 120), newline, 101, 102]) as router:
        request = ask(max_tokens=30, stop_strings=["\n"])
        request.stop.min_tokens = 20
        answer = await router.generate(request)
        assert answer.finished.matched_stop == "\n"
        assert len(answer.token_ids) == 26
        router.prefill.script.token_ids = [100, EOS, 101, 102]
        request = ask(max_tokens=4)
        request.stop.ignore_eos = True
        assert (await router.generate(request)).reason == "length"
        assert (await router.generate(ask(max_tokens=4))).token_ids == [100, EOS]


@pytest.mark.field("vllm-project/aibrix#2289", "tenstorrent/tt-inference-server#3926", "llm-d/llm-d#2433")
async def test_a_failed_prefill_goes_to_another_worker(rig: Make) -> None:
    async with rig(num_prefill=2) as router:
        for prefill in router.prefills:
            prefill.failure = InternalError("engine failed") if prefill is router.prefills[0] else None
        router.prefills[1].publish(queued_prompt_tokens=10)  # so that the first is chosen first
        await router.until(lambda: router.fleet.workers[1].view.load.queued_prompt_tokens == 10)
        answer = await router.generate(ask(request_id="r"))
        assert answer.token_ids == TOKENS[:5]
        assert [work.request_id for prefill in router.prefills for work in prefill.works] == ["r", "r.2"]
        assert router.decode.sources == [PUSHED, PUSHED]
        assert router.value("pageferry_prefill_failures_total", next="other_prefill") == 1
        root = next(span for span in await router.log.wait(5) if span.name == "pageferry.request")
        assert root.attributes["pageferry.fallback"] == "other_prefill"
        assert [event.name for event in root.events] == ["pageferry.prefill_failed"]
        await router.check_idle()


@pytest.mark.parametrize("error", [UnavailableError("gone"), InternalError("engine failed")])
async def test_the_decode_worker_computes_the_prompt_where_no_other_can(rig: Make, error: PageferryError) -> None:
    async with rig() as router:
        router.prefill.failure = error
        answer = await router.generate(ask())
        assert answer.token_ids == TOKENS[:5]
        assert router.decode.sources == [PUSHED, LOCAL]
        assert router.value("pageferry_prefill_failures_total", next="local") == 1
        await router.check_idle()


async def test_one_token_comes_from_the_decode_worker_where_prefill_fails(rig: Make) -> None:
    async with rig() as router:
        router.prefill.failure = UnavailableError("gone")
        answer = await router.generate(ask(max_tokens=1))
        assert (answer.token_ids, answer.reason) == (TOKENS[:1], "length")
        assert router.decode.sources == [LOCAL]


@pytest.mark.field("vllm-project/vllm-ascend#12522", "vllm-project/vllm#49250", "vllm-project/vllm#50754")
async def test_a_broken_push_keeps_the_token_that_was_sent(rig: Make) -> None:
    async with rig() as router:
        router.prefill.push_failure = DataLossError("checksum of page 3 differs")
        answer = await router.generate(ask(max_tokens=4))
        assert answer.token_ids == TOKENS[:4]
        assert [list(work.output_ids) for work in router.decode.works] == [[], TOKENS[:1]]
        assert router.decode.sources == [PUSHED, LOCAL]
        assert answer.finished.timings.prefill_queue_ms == 0.25  # of the try that brought the first token


async def test_a_retry_with_one_token_left_needs_no_decode_worker(rig: Make) -> None:
    async with rig(num_prefill=2) as router:
        router.prefills[1].publish(queued_prompt_tokens=10)
        await router.until(lambda: router.fleet.workers[1].view.load.queued_prompt_tokens == 10)
        router.prefills[0].push_failure = DataLossError("checksum of page 3 differs")
        answer = await router.generate(ask(max_tokens=2))
        assert (answer.token_ids, answer.reason) == (TOKENS[:2], "length")
        assert router.decode.sources == [PUSHED]
        assert list(router.prefills[1].works[0].output_ids) == TOKENS[:1]


async def test_a_prefill_worker_that_dies_after_the_commit_is_not_missed(rig: Make) -> None:
    async with rig() as router:
        router.prefill.failure_after_commit = UnavailableError("killed")
        answer = await router.generate(ask())
        assert answer.token_ids == TOKENS[:5]
        assert router.decode.sources == [PUSHED]
        assert router.value("pageferry_prefill_failures_total", next="local") == 0


@pytest.mark.field("vllm-project/aibrix#2289", "tenstorrent/tt-inference-server#3926", "llm-d/llm-d#2433")
async def test_the_clients_error_carries_the_prefill_workers_reason(rig: Make) -> None:
    async with rig() as router:
        router.prefill.failure = UnavailableError("out of order", reason="P_BROKEN")
        router.prefill.compute.clear()
        router.decode.refusals = []
        reading = asyncio.create_task(router.generate(ask()))
        await router.prefill.accepted.wait()
        router.decode.refusals = [InternalError("D is broken too")]
        router.prefill.compute.set()
        with pytest.raises(InternalError, match="out of order; then D is broken too"):
            await reading
        await router.check_idle()


@pytest.mark.field("vllm-project/aibrix#2289", "tenstorrent/tt-inference-server#3926", "llm-d/llm-d#2433")
async def test_no_worker_left_says_why_the_prefill_failed(rig: Make) -> None:
    async with rig() as router:
        router.prefill.failure = UnavailableError("out of order", reason="P_BROKEN")
        router.prefill.compute.clear()
        reading = asyncio.create_task(router.generate(ask()))
        await router.prefill.accepted.wait()
        router.decode.hub.publish_draining()
        await router.until(lambda: not router.frontend.ready)
        router.prefill.compute.set()
        with pytest.raises(UnavailableError, match="out of order; then no decode worker is ready") as caught:
            await reading
        assert caught.value.reason == "P_BROKEN"
        await router.check_idle()
        spans = await router.log.wait(8)
        assert assert_one_tree(spans).attributes["rpc.response.status_code"] == "UNAVAILABLE"
        calls = {(span.name.rpartition("/")[2], span.kind): span for span in spans if "Service/" in span.name}
        ends = {call: span.attributes["rpc.response.status_code"] for call, span in calls.items()}
        both = (SpanKind.CLIENT, SpanKind.SERVER)
        assert {ends["Prefill", kind] for kind in both} == {"UNAVAILABLE"}
        assert {ends["Decode", kind] for kind in both} == {"CANCELLED"}


@pytest.mark.field("vllm-project/aibrix#2289", "tenstorrent/tt-inference-server#3926", "llm-d/llm-d#2433")
@pytest.mark.parametrize(
    "how", ["raises after it was scheduled", "is killed before its prefill", "ends without a token"]
)
async def test_a_prefill_worker_that_fails_frees_its_decode_worker_at_once(rig: Make, how: str) -> None:
    async with rig() as router:
        router.prefill.compute.clear()
        if how.startswith("ends"):
            whole = router.prefill._prefill

            async def without_token(request: prefill_pb2.PrefillRequest) -> AsyncIterator[object]:
                async with aclosing(whole(request)) as events:
                    yield await anext(events)
                    await router.prefill.compute.wait()

            router.prefill._prefill = without_token
        reading = asyncio.create_task(router.generate(ask()))
        await eventually(lambda: router.prefill.num_live == 1)
        if how.startswith("is killed"):
            await router.prefill.server.__aexit__(None, None, None)
        router.prefill.failure = InternalError("engine failed") if how.startswith("raises") else None
        router.prefill.compute.set()
        assert (await reading).token_ids == TOKENS[:5]
        assert router.decode.sources == [PUSHED, LOCAL]
        assert router.decode.num_cancelled == 1
        assert router.value("pageferry_prefill_failures_total", next="local") == 1
        await router.check_idle()
        spans = await router.log.wait(9)
        root = assert_one_tree(spans)
        assert root.attributes["pageferry.fallback"] == "local"
        services = {span.name.partition("/")[0].rpartition(".")[2] for span in spans if "/" in span.name}
        assert services == {"PrefillService", "DecodeService"}


@pytest.mark.field("vllm-project/vllm-ascend#12522", "vllm-project/vllm#49250", "vllm-project/vllm#50754")
async def test_a_push_that_stops_half_way_is_tried_over_another_prefill_worker(rig: Make) -> None:
    async with rig(num_prefill=2) as router:
        first, second = router.prefills
        second.publish(queued_prompt_tokens=10)  # so that the first is chosen first
        await router.until(lambda: router.fleet.workers[1].view.load.queued_prompt_tokens == 10)
        first.push_failure = UnavailableError("the hand-off broke off: chunk 4 of 5 was not sent")
        answer = await router.generate(ask(96))
        assert (answer.token_ids, answer.reason) == (TOKENS[:5], "length")
        assert [list(prefill.works[0].output_ids) for prefill in router.prefills] == [[], TOKENS[:1]]
        assert router.decode.sources == [PUSHED, PUSHED]
        assert router.value("pageferry_prefill_failures_total", next="other_prefill") == 1
        await router.check_idle()


async def test_what_the_request_itself_is_to_blame_for_is_not_tried_again(rig: Make) -> None:
    async with rig(num_prefill=2) as router:
        for prefill in router.prefills:
            prefill.failure = InvalidArgumentError("prompt_ids: needs 300 pages, the pool has 256")
        with pytest.raises(InvalidArgumentError, match="needs 300 pages"):
            await router.generate(ask())
        assert sum(len(prefill.works) for prefill in router.prefills) == 1
        await router.check_idle()


async def test_without_resumes_a_decode_worker_lost_in_mid_stream_is_an_error(rig: Make) -> None:
    async with rig(router=RouterConfig(resumes=0, local_prefill_tokens=0)) as router:
        router.decode.fail_at = {3: UnavailableError("killed")}
        tokens = []
        with pytest.raises(UnavailableError, match="failed after 3 tokens: killed"):
            async for event in router.stream(ask()):
                tokens += [token.token_id for token in event.delta.tokens]
        assert tokens == TOKENS[:3]
        assert router.decode.sources == [PUSHED]
        assert router.value("pageferry_requests_total", outcome="unavailable") == 1
        assert router.value("pageferry_resumes_total", outcome="given_up") == 1
        await router.check_idle()


async def test_a_gap_in_the_positions_is_an_error(rig: Make, caplog: pytest.LogCaptureFixture) -> None:
    async with rig() as router:
        broken = Script(TOKENS)
        broken.token = lambda position: types.GeneratedToken(position=position + (position > 2), token_id=100)
        router.decode.script = broken
        with pytest.raises(InternalError, match="position 4 where 3 comes next"):
            await router.generate(ask(max_tokens=8, request_id="broken-1"))
        await router.check_idle()
        (root,) = [span for span in router.log.spans if span.name == "pageferry.request"]
    (failed,) = [record.pageferry_fields for record in caplog.records if record.message == "request_failed"]
    failure = failed["failure"]
    assert (failed["request_id"], failure["code"]) == ("broken-1", "INTERNAL")
    assert "position 4 where 3 comes next" in failure["message"]
    assert failure["trace_id"] == format_trace_id(root.context.trace_id)


async def test_a_stream_that_ends_without_a_result_is_an_error(rig: Make) -> None:
    async with rig(num_prefill=0, subscriptions=False) as router:

        async def nothing(request: decode_pb2.DecodeRequest) -> AsyncIterator[decode_pb2.DecodeResponse]:
            yield decode_pb2.DecodeResponse(reserved=decode_pb2.Reserved())

        router.decode._decode = nothing
        with pytest.raises(InternalError, match="ended its stream without a result"):
            await router.generate(ask())


async def test_a_refusal_returns_the_request_to_the_queue_until_the_load_changes(rig: Make) -> None:
    async with rig() as router:
        router.decode.refusals = [ResourceExhaustedError("no pages")]
        answer = await router.generate(ask())  # the end of the refused call is a change of load
        assert answer.token_ids == TOKENS[:5]
        assert router.decode.sources == [PUSHED, PUSHED]
        assert router.value("pageferry_prefill_failures_total", next="local") == 0


async def test_a_busy_prefill_worker_is_a_refusal_and_no_failure(rig: Make) -> None:
    async with rig() as router:
        router.prefill.refusal = ResourceExhaustedError("256 prompts wait already")
        reading = asyncio.create_task(router.generate(ask()))
        await eventually(lambda: len(router.prefill.works) == 1)
        router.prefill.refusal = None
        assert (await reading).token_ids == TOKENS[:5]
        assert router.value("pageferry_prefill_failures_total", next="local") == 0
        await router.check_idle()


async def test_cancel_reaches_both_workers(rig: Make) -> None:
    async with rig() as router:
        router.prefill.push.clear()
        stream = router.stream(ask(max_tokens=40))
        await read(stream, 1)
        await stream.aclose()
        await router.check_idle()
        assert (router.prefill.num_cancelled, router.decode.num_cancelled) == (1, 1)
        assert router.value("pageferry_requests_total", outcome="cancelled") == 1


async def test_cancel_in_the_queue(rig: Make) -> None:
    async with rig() as router:
        await router.fill()
        reading = asyncio.create_task(router.generate(ask()))
        await eventually(lambda: router.frontend.get_status().queued == 1)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await router.check_idle()
        router.decode.publish(running=0)
        await router.generate(ask())
        assert len(router.decode.works) == 1


@pytest.mark.parametrize("blocked", ["reserve", "prefill", "push"])
async def test_leaving_while_a_worker_is_stuck_ends_what_was_begun_each_time(rig: Make, blocked: str) -> None:
    async with rig() as router:
        gates = {"reserve": router.decode.admit, "prefill": router.prefill.compute, "push": router.prefill.push}
        gates[blocked].clear()
        worker = router.decode if blocked == "reserve" else router.prefill
        for _ in range(50):
            stream = router.stream(ask(1000))
            if blocked == "push":  # the prefill is done, and its token has come
                await read(stream, 1)
            reading = asyncio.create_task(read(stream, 1))
            await eventually(lambda: worker.num_live == 1)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await stream.aclose()
            async with asyncio.timeout(60):
                await router.check_idle()
        assert worker.num_cancelled == 50
        gates[blocked].set()
        assert (await router.generate(ask(1000))).token_ids == TOKENS[:5]


async def test_a_deadline_in_the_queue_means_no_work(rig: Make) -> None:
    async with rig(clock=HandClock()) as router:  # so that it gets to the queue before its deadline
        await router.fill()
        with pytest.raises(DeadlineExceededError, match="in the router's queue"):
            await router.generate(ask(), deadline=0.05)
        assert (router.prefill.works, router.decode.works) == ([], [])
        assert not [span for span in router.log.spans if "Prefill" in span.name or "Decode" in span.name]
        assert router.value("pageferry_requests_total", outcome="deadline_exceeded") == 1
        await router.check_idle()


async def test_a_deadline_while_it_runs_ends_both_calls(rig: Make) -> None:
    async with rig() as router:
        router.decode.pause_at = {2: asyncio.Event()}
        with pytest.raises(DeadlineExceededError):
            await router.generate(ask(), deadline=time.monotonic() + 0.3)
        await router.check_idle()


@pytest.mark.field("vllm-project/vllm#10583", "sgl-project/sglang#19035")
async def test_a_live_id_is_refused_and_free_again_afterwards(rig: Make) -> None:
    async with rig() as router:
        router.decode.pause_at = {2: asyncio.Event()}
        first = router.stream(ask(request_id="id-7"))
        await read(first, 2)
        with pytest.raises(AlreadyExistsError, match="'id-7' is live"):
            async with asyncio.timeout(60):
                await router.generate(ask(request_id="id-7"))
        router.decode.pause_at[2].set()
        rest = [token.token_id async for event in first for token in event.delta.tokens]
        assert rest == TOKENS[2:5]
        assert (await router.generate(ask(request_id="id-7"))).token_ids == TOKENS[:5]
        await router.check_idle()


async def test_a_full_queue_refuses_with_when_to_come_again(rig: Make) -> None:
    async with rig(router=RouterConfig(max_queue=1, local_prefill_tokens=0)) as router:
        await router.fill()
        waiting = asyncio.create_task(router.generate(ask(request_id="waits")))
        await eventually(lambda: router.frontend.get_status().queued == 1)
        with pytest.raises(ResourceExhaustedError, match="the limit is 1") as caught:
            await router.generate(ask())
        assert caught.value.retry_after_ms
        router.decode.publish(running=7)
        assert (await waiting).token_ids == TOKENS[:5]


async def test_workers_hold_no_more_than_they_can_run(rig: Make) -> None:
    async with rig() as router:
        router.decode.publish(running=6)
        await router.until(lambda: router.fleet.workers[1].view.load.running == 6)
        router.decode.admit.clear()
        reading = [asyncio.create_task(router.generate(ask(request_id=str(i), priority=-i))) for i in range(5)]
        await eventually(lambda: len(router.decode.works) == 2)
        assert router.frontend.get_status().queued == 3
        assert router.frontend.get_status().running == 2
        router.decode.admit.set()
        for answer in await asyncio.gather(*reading):
            assert answer.token_ids == TOKENS[:5]
        order = [work.request_id for work in router.decode.works]
        assert (set(order[2:4]), order[4:]) == ({"3", "4"}, ["2"])
        await router.check_idle()


async def test_draining_lets_live_requests_end_and_then_ends_them(rig: Make) -> None:
    async with rig() as router:
        router.decode.pause_at = {2: asyncio.Event(), 4: asyncio.Event()}
        stream = router.stream(ask())
        await read(stream, 2)
        assert not router.frontend.get_status().draining
        draining = asyncio.create_task(router.frontend.drain(grace_s=0.1))
        await asyncio.sleep(0)
        assert not router.frontend.ready
        with pytest.raises(UnavailableError, match="draining"):
            await router.generate(ask())
        router.decode.pause_at[2].set()
        await read(stream, 2)
        assert await draining == 1
        assert router.frontend.get_status().draining
        with pytest.raises(UnavailableError, match=r"its grace of 0\.1 s is over"):
            await anext(stream)
        await router.check_idle()


async def test_a_drain_waits_for_a_request_that_is_still_looked_at(rig: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as router:
        asked, gate = asyncio.Event(), asyncio.Event()

        async def render(messages: object, variables: object) -> str:
            asked.set()
            await gate.wait()
            return "Hello"

        monkeypatch.setattr(router.tokenizer.template, "render_async", render)
        request = pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hello")]))
        request.stop.max_tokens = 5
        coming = asyncio.create_task(router.generate(request))
        await asked.wait()
        draining = asyncio.create_task(router.frontend.drain(grace_s=60))
        await router.until(lambda: not router.frontend.ready)
        assert router.frontend.num_live == 1
        gate.set()
        assert (await coming).token_ids == TOKENS[:5]
        assert await draining == 0
        assert router.frontend.num_live == 0


async def test_spans_of_a_request_are_one_tree(rig: Make) -> None:
    async with rig() as router:
        await router.generate(ask(request_id="traced"))
        await router.check_idle()
        spans = await router.log.wait(7)
        root = assert_one_tree(spans)
        assert (root.name, root.kind) == ("pageferry.request", SpanKind.SERVER)
        assert sorted(span.name for span in spans if span is not root) == sorted(
            ["queue", "route"] + 2 * ["pageferry.v1.PrefillService/Prefill"] + 2 * ["pageferry.v1.DecodeService/Decode"]
        )
        codes = {span.attributes["rpc.response.status_code"] for span in spans if span.kind is not SpanKind.INTERNAL}
        assert codes == {"OK"}
        attributes = root.attributes
        assert attributes["pageferry.request_id"] == "traced"
        assert attributes["gen_ai.usage.output_tokens"] == 5
        assert attributes["gen_ai.server.request.duration"] >= attributes["gen_ai.server.time_to_first_token"] > 0
        parts = [attributes[f"pageferry.ttft.{part}_ms"] for part in
                 ("tokenize", "queue", "reserve", "prefill_queue", "prefill", "delivery")]  # fmt: skip
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(attributes["gen_ai.server.time_to_first_token"] * 1000)
        queue, route = (next(span for span in spans if span.name == name) for name in ("queue", "route"))
        assert root.start_time <= queue.start_time <= queue.end_time == route.start_time <= route.end_time
        assert route.attributes["pageferry.route.source"] == "pushed"
        assert route.attributes["pageferry.route.alternative"] == "local"


async def test_all_times_of_a_request_are_those_of_the_clock_that_the_router_was_given(rig: Make) -> None:
    async with rig(clock=lambda: 1000.0) as router:
        with pytest.raises(DeadlineExceededError):
            await router.generate(ask(), deadline=1000.0)
        answer = await router.generate(ask(), deadline=1001.0)
        timings = answer.finished.timings
        assert (timings.ttft_ms, timings.total_ms, timings.tokenize_ms, timings.queue_ms) == (0, 0, 0, 0)
        assert timings.reserve_ms == 0
        spans = await router.log.wait(8)
        assert {span.attributes["gen_ai.server.request.duration"] for span in spans if span.parent is None} == {0}


async def test_a_cancelled_request_has_one_span_that_says_so(rig: Make) -> None:
    async with rig() as router:
        router.decode.pause_at = {3: asyncio.Event()}
        stream = router.stream(ask())
        await read(stream, 3)
        await stream.aclose()
        await router.check_idle()
        roots = [span for span in router.log.spans if span.name == "pageferry.request"]
        assert len(roots) == 1
        assert roots[0].attributes["rpc.response.status_code"] == "CANCELLED"
        assert roots[0].status.description == "CANCELLED"
