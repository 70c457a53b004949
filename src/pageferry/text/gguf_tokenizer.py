"""A tokenizer built from a GGUF file's metadata.

What a file calls `tokenizer.ggml.pre` decides how text is split before the merges; the names and expressions are those
of llama.cpp (src/llama-vocab.cpp), written with the parts of the `tokenizers` library that the models were made with.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pageferry.core.errors import InvalidArgumentError

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
}
_WITH_BOS = ("llama-bpe",)  # begins every text with BOS where the file does not say
_WHOLE_WORDS = ("llama-bpe",)  # takes a word that is a token as it is, whatever the merges say
_COMPOSED = ("qwen2",)  # composes characters first (Unicode NFC)


class GgufVocabulary:
    """The `tokenizer.ggml.*` part of a file's metadata; every refusal names the key, the value and what is known."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        model = self.get("model")
        if model != "gpt2":
            raise _wrong("model", model, "only gpt2 (byte-level BPE) is supported; use the model's directory instead")
        self.pre = str(self.get("pre", "default"))
        if self.pre not in _PRE:
            raise _wrong("pre", self.pre, f"supported are {', '.join(_PRE)}")
        self.tokens: list[str] = self._strings("tokens")

    def get(self, name: str, default: object = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{name}", default)

    def _strings(self, name: str) -> list[str]:
        value = self.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise _wrong(name, type(value).__name__, "must be a list of texts")
        return value

    def token_of(self, name: str) -> str | None:
        """The token that the id called `name` stands for; None where the file names none."""
        token_id = self.get(f"{name}_token_id")
        if token_id is None:
            return None
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            raise _wrong(f"{name}_token_id", token_id, f"must be from 0 to {len(self.tokens) - 1}")
        return self.tokens[token_id]

    def _merges(self) -> list[tuple[str, str]]:
        known, merges = set(self.tokens), []
        for merge in self._strings("merges"):
            left, _, right = merge.partition(" ")
            if not {left, right, left + right} <= known:
                raise _wrong("merges", merge[:64], "must be two tokens that are one token together")
            merges.append((left, right))
        return merges

    @property
    def adds_bos(self) -> bool:
        return bool(self.get("add_bos_token", self.pre in _WITH_BOS))

    def build(self) -> Tokenizer:
        types = self.get("token_type") or [0] * len(self.tokens)
        if not isinstance(types, list) or len(types) != len(self.tokens):
            num_types = f"{len(types)} numbers" if isinstance(types, list) else types
            raise _wrong("token_type", num_types, f"must be one number for each of {len(self.tokens)} tokens")
        tokenizer = Tokenizer(
            models.BPE(
                vocab={token: index for index, token in enumerate(self.tokens)},
                merges=self._merges(),
                ignore_merges=self.pre in _WHOLE_WORDS,
            )
        )
        if self.pre in _COMPOSED:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = _PRE[self.pre]()
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([_added(self.tokens[i]) for i, kind in enumerate(types) if kind == _CONTROL])
        tokenizer.add_tokens([_added(self.tokens[i]) for i, kind in enumerate(types) if kind == _USER_DEFINED])
        return tokenizer


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _wrong(name: str, value: object, limit: str) -> InvalidArgumentError:
    message = f"model file: tokenizer.ggml.{name} is {value!r}, {limit}"
    return InvalidArgumentError(message, reason="TOKENIZER_UNSUPPORTED")
