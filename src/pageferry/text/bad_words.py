"""Words that an answer must not have, as token ids."""

from collections.abc import Iterable

from pageferry.core.errors import invalid
from pageferry.core.sampling import MAX_BANNED_TOKENS
from pageferry.text.tokenizer import Tokenizer

MAX_WORDS = 64
MAX_CHARACTERS = 256
_BREAK = "\n"  # is a token of its own, so that what follows it is split as inside a text


def check(words: Iterable[str]) -> None:
    """Raise InvalidArgumentError where there are too many, or one is too short or too long."""
    given = list(words)
    if len(given) > MAX_WORDS:
        raise invalid("bad_words", f"{len(given)} words", f"must be at most {MAX_WORDS}")
    for index, word in enumerate(given):
        if not 1 <= len(word) <= MAX_CHARACTERS:
            raise invalid(f"bad_words[{index}]", f"{len(word)} characters", f"must have from 1 to {MAX_CHARACTERS}")


def token_sequences(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The ways in which the tokenizer writes each word: at a text's start, inside of it, and behind a space.

    A model may put the same characters together from other tokens, which the tokenizer never would. Raises
    InvalidArgumentError where they are more tokens than a request may ban.
    """
    line_break = tokenizer.encode(_BREAK, add_special=False)
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        inside = tokenizer.encode(_BREAK + word, add_special=False)
        if inside[: len(line_break)] == line_break:
            sequences[tuple(inside[len(line_break) :])] = None
        for text in (word, f" {word}"):
            sequences[tuple(tokenizer.encode(text, add_special=False))] = None
    sequences.pop((), None)
    if (num_tokens := sum(map(len, sequences))) > MAX_BANNED_TOKENS:
        raise invalid("bad_words", f"{num_tokens} tokens in all", f"must be at most {MAX_BANNED_TOKENS}")
    return tuple(sequences)
