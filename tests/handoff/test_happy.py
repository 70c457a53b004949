"""Whole hand-offs between a prefill and a decode worker."""

import pytest
from fake_engine import LAYOUT, golden
from handoff_bench import Bench

from pageferry.v1 import types_pb2

B = LAYOUT.page_size


@pytest.mark.parametrize("num_prompt", [1, B - 1, B, B + 1, 5 * B, 40])
async def test_tokens_are_golden_and_pages_are_counted_alike(num_prompt: int) -> None:
    async with Bench() as bench:
        result = await bench.generate("r", range(num_prompt), max_tokens=6)
        num_pages = -(-num_prompt // B)
        expected = list(enumerate(golden(range(num_prompt), 6)))
        assert result.tokens == expected
        token = result.first_token.token
        assert (token.position, token.token_id) == expected[0]
        assert (result.shipped.pages, result.shipped.bytes) == (
            num_pages,
            num_pages * sum(length for _, length in LAYOUT.ranges(0, LAYOUT.num_layers)),
        )
        assert (result.completed.reason, result.completed.steps) == (types_pb2.FINISH_REASON_LENGTH, 5)
        await bench.until_idle()
