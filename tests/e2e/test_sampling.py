"""Sampling parameters through router and workers: the first token is a prefill worker's, or all are one's."""

from collections.abc import Iterator

import pytest
from cluster import Cluster, connected, generate
from streams import prompt_of
from tiny_model import EOS_ID

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import Choices, Grammar, PromptLogprobs, SamplingParams, StopConditions, TokenSequence

TEXTS = ["yes", "no way", "perhaps"]


@pytest.fixture(params=["split", "colocated"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    yield request.getfixturevalue(request.param)


def ask(number: int, max_tokens: int = 40, *, ignore_eos: bool = True, **sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt_of(40_000 + number, 40)),
        sampling=SamplingParams(**({"temperature": 1, "seed": number} | sampling)),
        stop=StopConditions(max_tokens=max_tokens, ignore_eos=ignore_eos),
    )


async def test_grammars_hold_from_the_first_token_to_the_last(cluster: Cluster) -> None:
    grammar = Grammar(choices=Choices(texts=TEXTS))
    async with connected(cluster) as stub:
        answers = [await generate(stub, ask(seed, ignore_eos=False, grammar=grammar)) for seed in range(12)]
    assert {answer.text for answer in answers} <= set(TEXTS)
    assert len({answer.text for answer in answers}) > 1
    assert {answer.reason for answer in answers} == {"stop"}
    assert all(answer.token_ids[-1] == EOS_ID for answer in answers)


async def test_a_grammar_cut_short_says_length(cluster: Cluster) -> None:
    request = ask(20, 5, ignore_eos=False, grammar=Grammar(regex="[a-c]{30}"))
    async with connected(cluster) as stub:
        answer = await generate(stub, request)
        assert (answer.reason, len(answer.token_ids)) == ("length", 5)
        request.stop.max_tokens = 60
        request.stop_strings.append(answer.text[2:4])
        stopped = await generate(stub, request)
    assert (stopped.reason, stopped.text) == ("stop", answer.text[: answer.text.index(answer.text[2:4])])


async def test_a_grammar_that_can_end_early_ignores_min_tokens(cluster: Cluster) -> None:
    request = ask(21, 40, ignore_eos=False, grammar=Grammar(regex="ab"))
    request.stop.min_tokens = 20
    async with connected(cluster) as stub:
        answer = await generate(stub, request)
    assert (answer.text, answer.reason) == ("ab", "stop")


async def test_bias_and_bans_hold_from_the_first_token_to_the_last(cluster: Cluster) -> None:
    biased = dict.fromkeys((100, 101, 102), 100.0)
    banned = [TokenSequence(ids=[101]), TokenSequence(ids=[100, 102])]
    async with connected(cluster) as stub:
        free = await generate(stub, ask(22, logit_bias=biased))
        answer = await generate(stub, ask(22, logit_bias=biased, banned=banned))
    assert set(free.token_ids) == {100, 101, 102}
    assert set(answer.token_ids) == {100, 102}
    assert (100, 102) in zip(free.token_ids, free.token_ids[1:], strict=False)
    assert (100, 102) not in zip(answer.token_ids, answer.token_ids[1:], strict=False)


async def test_bad_words_do_not_come(cluster: Cluster) -> None:
    async with connected(cluster) as stub:
        ids = (await stub.Tokenize(pb.TokenizeRequest(text="xq"))).ids
        request = ask(23, logit_bias=dict.fromkeys(ids, 100.0))
        assert "xq" in (await generate(stub, request)).text
        request.bad_words.append("xq")
        text = (await generate(stub, request)).text
    assert set(text) == set("xq")
    assert "xq" not in text


async def test_a_generation_that_repeats_itself_ends_with_that_reason(cluster: Cluster) -> None:
    request = ask(24, 50, logit_bias={100: 100.0})
    request.stop.max_repeats = 7
    async with connected(cluster) as stub:
        answer = await generate(stub, request)
    assert (answer.reason, answer.token_ids) == ("repetition", [100] * 7)


async def test_no_end_comes_before_min_tokens_nor_when_it_is_ignored(cluster: Cluster) -> None:
    request = ask(25, 30, ignore_eos=False, logit_bias={EOS_ID: 100.0})
    async with connected(cluster) as stub:
        assert len((await generate(stub, request)).token_ids) == 1
        request.stop.min_tokens = 10
        answer = await generate(stub, request)
        assert (len(answer.token_ids), answer.reason) == (11, "stop")
        request.stop.ignore_eos = True
        request.stop.min_tokens = 0
        assert (await generate(stub, request)).reason == "length"


async def prompt_logprobs(cluster: Cluster, request: pb.GenerateRequest) -> tuple[PromptLogprobs, int]:
    """And the number of cached tokens."""
    found: list[PromptLogprobs] = []
    async with connected(cluster) as stub:
        async for response in stub.Generate(request, timeout=60):
            if response.delta.HasField("prompt_logprobs"):
                found.append(response.delta.prompt_logprobs)
    (logprobs,) = found
    return logprobs, response.finished.usage.cached_tokens


async def test_a_prompts_log_probabilities_are_equal_wherever_it_is_computed(
    split: Cluster, colocated: Cluster
) -> None:
    request = ask(26, 3, temperature=0, prompt_logprobs=2)
    request.token_ids.ids[:] = prompt_of(41_000, 100)
    by_prefill, _ = await prompt_logprobs(split, request)
    again, _ = await prompt_logprobs(split, request)  # with pages on all workers
    by_decode, _ = await prompt_logprobs(colocated, request)
    assert [one.sampled.token_id for one in by_prefill.tokens] == list(request.token_ids.ids)[1:]
    assert all(len(one.top) == 2 and one.top[0].logprob >= one.sampled.logprob for one in by_prefill.tokens)
    for other in (again, by_decode):
        for one, same in zip(by_prefill.tokens, other.tokens, strict=True):
            assert one.sampled.logprob == pytest.approx(same.sampled.logprob, abs=1e-3)
