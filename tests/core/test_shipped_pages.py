"""From a prefill worker's pools to a decode worker's: what one ships is what the other expects, and it decodes on."""

from dataclasses import replace

import pytest
from scheduling import Driver, decode, layout, prefill, prompt, reserve, sequence

from pageferry.core.formats import PageFormat
from pageferry.core.layout import CacheLayout, PageKey, Place
from pageferry.core.sequence import Sequence

B = 4
GROUPS = ("0=full", "0=window:7,sinks:3;1=full", "0=window:9", "0=window:1;1=window:5,sinks:6;2=full")
LENGTHS = (1, 3, 4, 5, 8, 12, 13, 27, 32, 33, 40)
KINDS = [
    pytest.param(groups, ours, theirs, id=f"{groups} {ours} to {theirs}")
    for groups in GROUPS
    for ours, theirs in (("int8", "int8"), ("int8:channel", "int8:channel"), ("bf16", "int8:channel"))
]


def ship(sender: Driver, one: Sequence, receiver: Driver, other: Sequence) -> list[PageKey]:
    """Run the prompt and copy each chunk's pages over as it ends; returns them in their order."""
    expected = receiver.scheduler.tables.expected(other)
    first_page, as_tails = other.num_cached // B, bool(receiver.layout.tails)
    shipped: list[PageKey] = []
    held: list[Place] = []
    sender.add(one)
    while one not in sender.ended:
        plan = sender.scheduler.schedule(sender.now)
        assert plan is not None
        result = sender.model.run(plan)
        (chunk,) = plan.chunks
        end = chunk.start + chunk.num_tokens
        for key, place in sender.scheduler.tables.shippable(one, first_page, chunk.start, end, as_tails=as_tails):
            sender.pools.acquire([place])
            held.append(place)
            shipped.append(key)
            receiver.model.pages[expected[key]] = list(sender.model.pages[place])
            assert receiver.model.pages[expected[key]] == sender.model.content(one, key)
        sender.record(sender.scheduler.apply(plan, result, sender.now))
    sender.pools.release(held)
    assert sorted(shipped) == sorted(expected), "each once"
    return shipped


@pytest.mark.parametrize(("groups", "ours", "theirs"), KINDS)
@pytest.mark.parametrize("chunk_tokens", [3, 4, 10, 64])
def test_shipped_pages_are_the_expected_ones_and_decode_on(
    groups: str, ours: str, theirs: str, chunk_tokens: int
) -> None:
    from_layout = layout(B, groups, ours)
    to_layout: CacheLayout = replace(from_layout, format=PageFormat.parse(theirs))
    assert from_layout.ships_to(to_layout)
    num_pages = (64,) * len(from_layout.groups)
    sender = prefill(num_pages, from_layout, chunk_tokens=chunk_tokens, final_chunk_tokens=0)
    receiver = decode(num_pages, to_layout, local_chunk_tokens=chunk_tokens)
    for renewed in ("none", "none", "receiver", "sender"):  # who of them has nothing cached
        if renewed == "receiver":
            receiver = decode(num_pages, to_layout, local_chunk_tokens=chunk_tokens)
        elif renewed == "sender":
            sender = prefill(num_pages, from_layout, chunk_tokens=chunk_tokens, final_chunk_tokens=0)
        for num_tokens in reversed(LENGTHS) if renewed == "receiver" else LENGTHS:
            one, other = sequence(prompt(num_tokens), 9), sequence(prompt(num_tokens), 9)
            assert reserve(receiver, other)
            ship(sender, one, receiver, other)
            receiver.activate(other, with_first=num_tokens % 3 > 0)
            receiver.run()
            receiver.check_golden(other)
        sender.check_idle()
        receiver.check_idle()
