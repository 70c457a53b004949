"""A tokenizer built from a GGUF file's metadata.

What a file calls `tokenizer.ggml.pre` decides how text is split before the merges; the names and expressions are those
of llama.cpp (src/llama-vocab.cpp), written with the parts of the `tokenizers` library that the models were made with.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pageferry.core.errors import InvalidArgumentError
from pageferry.text.gguf_sentencepiece import UNKNOWN, build_sentencepiece

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_NAMES = ("qwen2", "deepseek-r1-qwen")
_PRE: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    **dict.fromkeys(_LLAMA3_NAMES, lambda: _split(_LLAMA3)),
    "smaug-bpe": lambda: _split(_LLAMA3),
    **dict.fromkeys(_QWEN2_NAMES, lambda: _split(_QWEN2)),
    "tekken": lambda: _split(_TEKKEN),
}
_SENTENCEPIECE = "llama"  # of tokenizer.ggml.model; all else above is of "gpt2"
_WITH_BOS = (*_LLAMA3_NAMES, "tekken")  # begin every text with BOS where the file does not say
_WHOLE_WORDS = _WITH_BOS  # take a word that is a token as it is, whatever the merges say
_COMPOSED = _QWEN2_NAMES  # compose characters first (Unicode NFC)


class GgufVocabulary:
    """The `tokenizer.ggml.*` part of a file's metadata; every refusal names the key, the value and what is known."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        model = self.get("model")
        if model not in ("gpt2", _SENTENCEPIECE):
            limit = "supported are gpt2 (byte-level BPE) and llama (SentencePiece); use the model's directory instead"
            raise _wrong("model", model, limit)
        self.is_sentencepiece = model == _SENTENCEPIECE
        is_qwen = metadata.get("general.architecture") in ("qwen2", "qwen3")
        self.pre = "" if self.is_sentencepiece else str(self.get("pre", "qwen2" if is_qwen else "default"))
        if self.pre not in _PRE and not self.is_sentencepiece:
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
        return bool(self.get("add_bos_token", self.is_sentencepiece or self.pre in _WITH_BOS))

    def build(self) -> Tokenizer:
        types = self._numbers("token_type", self.get("token_type") or [0] * len(self.tokens))
        tokenizer = self._sentencepiece(types) if self.is_sentencepiece else self._byte_level()
        tokenizer.add_special_tokens([_added(self.tokens[i]) for i, kind in enumerate(types) if kind == _CONTROL])
        tokenizer.add_tokens([_added(self.tokens[i]) for i, kind in enumerate(types) if kind == _USER_DEFINED])
        return tokenizer

    def _numbers(self, name: str, value: Any) -> Any:
        """One for each token."""
        is_list = isinstance(value, list)
        if not is_list or len(value) != len(self.tokens) or not all(isinstance(item, int | float) for item in value):
            found = f"{len(value)} values" if is_list else value
            raise _wrong(name, found, f"must be one number for each of {len(self.tokens)} tokens")
        return value

    def _sentencepiece(self, types: list[int]) -> Tokenizer:
        scores = self._numbers("scores", self.get("scores"))
        marked = (token for token, kind in zip(self.tokens, types, strict=True) if kind == UNKNOWN)
        unknown = self.token_of("unknown") or next(marked, None)
        prefix = bool(self.get("add_space_prefix", True))
        return build_sentencepiece(self.tokens, types, scores, unknown, space_prefix=prefix)

    def _byte_level(self) -> Tokenizer:
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
        return tokenizer


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _wrong(name: str, value: object, limit: str) -> InvalidArgumentError:
    message = f"model file: tokenizer.ggml.{name} is {value!r}, {limit}"
    return InvalidArgumentError(message, reason="TOKENIZER_UNSUPPORTED")
