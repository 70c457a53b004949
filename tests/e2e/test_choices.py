"""Several answers to one request through real processes: their draws, their ends, and the pages that they share."""

import asyncio

import pytest
from answer import Answer
from cluster import POLL_S, Cluster, Stub, connected, generate, wait_idle

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import SamplingParams, StopConditions

PROMPT = [4 + (index * 29) % 251 for index in range(600)]


@pytest.fixture(params=["split", "colocated"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    found: Cluster = request.getfixturevalue(request.param)
    return found


def ask(n: int, max_tokens: int, *, prompt: list[int] = PROMPT, **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        n=n,
        sampling=SamplingParams(temperature=1, seed=42),
        stop=StopConditions(max_tokens=max_tokens, ignore_eos=True),
        **fields,
    )


def outputs(answer: Answer) -> list[list[int]]:
    return [answer.choices[choice].token_ids for choice in range(len(answer.choices))]


@pytest.mark.field("vllm-project/vllm#11898", "ggml-org/llama.cpp#18700")
async def test_seeded_answers_differ_are_the_same_in_each_run_and_all_reach_their_end(cluster: Cluster) -> None:
    async with connected(cluster) as stub:
        free = outputs(await generate(stub, ask(3, 24)))
        assert len({tuple(tokens) for tokens in free}) == 3
        early, last_id = next(
            (choice, token)
            for choice, tokens in enumerate(free)
            for token in tokens[2:8]
            if not any(token in other for other in free if other is not tokens)
        )
        cut = free[early].index(last_id) + 1
        expected = [tokens[:cut] if choice == early else tokens for choice, tokens in enumerate(free)]
        for _ in range(2):
            request = ask(3, 24)
            request.stop.stop_token_ids.append(last_id)
            answer = await generate(stub, request)
            assert outputs(answer) == expected
            reasons = [answer.choices[choice].reason for choice in range(3)]
            assert reasons == ["stop" if choice == early else "length" for choice in range(3)]
        alone = await generate(stub, ask(1, 24))
        assert alone.token_ids == free[0]
        await wait_idle(stub)


async def pages_in_use(stub: Stub, request: pb.GenerateRequest) -> int:
    """Most pages that decode workers held for the request, as far as could be seen."""
    for _ in range(20):
        most, have_run = 0, False
        call = asyncio.create_task(generate(stub, request))
        while not call.done():
            status = await stub.GetStatus(pb.GetStatusRequest())
            loads = [worker.load for worker in status.workers if worker.role == "decode"]
            most = max(most, sum(load.pages_total - load.pages_free - load.pages_cached for load in loads))
            have_run |= sum(load.running for load in loads) == request.n
            await asyncio.sleep(POLL_S)
        assert (await call).reason == "length"
        await wait_idle(stub)
        if have_run:
            return most
    raise AssertionError(f"{request.n} answers were never seen to run together")


async def test_four_answers_to_a_long_prompt_share_its_pages(cluster: Cluster) -> None:
    prompt = [4 + (index * 53) % 257 for index in range(2048)]
    async with connected(cluster) as stub:
        one, four = [await pages_in_use(stub, ask(n, 96, prompt=prompt)) for n in (1, 4)]
        assert one >= 2048 // 16
        assert four < 1.3 * one


async def test_each_answer_after_the_first_computes_at_most_a_page_of_the_prompt(cluster: Cluster) -> None:
    prompt = [4 + (index * 59) % 241 for index in range(1030)]
    async with connected(cluster) as stub:

        async def computed() -> dict[str, int]:
            return {worker.address: worker.load.prefill_tokens for worker in (await wait_idle(stub)).workers}

        before = await computed()
        answer = await generate(stub, ask(4, 6, prompt=prompt))
        assert answer.usage.prompt_tokens == 1030
        assert answer.usage.completion_tokens == sum(map(len, outputs(answer))) == 24
        after = await computed()
        assert sum(after.values()) - sum(before.values()) <= 1030 + 3 * 16


async def test_a_caller_who_leaves_frees_all_answers(cluster: Cluster) -> None:
    async with connected(cluster) as stub:
        call = stub.Generate(ask(4, 3000))
        seen: set[int] = set()
        while len(seen) < 4:
            seen.add((await call.read()).delta.choice)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()
        await wait_idle(stub)


async def test_the_likeliest_of_several_is_the_one_that_its_log_probabilities_say(cluster: Cluster) -> None:
    async with connected(cluster) as stub:
        request = ask(4, 8)
        request.sampling.logprobs = 0
        means: dict[int, list[float]] = {}
        async for event in stub.Generate(request):
            for token in event.delta.tokens:
                means.setdefault(event.delta.choice, []).append(token.logprobs.sampled.logprob)
        order = sorted(means, key=lambda choice: -sum(means[choice]))
        free = outputs(await generate(stub, request))
        best = await generate(stub, ask(2, 8, best_of=4))
        assert outputs(best) == [free[choice] for choice in order[:2]]
        assert best.choices[0].score == pytest.approx(sum(means[order[0]]) / 8)
        assert best.usage.completion_tokens == 32
