"""What requests share through real processes: pages of equal prompts, within a tenant, while others still run."""

import httpx
import pytest
from cluster import Cluster, Stub, connected, generate, greedy, running, wait_idle
from prometheus_client.parser import text_string_to_metric_families
from sharing import Sharing, pages_of_eight

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import SamplingParams, StopConditions

B = 16


@pytest.fixture(params=["split", "colocated"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    found: Cluster = request.getfixturevalue(request.param)
    return found


async def router_tokens(client: httpx.AsyncClient) -> dict[str, float]:
    """By kind, as the router counts them."""
    families = text_string_to_metric_families((await client.get("/metrics")).text)
    samples = [sample for family in families for sample in family.samples if sample.name == "pageferry_tokens_total"]
    return {sample.labels["kind"]: sample.value for sample in samples}


@pytest.mark.field("vllm-project/vllm#16016")
async def test_a_prompt_is_cached_for_its_tenant_and_for_no_other(cluster: Cluster) -> None:
    prompt = [4 + (index * 43) % 257 for index in range(512)]
    async with connected(cluster) as stub, httpx.AsyncClient(base_url=cluster.http, timeout=60) as client:

        async def cached(**metadata: str) -> int:
            answer = await generate(stub, greedy(prompt, 2), **metadata)
            answers.add(tuple(answer.token_ids))
            return answer.usage.cached_tokens

        async def cached_by_http(**headers: str) -> int:
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            usage = (await client.post("/v1/completions", json=body, headers=headers)).json()["usage"]
            found: int = usage["prompt_tokens_details"]["cached_tokens"]
            return found

        answers: set[tuple[int, ...]] = set()
        before = await router_tokens(client)
        assert await cached(authorization="Bearer one") == 0
        for others in ("Bearer two", "Bearer On", "one"):
            assert await cached(authorization=others) == 0
        assert await cached() == 0
        assert await cached_by_http(authorization="Bearer three") == 0
        assert await cached_by_http(authorization="Bearer one") == 511
        assert await cached(authorization="Bearer one") == 511
        assert await cached_by_http() == 511
        after = await router_tokens(client)
        assert {kind: after[kind] - before[kind] for kind in after} == {
            "prompt": 9 * 512,
            "cached": 3 * 511,
            "generated": 18,
        }
        assert len(answers) == 1
        body = {"prompt": prompt, "max_tokens": 2, "cache_salt": "one"}
        refused = await client.post("/v1/completions", json=body, headers={"authorization": "Bearer two"})
        assert refused.status_code == 400
        assert "cache_salt" in refused.json()["error"]["message"]
        await wait_idle(stub)


def chat(system: str, question: str) -> pb.GenerateRequest:
    roles = (("system", system), ("user", question))
    messages = [pb.ChatMessage(role=role, content=content) for role, content in roles]
    stop = StopConditions(max_tokens=2, ignore_eos=True)
    return pb.GenerateRequest(
        chat=pb.ChatMessages(messages=messages), sampling=SamplingParams(temperature=0), stop=stop
    )


async def test_system_prompts_share_whatever_their_outer_whitespace_and_line_ends(cluster: Cluster) -> None:
    system = "You answer briefly.\nYou never guess.\n\nYou count the crates on deck twice, and say so."
    async with connected(cluster) as stub:
        cold = await generate(stub, chat(system, "How many?"))
        assert cold.usage.cached_tokens == 0
        for variant in (f"\n  {system} \n", system.replace("\n", "\r\n"), system.replace("\n", "\r")):
            again = await generate(stub, chat(variant, "How many?"))
            assert again.usage.prompt_tokens == cold.usage.prompt_tokens
            assert again.usage.cached_tokens >= cold.usage.prompt_tokens // B * B - 1
            assert again.token_ids == cold.token_ids


@pytest.mark.field("PrimeIntellect-ai/prime-rl#1863", "JustVugg/colibri#1576")
async def test_a_text_that_tokenises_differently_the_next_time_is_found_as_far_as_ids_are_equal(
    split: Cluster, colocated: Cluster
) -> None:
    question = "Where does the boat go, and what is on it? Say it in a few words, then say it again: "
    async with connected(split) as stub, connected(colocated) as other:

        async def ids_of(text: str) -> list[int]:
            return list((await stub.Tokenize(pb.TokenizeRequest(text=text))).ids)

        asked = await ids_of(question)
        spelt = [4 + byte for byte in b"to the other side, then"]  # as a model may: by other tokens than its tokenizer
        first = await generate(stub, greedy(asked + spelt, 8))
        assert first.usage.cached_tokens == 0
        turn = f"{question}to the other side, then back"
        equal = common(asked + spelt, await ids_of(turn))
        assert equal < len(asked + spelt)
        second = await generate(stub, greedy(turn, 8))
        assert second.usage.cached_tokens == equal // B * B > 0
        assert second.token_ids == (await generate(other, greedy(turn, 8))).token_ids
        known = [await ids_of(turn)]
        for text in (f"{question}Hi", f"{question}Hi ", f"{question}Hi\n"):
            ids = await ids_of(text)
            answer = await generate(stub, greedy(text, 8))
            most = max(common(ids, others) for others in known) // B * B
            assert answer.usage.cached_tokens == min(most, len(ids) - 1)
            assert answer.token_ids == (await generate(other, greedy(text, 8))).token_ids
            known.append(ids)


def common(one: list[int], other: list[int]) -> int:
    """How many ids at the start are equal."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


async def test_live_requests_share_the_pages_of_a_system_prompt(colocated: Cluster) -> None:
    shared = [4 + (index * 31) % 263 for index in range(640)]
    async with connected(colocated) as stub:
        check_shared(await pages_of_eight(stub, shared, [[5 + n + i % 9 for i in range(300)] for n in range(8)], 1000))


def check_shared(found: Sharing) -> None:
    assert found.pages <= 1.1 * (found.shared_tokens + found.own_tokens) / B, found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_eight_conversations_of_2000_tokens_share_1000(num_prefill: int) -> None:
    check_shared(await conversations_of_2000(num_prefill))


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_windows_in_half_the_layers_save_a_third_of_what_conversations_hold() -> None:
    whole = await conversations_of_2000(1)
    selective = await conversations_of_2000(1, "--cache-layers", "0-14=window:256,sinks:4;15-29=full")
    assert selective.kv_bytes <= 0.7 * whole.kv_bytes, (whole, selective)


async def conversations_of_2000(num_prefill: int, *more_options: str) -> Sharing:
    options = ("--prefill", str(num_prefill), "--decode", "1", "--model", "smollm2", *more_options)
    with running(*options, settings={"engine.num_pages": "1500"}) as cluster:
        async with connected(cluster) as stub:
            shared = await words(stub, "The crew counted the crates on deck and wrote every number down. ", 1000)
            own = [
                await words(stub, f"Crate number {n} holds {n} pages of keys, and of values. ", 960) for n in range(8)
            ]
            found = await pages_of_eight(stub, shared, own, 4000)
            print(more_options, found)
            return found


async def words(stub: Stub, text: str, num_tokens: int) -> list[int]:
    return list((await stub.Tokenize(pb.TokenizeRequest(text=text * 100))).ids)[:num_tokens]
