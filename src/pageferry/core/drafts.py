"""Where drafts of the next tokens come from, and those that a sequence's own earlier tokens give."""

from array import array
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from pageferry.core.errors import invalid

_GRAM = 3  # tokens that a match has at least
_BITS = 21  # of a token id
_MASK = (1 << _BITS * _GRAM) - 1
_MAX_CANDIDATES = 8  # earlier places that are compared
_MAX_MATCH = 32  # tokens that are compared
_MAX_INDEXED = 4096  # tokens that one call adds to the index, a few ms
KINDS = "off, lookup, layers:N or draft:PATH"


@dataclass(frozen=True, slots=True)
class DraftSource:
    """`engine.speculation`, read: nothing, the text's own repetitions, the model's first layers, or another model."""

    kind: str
    num_layers: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> "DraftSource":
        kind, colon, value = text.partition(":")
        if kind in ("off", "lookup") and not colon:
            return cls(kind)
        if kind == "layers" and value.isascii() and value.isdigit() and 0 < int(value) < 10_000:
            return cls(kind, num_layers=int(value))
        if kind == "draft" and value:
            return cls(kind, path=value)
        raise invalid("speculation", text, f"must be {KINDS}, with N at least 1")


@dataclass(frozen=True, slots=True)
class Match:
    """`length` tokens at the end, at most 32, have come before, and `drafts` behind them."""

    length: int
    drafts: tuple[int, ...]


class PromptLookup:
    """An index over a growing list of tokens; a token costs the same at any length.

    The last place of each three tokens is known, and from each place the one before, so that the longest of the latest
    few matches is found without a search.
    """

    __slots__ = ("_gram", "_last", "_num_indexed", "_previous")

    def __init__(self) -> None:
        self._last: dict[int, int] = {}  # of three tokens: the position behind them
        self._previous = array("i", (-1,))  # by that position: the same tokens' place before
        self._gram = 0
        self._num_indexed = 0

    def find(self, token_ids: ListLike[int], num_drafts: int) -> Match | None:
        """What followed the longest match of the last tokens, up to `num_drafts`; None where nothing matches.

        The list has only grown since the last call.
        """
        self._extend(token_ids)
        end = len(token_ids)
        if end <= _GRAM:
            return None
        gram = 0
        for token_id in token_ids[end - _GRAM :]:
            gram = gram << _BITS | token_id
        place = self._last.get(gram, -1)
        best, length = -1, 0
        for _ in range(_MAX_CANDIDATES):
            if place < 0 or length == _MAX_MATCH:
                break
            matched = _match_length(token_ids, place)
            if matched > length:
                best, length = place, matched
            place = self._previous[place]
        return None if best < 0 else Match(length, _following(token_ids, best, num_drafts))

    def _extend(self, token_ids: ListLike[int]) -> None:
        """Index all but the last token, which ends what is looked for."""
        end = min(len(token_ids) - 1, self._num_indexed + _MAX_INDEXED)
        last, previous, gram = self._last, self._previous, self._gram
        for place, token_id in enumerate(token_ids[self._num_indexed : end], self._num_indexed + 1):
            gram = (gram << _BITS | token_id) & _MASK
            if place < _GRAM:
                previous.append(-1)
            else:
                previous.append(last.get(gram, -1))
                last[gram] = place
        self._gram, self._num_indexed = gram, max(end, self._num_indexed)


def _match_length(token_ids: ListLike[int], place: int) -> int:
    """How many tokens before `place` are those at the end."""
    end = len(token_ids)
    length = 0
    while length < min(place, _MAX_MATCH) and token_ids[place - 1 - length] == token_ids[end - 1 - length]:
        length += 1
    return length


def _following(token_ids: ListLike[int], place: int, count: int) -> tuple[int, ...]:
    """The tokens from `place` on; where they reach the end, the repetition goes on."""
    drafts = list(token_ids[place : place + count])
    period = len(token_ids) - place
    while len(drafts) < count:
        drafts.append(drafts[len(drafts) - period])
    return tuple(drafts)
