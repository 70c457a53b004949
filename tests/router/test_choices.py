"""Several answers to one request over workers that replay tokens: each ends by itself, and the request once."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

import asking
import pytest
from answer import Answer
from fake_workers import FakePrefill, Make, Rig, Script, eventually
from spans import assert_one_tree

from pageferry.core.config import RouterConfig
from pageferry.core.errors import DeadlineExceededError, InternalError, ResourceExhaustedError, UnavailableError
from pageferry.v1 import inference_pb2 as pb, prefill_pb2, types_pb2 as types

EOS = 2
TOKENS = {0: [*range(100, 140)], 1: [*range(140, 180)], 2: [*range(180, 184), EOS, *range(184, 220)]}
ask = partial(asking.ask, n=3, max_tokens=8)


@pytest.fixture(params=[True, False], ids=["feed", "calls"])
def rig(tiny_model: Path, request: pytest.FixtureRequest) -> Make:
    def make(tokens: dict[int, list[int]] = TOKENS, logprobs: dict[int, float] | None = None, **options: object) -> Rig:
        script = Script(tokens[0], {choice: tokens[choice] for choice in tokens if choice}, logprobs or {})
        return Rig(str(tiny_model), script, **{"subscriptions": request.param} | options)

    return make


async def test_each_answer_is_its_own_and_ends_by_itself(router: Rig) -> None:
    answer = await router.generate(ask(request_id="several"))
    assert {choice: found.token_ids for choice, found in answer.choices.items()} == {
        0: TOKENS[0][:8],
        1: TOKENS[1][:8],
        2: TOKENS[2][:5],
    }
    assert [answer.choices[choice].reason for choice in range(3)] == ["length", "length", "stop"]
    assert all(
        found.text == router.tokenizer.decode(TOKENS[choice][: len(found.token_ids)])
        for choice, found in answer.choices.items()
    )
    assert answer.reason == "length"
    assert answer.usage == types.Usage(prompt_tokens=40, completion_tokens=21)
    works = router.decode.works
    assert sorted((work.request_id, work.choice) for work in works) == [
        ("several", 0),
        ("several/1", 1),
        ("several/2", 2),
    ]
    assert len({work.sampling.seed for work in works}) == 1
    assert router.value("pageferry_requests_total", outcome="length") == 1
    assert router.value("pageferry_tokens_total", kind="prompt") == 40
    assert router.value("pageferry_tokens_total", kind="generated") == 21
    assert router.value("pageferry_time_to_first_token_seconds_count") == 1


async def test_one_answer_has_no_end_of_its_own(router: Rig) -> None:
    events = [event.WhichOneof("event") async for event in router.stream(ask(n=1))]
    assert events == ["started", *["delta"] * 8, "finished"]


async def test_others_begin_once_the_decode_worker_has_drawn_a_token_of_its_own(router: Rig) -> None:
    second = router.decode.pause_at[1] = asyncio.Event()
    answer = Answer()
    async with aclosing(router.stream(ask())) as events:
        async for event in events:
            answer.take(event)
            if answer.token_ids:
                break
        await eventually(lambda: router.decode.num_fed == 1 or not router.decode.feeds)
        assert [work.choice for work in router.decode.works] == [0]
        status = router.frontend.get_status()
        assert (status.queued, status.running) == (0, 1)
        second.set()
        await answer.read(events)
    assert len(answer.choices) == 3


async def test_one_token_each_needs_no_decode_worker(router: Rig) -> None:
    answer = await router.generate(ask(max_tokens=1))
    assert [answer.choices[choice].token_ids for choice in range(3)] == [tokens[:1] for tokens in TOKENS.values()]
    assert router.decode.works == []
    assert router.prefill.works[0].choice == 0


async def test_a_first_answer_that_ends_with_its_first_token_lets_the_others_begin(rig: Make) -> None:
    async with rig(TOKENS | {0: [EOS, *TOKENS[0]]}) as router:
        answer = await router.generate(ask())
        assert [len(answer.choices[choice].token_ids) for choice in range(3)] == [1, 8, 5]
        assert answer.reason == "stop"
        await router.check_idle()


async def test_the_others_go_to_the_decode_worker_that_has_the_prompt(rig: Make) -> None:
    async with rig(num_decode=2) as router:
        for _ in range(4):
            await router.generate(ask())
        first, second = (sorted(work.choice for work in decode.works) for decode in router.decodes)
        assert len(first) % 3 == len(second) % 3 == 0
        await router.check_idle()


async def test_a_stop_string_ends_its_own_answer_only(rig: Make) -> None:
    texts = {0: b"abcdefgh", 1: b"stopqrst", 2: b"ijklmnop"}
    async with rig({choice: [4 + byte for byte in text] for choice, text in texts.items()}) as router:
        answer = await router.generate(ask(stop_strings=["op"]))
        assert [answer.choices[choice].text for choice in range(3)] == ["abcdefgh", "st", "ijklmn"]
        assert [answer.choices[choice].matched_stop for choice in range(3)] == ["", "op", "op"]
        assert (answer.reason, answer.finished.matched_stop) == ("length", "")
        await router.check_idle()


async def test_the_loss_of_a_decode_worker_is_made_good_for_each(rig: Make) -> None:
    async with rig(num_decode=2) as router:
        lost = asyncio.create_task(router.generate(ask()))
        for decode in router.decodes:
            decode.pause_at[4] = asyncio.Event()
        await eventually(lambda: sum(decode.num_live for decode in router.decodes) == 3)
        has, other = sorted(router.decodes, key=lambda decode: -decode.num_live)
        has.fail_at = {4: UnavailableError("killed")}
        other.pause_at.clear()
        has.pause_at[4].set()
        answer = await lost
        assert [answer.choices[choice].token_ids for choice in range(3)] == [
            TOKENS[0][:8],
            TOKENS[1][:8],
            TOKENS[2][:5],
        ]
        assert len(other.works) >= 3
        assert all(work.request_id.endswith(f"/{work.choice}.2") for work in other.works if work.choice)
        await router.check_idle()


async def test_the_failure_of_one_is_that_of_all(router: Rig) -> None:
    router.decode.fail_at, router.decode.failing = {3: InternalError("broken")}, {1}
    router.decode.pause_at[6] = asyncio.Event()  # the others are still at work
    answer = Answer()
    with pytest.raises(InternalError, match="broken"):
        await answer.read(router.stream(ask()))
    assert answer.finished is None
    await router.decode.wait_idle()
    assert router.decode.num_cancelled >= 1
    assert router.value("pageferry_requests_total", outcome="internal") == 1


async def test_a_caller_who_leaves_ends_all(router: Rig) -> None:
    router.decode.pause_at[3] = asyncio.Event()
    async with aclosing(router.stream(ask())) as events:
        async for _ in events:
            if router.decode.num_live == 3:
                break
    await router.check_idle()
    assert router.decode.num_cancelled == 3
    assert router.value("pageferry_requests_total", outcome="cancelled") == 1


async def test_a_drain_ends_all_when_its_grace_is_over(router: Rig) -> None:
    router.decode.pause_at[3] = asyncio.Event()
    reading = asyncio.create_task(router.generate(ask()))
    await eventually(lambda: router.decode.num_live == 3)
    assert router.frontend.num_live == 1
    assert await router.frontend.drain(grace_s=0) == 1
    with pytest.raises(UnavailableError, match="the router drains"):
        await reading


async def test_a_full_queue_holds_up_no_answer_of_a_request_that_was_let_in(rig: Make) -> None:
    async with rig(router=RouterConfig(local_prefill_tokens=0, max_queue=1)) as router:
        second = router.decode.pause_at[1] = asyncio.Event()
        reading = asyncio.create_task(router.generate(ask()))
        await eventually(lambda: router.decode.num_live == 1)
        router.decode.publish(running=8)
        await router.until(lambda: router.fleet.workers[-1].view.load.running == 8)
        waiting = asyncio.create_task(router.generate(ask(n=1)))
        await eventually(lambda: router.frontend.get_status().queued == 1)
        with pytest.raises(ResourceExhaustedError, match="queue is full"):
            await router.generate(ask(n=1))
        second.set()
        await eventually(lambda: router.frontend.get_status().queued == 3)
        router.decode.publish(running=0)
        assert len((await reading).choices) == 3
        assert (await waiting).token_ids == TOKENS[0][:8]
        await router.check_idle()


async def test_a_reader_who_stops_loses_all_answers_at_one_limit(tiny_model: Path) -> None:
    tokens = [100 + index % 100 for index in range(400)]
    config = RouterConfig(local_prefill_tokens=0, max_unread_tokens=100)
    async with Rig(str(tiny_model), Script(tokens), router=config) as router:
        router.decode.pause_at[350] = asyncio.Event()
        async with aclosing(router.stream(ask(n=2, max_tokens=400))) as events:
            async for _ in events:
                if router.decode.num_live == 2:
                    break
            await eventually(lambda: router.decode.num_live == 0)
            with pytest.raises(ResourceExhaustedError, match="max_unread_tokens is 50"):
                async for _ in events:
                    pass
        await router.check_idle()


async def test_the_likeliest_are_sent_best_first_once_all_are_complete(rig: Make) -> None:
    async with rig(logprobs={0: -2.0, 1: -0.5, 2: -1.0}) as router:
        events = [event async for event in router.stream(ask(n=2, best_of=3))]
        answer = Answer()
        for event in events:
            answer.take(event)
        assert [answer.choices[choice].token_ids for choice in range(2)] == [TOKENS[1][:8], TOKENS[2][:5]]
        assert [answer.choices[choice].score for choice in range(2)] == [-0.5, -1.0]
        assert len(answer.choices) == 2
        assert (answer.reason, answer.usage.completion_tokens) == ("length", 21)
        assert not any(token.HasField("logprobs") for event in events for token in event.delta.tokens)
        assert {work.sampling.logprobs for work in router.decode.works if work.sampling.HasField("logprobs")} == {0}
        assert len(router.decode.works) == 3
        request = ask(n=1, best_of=2)
        request.sampling.logprobs = 0
        answer = await router.generate(request)
        assert (answer.token_ids, answer.choices[0].score) == (TOKENS[1][:8], -0.5)
        await router.check_idle()


PROMPT_LOGPROBS = types.PromptLogprobs(
    tokens=[types.Logprobs(sampled=types.TokenLogprob(token_id=200, logprob=-0.25)) for _ in range(39)]
)


@pytest.mark.parametrize("source", ["prefill", "decode", "prefill, late"])
async def test_the_prompts_log_probabilities_come_once_with_the_first_answer(rig: Make, source: str) -> None:
    async with rig(num_prefill=source != "decode") as router:
        for worker in (*router.prefills, *router.decodes):
            worker.script.prompt_logprobs = PROMPT_LOGPROBS
        if source == "prefill, late":
            commit_without_a_word(router)
        request = ask(n=2)
        request.sampling.prompt_logprobs = 0
        deltas = [event.delta async for event in router.stream(request) if event.HasField("delta")]
        first, *others = deltas
        assert (first.prompt_logprobs, first.choice, first.tokens[0].position) == (PROMPT_LOGPROBS, 0, 0)
        assert not any(delta.HasField("prompt_logprobs") for delta in others)
        assert [token.token_id for delta in deltas if not delta.choice for token in delta.tokens] == TOKENS[0][:8]
        asked = {work.choice for work in router.decode.works if work.sampling.HasField("prompt_logprobs")}
        assert asked == {0}
        await router.check_idle()


async def test_the_prompts_log_probabilities_come_with_the_likeliest_answer_whichever_that_is(rig: Make) -> None:
    async with rig(logprobs={0: -2.0, 1: -0.5, 2: -1.0}) as router:
        router.prefill.script.prompt_logprobs = PROMPT_LOGPROBS
        for n in (1, 2):
            request = ask(n=n, best_of=3)
            request.sampling.prompt_logprobs = 0
            deltas = [event.delta async for event in router.stream(request) if event.HasField("delta")]
            told = [(delta.choice, delta.prompt_logprobs) for delta in deltas if delta.HasField("prompt_logprobs")]
            assert told == [(0, PROMPT_LOGPROBS)]
            assert deltas[0].tokens[0].token_id == TOKENS[1][0]
        await router.check_idle()


@pytest.mark.parametrize("comes_first", ["prefill worker", "tokens"])
async def test_a_prefill_worker_that_dies_without_a_word_on_the_prompt_has_failed(rig: Make, comes_first: str) -> None:
    async with rig(num_prefill=2) as router:
        for worker in (*router.prefills, *router.decodes):
            worker.script.prompt_logprobs = PROMPT_LOGPROBS
        dead = commit_and_die(router)
        first = router.decode.pause_at[0] = asyncio.Event()
        if comes_first == "tokens":
            first.set()
        request = ask(n=1)
        request.sampling.prompt_logprobs = 0
        reading = asyncio.create_task(collect(router, request))
        await dead.wait()
        for prefill in router.prefills:
            await prefill.wait_idle()
        first.set()
        told, *others = await reading
        assert told.prompt_logprobs == PROMPT_LOGPROBS
        assert not any(delta.HasField("prompt_logprobs") for delta in others)
        assert [token.token_id for delta in (told, *others) for token in delta.tokens] == TOKENS[0][:8]
        assert router.value("pageferry_prefill_failures_total", next="other_prefill") == 1
        await router.check_idle()


async def collect(router: Rig, request: pb.GenerateRequest) -> list[pb.Delta]:
    return [event.delta async for event in router.stream(request) if event.HasField("delta")]


def commit_and_die(router: Rig) -> asyncio.Event:
    """Let the first call of a prefill worker commit and then break, before it has told of the first token.

    Where the decode worker goes on, all its tokens come before. Returns what is set once it has committed.
    """
    dead = asyncio.Event()

    def dying(whole: Callable[[prefill_pb2.PrefillRequest], AsyncGenerator[object, None]]) -> object:
        async def prefill(request: prefill_pb2.PrefillRequest) -> AsyncIterator[object]:
            is_first = not dead.is_set()
            async with aclosing(whole(request)) as events:
                yield await anext(events)
                async for event in events:
                    if not is_first:
                        yield event
            if is_first:
                dead.set()
                if router.decode.pause_at[0].is_set():
                    await router.decode.wait_idle()
                raise UnavailableError("killed", reason="STREAM_BROKEN")

        return prefill

    for prefill in router.prefills:
        prefill._prefill = dying(prefill._prefill)
    return dead


def commit_without_a_word(router: Rig) -> None:
    """Let the decode worker's tokens come to the router before the prefill worker tells of the first."""
    whole = router.prefill._prefill

    async def late(request: prefill_pb2.PrefillRequest) -> AsyncIterator[object]:
        async with aclosing(whole(request)) as events:
            yield await anext(events)
            told = [event async for event in events]
        await router.decode.wait_idle()
        for event in told:
            yield event

    router.prefill._prefill = late


@pytest.mark.parametrize("max_tokens", [8, 2])
async def test_the_prompts_log_probabilities_are_never_lost_with_their_worker(rig: Make, max_tokens: int) -> None:
    """One that dies once the pages are there, and has told nothing, has not done what it was asked for."""
    async with rig(num_prefill=2) as router:
        for worker in (*router.prefills, *router.decodes):
            worker.script.prompt_logprobs = PROMPT_LOGPROBS
        for worker in router.prefills:
            die_without_a_word(router, worker)
        request = ask(n=1, max_tokens=max_tokens)
        request.sampling.prompt_logprobs = 0
        deltas = [event.delta async for event in router.stream(request) if event.HasField("delta")]
        assert [delta.HasField("prompt_logprobs") for delta in deltas] == [True, *[False] * (len(deltas) - 1)]
        assert [token.token_id for delta in deltas for token in delta.tokens] == TOKENS[0][:max_tokens]
        assert [len(worker.works) for worker in router.prefills] == [1, 1]
        await router.check_idle()


def die_without_a_word(router: Rig, prefill: FakePrefill) -> None:
    """The first that is asked does, behind the decode worker's tokens."""
    whole = prefill._prefill

    async def dies(request: prefill_pb2.PrefillRequest) -> AsyncIterator[object]:
        is_first = sum(len(worker.works) for worker in router.prefills) == 1
        async with aclosing(whole(request)) as events:
            yield await anext(events)
            told = [event async for event in events]
        if is_first:
            await router.decode.wait_idle()
            raise UnavailableError("gone")
        for event in told:
            yield event

    prefill._prefill = dies


async def test_an_echo_is_the_prompts_text_before_each_answer(router: Rig) -> None:
    prompt = [1, *(4 + byte for byte in "Où ".encode())]  # a special token, then a byte each
    request = ask(n=2, echo=True)
    request.token_ids.ids[:] = [*prompt, 4 + 0xE5]  # and the first byte of a character that does not come
    texts: dict[int, list[str]] = {}
    async for event in router.stream(request):
        if event.HasField("delta"):
            texts.setdefault(event.delta.choice, []).append(event.delta.text)
    for choice, parts in texts.items():
        assert parts[0].startswith("Où ")
        assert "".join(parts) == router.tokenizer.decode([*request.token_ids.ids, *TOKENS[choice][:8]])
    request.skip_special_tokens = False
    answer = await router.generate(request)
    assert answer.text.startswith("<|im_start|>Où ")
    assert answer.usage.completion_tokens == 16


async def test_spans_of_each_answer_lie_in_one_of_its_own(router: Rig) -> None:
    await router.generate(ask(n=2))
    await router.check_idle()
    spans = await router.log.wait(15)
    root = assert_one_tree(spans)
    assert root.name == "pageferry.request"
    choices = {span.context.span_id: span.attributes["pageferry.choice"] for span in spans if span.name == "choice"}
    assert sorted(choices.values()) == [0, 1]
    for name in ("queue", "route"):
        assert sorted(choices[span.parent.span_id] for span in spans if span.name == name) == [0, 1]


@pytest.mark.parametrize("best_of", [0, 4])
async def test_what_a_tenant_spends_is_that_of_all_answers(router: Rig, best_of: int) -> None:
    tokens = router.frontend.check_caller(()).account._tokens
    before = tokens._level
    answer = await router.generate(ask(best_of=best_of))
    assert answer.usage.completion_tokens == (29 if best_of else 21)
    assert before - tokens._level == 40 + answer.usage.completion_tokens


async def test_a_deadline_ends_all(router: Rig) -> None:
    router.decode.pause_at[3] = asyncio.Event()
    second = router.decode.pause_at[1] = asyncio.Event()
    deadline = router.frontend.clock() + 1
    reading = asyncio.create_task(router.generate(ask(), deadline=deadline))
    await eventually(lambda: router.decode.num_live == 1)
    second.set()
    with pytest.raises(DeadlineExceededError):
        await reading
    await router.check_idle()
