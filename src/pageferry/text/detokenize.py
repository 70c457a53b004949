"""Text from tokens as they come: whole characters only, and nothing of a stop string."""

import codecs
from collections.abc import Iterable
from functools import lru_cache

from pageferry.text.pieces import PieceReader, Pieces

_Decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """One request's text. The parts that `push` and `finish` return, joined, are the decoded output.

    With stop strings the text ends before the one whose last character comes first; where two end together, before
    the longer. Only text of tokens from the `min_tokens`-th on is searched. How the output is split into tokens
    makes no other difference.
    """

    def __init__(
        self,
        pieces: Pieces,
        stop_strings: Iterable[str] = (),
        *,
        skip_special: bool = True,
        min_tokens: int = 0,
        echo_ids: Iterable[int] = (),
    ) -> None:
        """`echo_ids` are tokens whose text comes first, as one with the output's; it is not searched."""
        self.matched_stop: str | None = None
        self.num_tokens = 0  # taken; those after a match are not
        self._reader = PieceReader(pieces, skip_special=skip_special)
        self._decoder = _Decoder(errors="replace")
        self._stops = [_Stop(stop) for stop in stop_strings]
        self._min_tokens = min_tokens
        self._held = ""  # the start of a stop string, perhaps
        self._echo = "".join(self._decoder.decode(self._reader.read(token_id)) for token_id in echo_ids)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that has become final."""
        parts, self._echo = [self._echo], ""
        for token_id in token_ids:
            if self.matched_stop is not None:
                break
            self.num_tokens += 1
            parts.append(self._filter(self._decoder.decode(self._reader.read(token_id))))
        return "".join(parts)

    def finish(self) -> str:
        """What was held back: the start of a stop string that did not come, or of a character that stays broken."""
        if self.matched_stop is not None:
            return ""
        text = self._filter(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _filter(self, text: str) -> str:
        if not self._stops or self.num_tokens < self._min_tokens:
            return text
        start = len(self._held)
        self._held += text
        for end, character in enumerate(text, start + 1):
            complete = [stop.text for stop in self._stops if stop.advance(character)]
            if complete:
                self.matched_stop = max(complete, key=len)
                final, self._held = self._held[: end - len(self.matched_stop)], ""
                return final
        keep = max(stop.num_matched for stop in self._stops)
        cut = len(self._held) - keep
        final, self._held = self._held[:cut], self._held[cut:]
        return final


class _Stop:
    """How much of a stop string the text so far ends with (Knuth, Morris and Pratt)."""

    __slots__ = ("_borders", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._borders = _borders(text)

    def advance(self, character: str) -> bool:
        """Take the next character; True when it completes the string."""
        while self.num_matched and self.text[self.num_matched] != character:
            self.num_matched = self._borders[self.num_matched - 1]
        if self.text[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == len(self.text)


@lru_cache(maxsize=64)  # the answers to one request have the same
def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        length += text[index] == text[length]
        borders[index] = length
    return borders
