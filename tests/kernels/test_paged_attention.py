"""Paged attention against one row and one head at a time, over poisoned pools, in all formats."""

from dataclasses import dataclass

import pytest
import torch
from page_pools import FORMATS, layout, poisoned, spoil

from pageferry.core.formats import PageFormat
from pageferry.core.plan import Chunk
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import Sequence, WorkItem
from pageferry.engine.batch import BatchBuilder
from pageferry.engine.pages import PageTensors
from pageferry.kernels.append_pages import append_pages
from pageferry.kernels.paged_attention import paged_attention, paged_attention_ref

HEADS, KV_HEADS, DIM, PAGE_SIZE = 6, 2, 8, 16
SCALE = DIM**-0.5
# fp32 sums in another order; bf16 chunks round queries, keys, scores and weights to 8 bits.
FP32_TOLERANCE, BF16_TOLERANCE = 2e-5, 4e-2


@dataclass
class Case:
    pages: PageTensors
    chunks: tuple[Chunk, ...]
    query: torch.Tensor

    def run(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        batch = BatchBuilder(PAGE_SIZE, window, 2 * KV_HEADS * DIM).build(self.chunks)
        assert batch.places is not None
        return paged_attention(self.query, self.pages.layers[0], batch.places.segments, SCALE, dtype=dtype)

    def reference(self, window: int | None) -> torch.Tensor:
        rows, parts = 0, []
        for chunk in self.chunks:
            positions = list(range(chunk.start, chunk.start + chunk.num_tokens))
            query = self.query[rows : rows + chunk.num_tokens]
            rows += chunk.num_tokens
            parts.append(
                paged_attention_ref(query, self.pages.layers[0], chunk.sequence.pages, positions, SCALE, window)
            )
        return torch.cat(parts)


def case(page_format: PageFormat, shapes: list[tuple[int, int]]) -> Case:
    """Sequences of (start, tokens in the batch), each on its own pages in shuffled order, everything else poison."""
    torch.manual_seed(len(shapes))
    pages = poisoned(layout(page_format, heads=KV_HEADS, dim=DIM), 80)
    free = torch.randperm(80).tolist()
    chunks = []
    for start, count in shapes:
        length = start + count
        table = [free.pop() for _ in range(-(-length // PAGE_SIZE) + 1)]  # one page of headroom
        positions = torch.arange(length)
        keys, values = torch.randn(2, length, KV_HEADS, DIM)
        append_pages(pages.layers[0], keys, values, torch.tensor(table)[positions // PAGE_SIZE], positions % PAGE_SIZE)
        work = WorkItem("x", (0,) * length, SamplingParams(), StopParams(max_tokens=1))
        chunks.append(Chunk(Sequence(work, 0.0, pages=table), start, count, samples=True))
    return Case(pages, tuple(chunks), torch.randn(sum(count for _, count in shapes), HEADS, DIM))


SHAPES = {
    "one token": [(0, 1)],
    "decode of unlike lengths": [(0, 1), (62, 1), (256, 1), (15, 1), (16, 1), (3, 1)],
    "decode of like lengths": [(20, 1), (40, 1), (17, 1), (30, 1)],
    "chunk from the start": [(0, 63)],
    "chunk on top of pages": [(100, 57)],
    "chunks and decode together": [(31, 1), (40, 17), (0, 2), (128, 1), (5, 1)],
}


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [None, 20])
def test_fp32_equals_the_reference(page_format: PageFormat, shapes: list[tuple[int, int]], window: int | None) -> None:
    tested = case(page_format, shapes)
    result, expected = tested.run(window, torch.float32), tested.reference(window)
    assert (result - expected).abs().max() <= FP32_TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_bf16_chunks_stay_within_their_rounding(page_format: PageFormat, window: int | None) -> None:
    tested = case(page_format, SHAPES["chunks and decode together"])
    result, expected = tested.run(window, torch.bfloat16), tested.reference(window)
    assert (result - expected).abs().max() <= BF16_TOLERANCE * expected.abs().max()


def test_bf16_heads_may_be_computed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = case(PageFormat.parse("int8"), SHAPES["chunk on top of pages"])
    together = tested.run(None, torch.bfloat16)
    monkeypatch.setattr("pageferry.kernels.paged_attention._MAX_SCORES", 1)
    torch.testing.assert_close(tested.run(None, torch.bfloat16), together, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("page_format", FORMATS, ids=str)
def test_a_sequence_of_nan_fails_alone(page_format: PageFormat) -> None:
    tested = case(page_format, [(40, 1), (33, 1), (45, 1)])
    before = tested.run(None, torch.float32)
    bad = tested.chunks[1].sequence.pages[0]
    spoil(tested.pages.layers[0], bad)
    after = tested.run(None, torch.float32)
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 2]], before[[0, 2]])
