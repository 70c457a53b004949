"""The prompts of a chaos run and what a run without any faults answers to them."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster import Stub, greedy

from chaos.script import NUM_PROMPTS
from pageferry.v1.types_pb2 import GeneratedToken

MAX_TOKENS = 160
_FIRST_ID, _END_ID = 4, 300
# Where the likeliest token is ahead of the next by less, another batch's rounding may choose the other one.
_SURE_LEAD = 1e-3


@dataclass(frozen=True, slots=True)
class Golden:
    """A greedy answer; what follows the first `num_sure` tokens may be another one and right."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    num_sure: int

    def differs(self, tokens: Sequence[int]) -> str:
        """How a greedy answer's tokens are wrong, "" where they aren't."""
        for position, (token, golden) in enumerate(zip(tokens, self.tokens[: self.num_sure], strict=False)):
            if token != golden:
                return f"token {token} at position {position}, undisturbed {golden}"
        return ""


def draw_prompts() -> list[tuple[int, ...]]:
    """The same every time. They share beginnings, so that prefix caches are in play."""
    draws = random.Random(0)
    prefixes = [draws.choices(range(_FIRST_ID, _END_ID), k=length) for length in (0, 16, 48, 160)]
    tails = (1, 15, 16, 17, 100, 300)
    pairs = [(prefix, length) for prefix in prefixes for length in tails]
    return [
        (*prefix, *draws.choices(range(_FIRST_ID, _END_ID), k=length))
        for prefix, length in (pairs[number % len(pairs)] for number in range(NUM_PROMPTS))
    ]


async def compute_goldens(stub: Stub, *, at_once: int = 6) -> list[Golden]:
    """Ask an undisturbed deployment."""
    places = asyncio.Semaphore(at_once)

    async def golden(prompt: tuple[int, ...]) -> Golden:
        request = greedy(list(prompt), MAX_TOKENS)
        request.sampling.logprobs = 2
        async with places:
            deltas = [response.delta async for response in stub.Generate(request, timeout=300)]
        return _golden(prompt, [token for delta in deltas for token in delta.tokens])

    return await asyncio.gather(*(golden(prompt) for prompt in draw_prompts()))


def _golden(prompt: tuple[int, ...], tokens: Sequence[GeneratedToken]) -> Golden:
    leads = [token.logprobs.top[0].logprob - token.logprobs.top[1].logprob for token in tokens]
    unsure = (position for position, lead in enumerate(leads) if lead < _SURE_LEAD)
    assert len(tokens) == MAX_TOKENS, len(tokens)
    return Golden(prompt, tuple(token.token_id for token in tokens), next(unsure, len(tokens)))
