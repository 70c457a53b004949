"""Hand-offs over gRPC between engines: pages arrive as they were stored, or converted where formats differ."""

from pathlib import Path

import pytest
import torch
from engines import load
from handoff_bench import Bench, Settings

from pageferry.core.config import SchedulerConfig
from pageferry.core.formats import PageFormat
from pageferry.core.layout import PageKey, Place
from pageferry.core.plan import Plan
from pageferry.core.pool import PageId
from pageferry.engine.load import Engine
from pageferry.kernels.quantise import quantise

PROMPT = [4 + (index * 29) % 300 for index in range(69)]  # four pages and a part of one
SCHEDULER = SchedulerConfig(chunk_tokens=16, local_chunk_tokens=16, final_chunk_tokens=0, headroom_pages=0)
GROUPS = "0,2=window:32,sinks:4;1,3=full"
FP16 = PageFormat.parse("fp16").k
Pages = dict[PageKey, bytes]


def settings(engine: Engine) -> Settings:
    return Settings(layout=engine.layout, engine=engine, scheduler=SCHEDULER)


def place_at(engine: Engine, key: PageKey) -> Place:
    """Where the prefill worker has a page: a pool without other work gives its pages out in order."""
    if key.is_tail and engine.layout.format.has_tails:
        return Place(key.group, PageId(0), is_tail=True)
    return Place(key.group, PageId(key.index))


async def hand_over(p: Engine, d: Engine) -> tuple[Pages, int]:
    """The pages that the decode worker had before its first step, and the bytes sent."""
    received: Pages = {}
    async with Bench(settings(p), settings(d)) as bench:

        def note(plan: Plan) -> None:
            if not received:
                (ticket,) = bench.d.tickets.issued
                for key, place in ticket.places.items():
                    received[key] = d.pages.read(key, place, 0, d.layout.of(key).num_layers)

        bench.d.runner.before = note
        result = await bench.generate("r", PROMPT, max_tokens=4)
        await bench.until_idle()
    assert [position for position, _ in result.tokens] == [0, 1, 2, 3]
    assert result.shipped.pages == len(received)
    return received, result.shipped.bytes


@pytest.mark.parametrize(
    ("text", "cache_layers"),
    [*((text, "") for text in ("fp16", "fp8_e4m3", "int8:asym", "int4", "int4:asym", "k=int8:channel,v=int4:asym")),
     *((text, GROUPS) for text in ("fp32", "int8", "int8:channel", "k=int4:channel:asym,v=fp8_e4m3"))],
)  # fmt: skip
async def test_pages_of_equal_formats_are_equal_byte_for_byte(tiny_model: Path, text: str, cache_layers: str) -> None:
    p, d = (load(tiny_model, text, cache_layers=cache_layers) for _ in range(2))
    received, num_bytes = await hand_over(p, d)
    # Computing position 64 and on, a window of 32 reads from 33 on, which is in page 2, and the sinks in page 0.
    expected = [(0, 0), (0, 2), (0, 3), (0, 4), *((1, index) for index in range(5))]
    assert sorted(key[:2] for key in received) == (expected if cache_layers else [(0, index) for index in range(5)])
    assert {key.index for key in received if key.is_tail} == ({4} if p.layout.format.has_tails else set())
    for key, payload in received.items():
        assert payload == p.pages.read(key, place_at(p, key), 0, p.layout.of(key).num_layers)
    assert num_bytes == sum(map(len, received.values()))


@pytest.mark.parametrize(
    ("ours", "theirs", "cache_layers"),
    [
        ("fp32", "int8", ""),
        ("fp32", "int4:asym", GROUPS),
        ("bf16", "k=int8,v=int4", ""),
        ("fp16", "fp8_e4m3", ""),
        ("bf16", "fp32", ""),
        ("fp32", "int8:channel", ""),
        ("bf16", "k=int4:channel:asym,v=int8", GROUPS),
    ],
)
async def test_a_sender_of_plain_numbers_converts_them(
    tiny_model: Path, ours: str, theirs: str, cache_layers: str
) -> None:
    p, d = load(tiny_model, ours, cache_layers=cache_layers), load(tiny_model, theirs, cache_layers=cache_layers)
    received, num_bytes = await hand_over(p, d)
    has_tails = d.layout.format.has_tails
    assert {key.index for key in received if key.is_tail} == ({4} if has_tails else set())
    for key, payload in received.items():
        target = PageFormat.parse("fp16") if key.is_tail else d.layout.format
        parts: list[list[torch.Tensor]] = [[], [], []]
        for number in p.layout.groups[key.group].layers:
            layer = p.pages.layers[number]
            for side, kind in ((layer.keys, target.k), (layer.values, target.v)):
                numbers = side.payload[place_at(p, key).page].float()
                stored = quantise(quantise(numbers, FP16).elements.float() if has_tails else numbers, kind)
                for part, tensor in zip(parts, (stored.elements, stored.scales, stored.zeros), strict=True):
                    part += [] if tensor is None else [tensor]
        assert payload == b"".join(bytes(t.contiguous().view(torch.uint8).numpy()) for part in parts for t in part)
    assert num_bytes == sum(map(len, received.values()))
