"""Hand-offs over gRPC between engines: pages arrive as they were stored, or converted where formats differ."""

from pathlib import Path

import pytest
from engines import load
from handoff_bench import Bench, Settings

from pageferry.core.config import SchedulerConfig
from pageferry.core.formats import PageFormat
from pageferry.core.pool import PageId
from pageferry.engine.load import Engine
from pageferry.kernels.quantise import quantise

PROMPT = [4 + (index * 29) % 300 for index in range(37)]
NUM_PAGES = 3
SCHEDULER = SchedulerConfig(chunk_tokens=16, local_chunk_tokens=16, final_chunk_tokens=0, headroom_pages=0)


def settings(engine: Engine) -> Settings:
    return Settings(engine.num_pages, engine.layout, engine=engine, scheduler=SCHEDULER)


async def hand_over(p: Engine, d: Engine) -> tuple[list[PageId], list[PageId], int, list[tuple[int, int]]]:
    """The pages at either end, the bytes sent, and the tokens that the decode worker emitted."""
    async with Bench(settings(p), settings(d)) as bench:
        result = await bench.generate("r", PROMPT, max_tokens=4)
        (ticket,) = bench.d.tickets.issued
        await bench.until_idle()
        # A pool without other work hands out its pages in order, and neither has used any twice.
        received = list(ticket.pages[:NUM_PAGES])
        return [PageId(page) for page in range(NUM_PAGES)], received, result.shipped.bytes, result.tokens


def payload_of(engine: Engine, pages: list[PageId]) -> list[bytes]:
    return [engine.pages.read(page, 0, engine.layout.num_layers) for page in pages]


@pytest.mark.parametrize("text", ["fp16", "fp8_e4m3", "int8:asym", "int4", "int4:asym", "k=int8,v=int4:asym"])
async def test_pages_of_equal_formats_are_equal_byte_for_byte(tiny_model: Path, text: str) -> None:
    p, d = load(tiny_model, text), load(tiny_model, text)
    sent, received, num_bytes, tokens = await hand_over(p, d)
    ours, theirs = payload_of(p, sent), payload_of(d, received)
    assert ours[:2] == theirs[:2]  # the decode worker has gone on writing into the last one
    assert num_bytes == sum(len(payload) for payload in ours)
    assert [position for position, _ in tokens] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("fp32", "int8"), ("fp32", "int4:asym"), ("bf16", "k=int8,v=int4"), ("fp16", "fp8_e4m3"), ("bf16", "fp32")],
)
async def test_a_sender_of_plain_numbers_converts_them(tiny_model: Path, ours: str, theirs: str) -> None:
    p, d = load(tiny_model, ours), load(tiny_model, theirs)
    sent, received, num_bytes, tokens = await hand_over(p, d)
    target = PageFormat.parse(theirs)
    for theirs_layer, ours_layer in zip(d.pages.layers, p.pages.layers, strict=True):
        for side, kind in (("keys", target.k), ("values", target.v)):
            stored, source = getattr(theirs_layer, side), getattr(ours_layer, side).payload[sent[:2]]
            expected = quantise(source.float(), kind)
            for name, part in (("payload", expected.elements), ("scales", expected.scales), ("zeros", expected.zeros)):
                found = getattr(stored, name)
                assert (found is None) == (part is None)
                assert part is None or (found[received[:2]] == part).all()
    assert num_bytes == sum(len(payload) for payload in payload_of(d, received))
    assert [position for position, _ in tokens] == [0, 1, 2, 3]
