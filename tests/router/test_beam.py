"""Beam searches over workers that replay hypotheses: nothing is told before the end, then the best ones as answers."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import asking
import pytest
from fake_workers import Rig, Script, eventually

from pageferry.core.errors import InvalidArgumentError, UnavailableError
from pageferry.v1 import decode_pb2, types_pb2 as types

EOS = 2
HYPOTHESES = (
    types.Hypothesis(token_ids=[*range(100, 106), EOS], score=-0.5, reason=types.FINISH_REASON_STOP),
    types.Hypothesis(token_ids=range(110, 118), score=-0.7, reason=types.FINISH_REASON_LENGTH),
    types.Hypothesis(token_ids=range(120, 128), score=-0.9, reason=types.FINISH_REASON_LENGTH),
)
NUM_TOKENS = 7 + 8 + 8
ask = partial(asking.ask, beam=types.BeamSearch(width=3), max_tokens=8)


@pytest.fixture(params=[True, False], ids=["feed", "calls"])
async def router(tiny_model: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    script = Script([], hypotheses=HYPOTHESES)
    async with Rig(str(tiny_model), script, num_decode=2, subscriptions=request.param) as router:
        yield router
        await router.check_idle()


async def test_the_best_hypotheses_are_the_answers(router: Rig) -> None:
    answer = await router.generate(ask(n=2))
    assert [answer.choices[choice].token_ids for choice in range(2)] == [[*one.token_ids] for one in HYPOTHESES[:2]]
    assert [answer.choices[choice].score for choice in range(2)] == [-0.5, -0.7]
    assert [answer.choices[choice].reason for choice in range(2)] == ["stop", "length"]
    assert [found.text for found in answer.choices.values()] == [
        router.tokenizer.decode([*range(100, 106)]),
        router.tokenizer.decode([*range(110, 118)]),
    ]
    assert answer.reason == "stop"
    assert answer.usage == types.Usage(prompt_tokens=40, completion_tokens=NUM_TOKENS)
    (work,) = (work for decode in router.decodes for work in decode.works)
    assert work.beam == types.BeamSearch(width=3, length_penalty=1.0, early_stopping=types.EARLY_STOPPING_HEURISTIC)
    assert router.value("pageferry_time_to_first_token_seconds_count") == 1
    assert router.value("pageferry_tokens_total", kind="generated") == NUM_TOKENS


async def test_one_answer_has_no_end_of_its_own(router: Rig) -> None:
    events = [event.WhichOneof("event") async for event in router.stream(ask())]
    assert events == ["started", "delta", "finished"]


async def test_the_parts_of_the_time_to_first_token_add_up(router: Rig) -> None:
    answer = await router.generate(ask())
    assert answer.finished is not None
    timings = answer.finished.timings
    names = ("tokenize", "queue", "reserve", "prefill_queue", "prefill", "delivery")
    assert sum(getattr(timings, f"{name}_ms") for name in names) == pytest.approx(timings.ttft_ms)
    assert timings.ttft_ms == pytest.approx(timings.total_ms)


async def test_the_prompt_is_handed_over_even_for_a_single_token(router: Rig) -> None:
    await router.generate(ask(max_tokens=1))
    assert [source for decode in router.decodes for source in decode.sources] == [decode_pb2.PROMPT_SOURCE_PUSHED]


async def test_text_is_cut_at_stop_strings(router: Rig) -> None:
    text = router.tokenizer.decode([*range(110, 118)])
    answer = await router.generate(ask(n=2, stop_strings=[text[3:5]]))
    first, second = answer.choices[0], answer.choices[1]
    assert (first.text, first.reason, first.matched_stop) == (router.tokenizer.decode([*range(100, 106)]), "stop", "")
    assert (second.text, second.reason, second.matched_stop) == (text[:3], "stop", text[3:5])
    assert second.token_ids == [*range(110, 115)]


async def test_the_prompt_is_echoed_in_each_answer(router: Rig) -> None:
    answer = await router.generate(ask(n=2, echo=True))
    prompt = router.tokenizer.decode([200] * 40)
    assert [found.text for found in answer.choices.values()] == [
        prompt + router.tokenizer.decode([*range(100, 106)]),
        prompt + router.tokenizer.decode([*range(110, 118)]),
    ]


async def test_a_lost_decode_worker_means_a_search_from_the_start(tiny_model: Path) -> None:
    script = Script([], hypotheses=HYPOTHESES)
    async with Rig(str(tiny_model), script, num_prefill=0, num_decode=2) as router:
        waiting = asyncio.Event()
        for decode in router.decodes:
            decode.pause_at[0] = waiting
        asking = asyncio.create_task(router.generate(ask()))
        await eventually(lambda: any(decode.works for decode in router.decodes))
        lost = next(decode for decode in router.decodes if decode.works)
        lost.fail_at[0] = UnavailableError("gone", reason="GONE")
        waiting.set()
        answer = await asking
        assert answer.token_ids == [*HYPOTHESES[0].token_ids]
        assert [len(decode.works) for decode in router.decodes] == [1, 1]
        assert router.value("pageferry_resumes_total", outcome="resumed") == 1
        await router.check_idle()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 4}, r"^n is 4, must be at most beam\.width, 3$"),
        (
            {"beam": types.BeamSearch(width=9)},
            r"^beam\.width is 9, must be at most 8, the max_num_seqs of the decode workers",
        ),
        ({"beam": types.BeamSearch(width=17)}, r"^beam\.width is 17, must be from 1 to 16$"),
        ({"best_of": 2}, "^best_of is 2, must not be set with beam"),
        ({"sampling": types.SamplingParams(logprobs=0)}, "^logprobs is 0, must not be set with beam"),
        ({"sampling": types.SamplingParams(grammar=types.Grammar(json_object=True))}, "^beam is .* grammar"),
        ({"stop": types.StopConditions(max_repeats=4)}, r"^stop\.max_repeats is 4, must not be set with beam"),
    ],
)
async def test_what_a_search_cannot_have_is_refused(router: Rig, fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        await router.generate(ask(**fields))
