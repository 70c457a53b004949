"""Random mixes of what detokenising gets wrong: emoji of several code points, CJK, combining marks, spaces, stops."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_PARTS = (
    *("😀", "👩‍👩‍👧", "👨🏽‍💻", "🏳️‍🌈", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "❤️‍🔥", "1️⃣", "🤷🏿‍♀️"),
    *("🇨🇿", "🇯🇵", "🇺🇸🇩🇪", "🇨"),
    *("北京", "日本語", "한국어", "各", "𠮷野家", "か\u3099", "，", "。"),
    *("e\u0301", "Z\u0324\u0354\u0367", "नमस्ते", "กำ", "ďábel", "ﬁ", "\u0301", "ß", "İ"),
    *("Hello", " world", "the", " ", "  ", "\n", "\n\n", "\t", "User:", "\nUser:", ".", "12", "</s>", "a", "aa"),
)
_STOPS = ("\nUser:", "👩", "\u200d", "️", "。", "\u0301", "</s>", "🇪", "  ", "aab", "no such text")
BROKEN = "\N{REPLACEMENT CHARACTER}"
Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Mix:
    token_ids: list[int]
    stops: list[str]
    is_cut: bool  # perhaps in the middle of a character
    batch: int  # tokens that come together


def draw_mix(seed: int, encode: Encode) -> Mix:
    """The same every time. Its text is encoded in random parts, so that tokens are not only those of the whole."""
    rng = random.Random(seed)
    text = "".join(rng.choice(_PARTS) for _ in range(rng.randint(1, 25)))
    cuts = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randint(0, 6))))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    token_ids = [id_ for part in parts for id_ in encode(part)]
    is_cut = rng.random() < 0.3
    if is_cut:
        token_ids = token_ids[: rng.randint(1, len(token_ids))]
    return Mix(token_ids, [_stop(rng, text) for _ in range(rng.randint(0, 4))], is_cut, rng.randint(1, 5))


def _stop(rng: random.Random, text: str) -> str:
    """A part of the text, which may begin and end between the code points of a character; one nearly so; or another."""
    start = rng.randrange(len(text))
    part = text[start : start + rng.randint(1, 6)]
    return rng.choice([part, part, part + "x", rng.choice(_STOPS)])


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, the longer of two; and that string."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, negative_length, stop = min(ends)
    return text[: end + negative_length], stop
