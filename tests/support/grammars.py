"""What a tiny model's tokens make of grammars."""

from collections.abc import Sequence

import numpy as np

from pageferry.core.sampling import Grammar, GrammarKind
from pageferry.text.grammar import GrammarMatcher


def json_schema(text: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def allowed_ids(matcher: GrammarMatcher) -> list[int]:
    mask = matcher.allowed()
    assert mask is not None, matcher.problem
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()  # type: ignore[no-any-return]


def takes(matcher: GrammarMatcher, token_ids: Sequence[int]) -> bool:
    """Whether these tokens may come, one after the other."""
    for end, token_id in enumerate(token_ids):
        if token_id not in allowed_ids(matcher):
            return False
        matcher.follow(token_ids[: end + 1])
    return True
