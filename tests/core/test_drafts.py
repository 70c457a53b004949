"""What lookup finds, against a search of the whole text, and what settings are refused."""

import pytest
from hypothesis import given, strategies as st

from pageferry.core import drafts
from pageferry.core.drafts import DraftSource, Match, PromptLookup
from pageferry.core.errors import InvalidArgumentError


def searched(token_ids: list[int], num_drafts: int) -> Match | None:
    """The longest match, the latest of equal ones, by comparing everywhere."""
    best, length = 0, 2
    for place in range(len(token_ids) - 1, 2, -1):
        matched = 0
        while matched < min(place, 32) and token_ids[place - 1 - matched] == token_ids[-1 - matched]:
            matched += 1
        if matched > length:
            best, length = place, matched
    if not best:
        return None
    following = list(token_ids)
    while len(following) < best + num_drafts:
        following.append(following[len(following) - (len(token_ids) - best)])
    return Match(length, tuple(following[best : best + num_drafts]))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 8))
def test_lookup_finds_the_longest_match_at_every_length(token_ids: list[int], num_drafts: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafts, "_MAX_CANDIDATES", 100)
        lookup = PromptLookup()
        for end in range(1, len(token_ids) + 1):
            assert lookup.find(token_ids[:end], num_drafts) == searched(token_ids[:end], num_drafts)


def test_a_repetition_goes_on_beyond_its_end() -> None:
    assert PromptLookup().find([9, 1, 2, 3, 4, 1, 2, 3], 6) == Match(3, (4, 1, 2, 3, 4, 1))


def test_a_long_text_is_indexed_over_several_calls() -> None:
    text = list(range(10_000))
    lookup = PromptLookup()
    found = [lookup.find([*text, 9000, 9001, 9002], 2) for _ in range(3)]
    assert found == [None, None, Match(3, (9003, 9004))]


def test_token_ids_of_any_vocabulary_differ() -> None:
    high = 2**21 - 1
    assert PromptLookup().find([1, 0, 0, high, 5, 0, 0, 1], 1) is None
    assert PromptLookup().find([high, high, 0, 7, high, high, 0], 1) == Match(3, (7,))


@pytest.mark.parametrize(
    "text", ["", "on", "lookup:3", "off:", "layers", "layers:0", "layers:-1", "layers:x", "draft", "draft:"]
)
def test_sources_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"speculation.*must be off, lookup, layers:N or draft:PATH"):
        DraftSource.parse(text)


def test_sources() -> None:
    assert DraftSource.parse("layers:6") == DraftSource("layers", num_layers=6)
    assert DraftSource.parse("draft:/models/a:b.gguf") == DraftSource("draft", path="/models/a:b.gguf")
