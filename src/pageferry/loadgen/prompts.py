"""Prompts of an exact number of tokens: random words, so that no two requests share more than they are meant to."""

from collections.abc import Sequence
from random import Random

from pageferry.core.errors import InvalidArgumentError, invalid
from pageferry.core.model_files import resolve_model
from pageferry.text.tokenizer import Tokenizer, load_tokenizer

_MAX_WORDS = 4096
_MAX_FIRST_WORDS = 512
_MIN_WORDS = 8
_ROUNDS = 8  # of adding and dropping words until the length is right


def tokenizer_of(spec: str) -> Tokenizer:
    """Of a model's directory, a .gguf file, or a packaged model's name. Raises PageferryError."""
    return load_tokenizer(resolve_model(spec))


class PromptMaker:
    """Makes texts that the tokenizer encodes to as many tokens as asked for; the same ones for the same seed.

    With `chat`, the tokens are those of the model's chat template around the text as one user's message. The text's
    first `prefix_tokens` are one of `num_prefixes` prefixes, in turn; all after them differs from text to text.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, seed: int, chat: bool, prefix_tokens: int = 0, num_prefixes: int = 1
    ) -> None:
        self._tokenizer = tokenizer
        self._random = Random(seed)
        self._chat = chat
        self._made: set[str] = set()
        self._words = self._find_words()
        self._first_words = self._without_space() or self._words
        self._overhead = self._count("")
        self._prefix_tokens = prefix_tokens
        self._prefixes = [self._text("", self.shared_tokens) for _ in range(num_prefixes)] if prefix_tokens else [""]

    @property
    def shared_tokens(self) -> int:
        """The most that a prompt has in common with others: the template around it, and its prefix."""
        return self._overhead + self._prefix_tokens

    def make(self, num_tokens: int) -> str:
        """Raises InvalidArgumentError where so few tokens leave no room after the template and the prefix."""
        least = self.shared_tokens + 1
        if num_tokens < least:
            around = f"{self._overhead} of the template, " if self._overhead else ""
            limit = f"must be at least {least}: {around}{self._prefix_tokens} of the prefix, and one that differs"
            raise invalid("input tokens", num_tokens, limit)
        prefix = self._prefixes[len(self._made) % len(self._prefixes)]
        for _ in range(_MAX_WORDS):
            text = self._text(prefix, num_tokens)
            if text not in self._made:
                self._made.add(text)
                return text
        limit = f"leaves too few prompts that differ; {len(self._made)} were made"
        raise invalid("input tokens", num_tokens, limit)

    def _text(self, prefix: str, num_tokens: int) -> str:
        """The prefix, continued by random words until the whole has that many tokens."""
        size = self._count(prefix)
        words = self._random.choices(self._words, k=num_tokens - size)
        if not prefix:
            words[0] = self._random.choice(self._first_words)
        for _ in range(_ROUNDS):
            text = (prefix + "".join(words)).lstrip()  # templates may strip it too
            missing = num_tokens - self._count(text)
            if missing == 0:
                return text
            if missing > 0:
                words += self._random.choices(self._words, k=missing)
            else:
                words[missing:] = []
        raise InvalidArgumentError(f"the tokenizer gives no prompt of exactly {num_tokens} tokens; try one token more")

    def _count(self, text: str) -> int:
        if not self._chat:
            return len(self._tokenizer.encode(text))
        rendered = self._tokenizer.apply_chat_template([{"role": "user", "content": text}])
        return len(self._tokenizer.encode(rendered, add_special=False))

    def _without_space(self) -> Sequence[str]:
        """Words that are one token even where they begin a text."""
        words = self._words[:_MAX_FIRST_WORDS]
        return [word for word in words if len(self._tokenizer.encode(word.lstrip(), add_special=False)) == 1]

    def _find_words(self) -> Sequence[str]:
        """Some tokens that are a space and a word, and stay one token after another of their kind."""
        words: list[str] = []
        ids = list(range(self._tokenizer.vocab_size))
        self._random.shuffle(ids)
        for token_id in ids:
            piece = self._tokenizer.piece(token_id)
            if len(piece) < 2 or piece[0] != " " or not (piece[1:].isascii() and piece[1:].isalpha()):
                continue
            if self._tokenizer.encode(f"a{piece}{piece}", add_special=False)[-2:] == [token_id, token_id]:
                words.append(piece)
                if len(words) == _MAX_WORDS:
                    break
        if len(words) < _MIN_WORDS:
            raise InvalidArgumentError(f"the tokenizer has {len(words)} tokens that are words, needs {_MIN_WORDS}")
        return words
