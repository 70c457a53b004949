"""Cache groups as texts, and which pages they keep: beside the definition of what a query reads, token by token."""

import pytest

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.groups import CacheGroup, full_group, groups_text, parse_groups

B = 4
GROUPS = [full_group(1)] + [CacheGroup((0,), window, sinks) for window in (1, 3, 4, 5, 9, 16) for sinks in (0, 1, 4, 6)]


@pytest.mark.parametrize(
    "text",
    ["0-14=window:256,sinks:4;15-29=full", "0,2-3,29=full;1,4-28=window:7", "0-29=full"],
)
def test_a_text_is_read_and_written(text: str) -> None:
    assert groups_text(parse_groups(text, 30, None)) == text


def test_layers_of_one_policy_are_one_group() -> None:
    groups = parse_groups("0=full; 1-2=window:8 ;3=full", 4, None)
    assert groups == (CacheGroup((0, 3)), CacheGroup((1, 2), 8))


def test_a_model_s_own_window_holds_in_every_layer() -> None:
    assert parse_groups("", 3, 4096) == (CacheGroup((0, 1, 2), 4096),)
    assert parse_groups(" ", 3, None) == (full_group(3),)
    assert parse_groups("0=full;1-2=window:8,sinks:2", 3, 64) == (CacheGroup((0,), 64), CacheGroup((1, 2), 8, 2))
    with pytest.raises(InvalidArgumentError, match="window:65', must be at most the model's own, 64"):
        parse_groups("0-2=window:65", 3, 64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-2", "must be LAYERS=POLICY"),
        ("0-1=full;1-2=window:8", "but layer 1 stands there twice"),
        ("0=full;2=full", "must name each of the 3 layers, once; missing: 1"),
        ("0-3=full", "must be layers from 0 to 2"),
        ("2-0=full", "must be layers from 0 to 2, ascending"),
        ("a=full", "must name layers as 3 or 0-14, not 'a'"),
        ("0-2=window", "must have full, window:W or window:W,sinks:S"),
        ("0-2=sinks:3", "must have full, window:W or window:W,sinks:S"),
        ("0-2=window:8,window:9", "must have full, window:W or window:W,sinks:S"),
        ("0-2=window:-1", "must have full, window:W or window:W,sinks:S"),
        ("0-2=window:0", "window:0', must be from 1 to 2147483647"),
        ("0-2=window:2147483648", "window:2147483648', must be from 1 to 2147483647"),
        ("0-2=window:8,sinks:2147483648", "sinks:2147483648', must be from 0 to 2147483647"),
    ],
)
def test_a_wrong_text_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_groups(text, 3, None)
    assert caught.value.message.startswith("cache_layers is ")
    assert message in caught.value.message


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_pages_that_live_are_those_of_the_tokens_that_are_read_or_written(group: CacheGroup) -> None:
    for end in range(1, 30):
        for start in range(end):
            seen = {
                token
                for position in range(start, end)
                for token in range(position + 1)
                if group.window is None or token > position - group.window or token < group.sinks
            }
            read = {token // B for token in seen} | {position // B for position in range(start, end)}
            live = list(group.live_pages(start, end, B))
            assert set(live) - read <= set(range(group.num_sink_pages(B))), "sinks may be kept before they are read"
            assert set(live) >= read
            assert live == sorted(set(live))
            for chunk in (end - start, 7):
                if end - start <= chunk:
                    assert len(live) <= group.most_live(end, chunk, B)


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_what_is_handed_over_is_enough_to_go_on_or_to_compute_the_last_page_anew(group: CacheGroup) -> None:
    for num_tokens in range(1, 30):
        at_end = set(group.live_at_end(num_tokens, B))
        last = (num_tokens - 1) // B
        for start in range(last * B, num_tokens + 1):
            assert at_end >= {page for page in group.live_pages(start, num_tokens, B) if page <= last}
        assert last in at_end
        assert len(at_end) <= group.most_live(num_tokens, 1, B)
