"""A SentencePiece tokenizer (merges by score) built from a GGUF file's metadata, as llama.cpp tokenises with it."""

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

NORMAL, UNKNOWN = 1, 2  # of tokenizer.ggml.token_type
_SPACE = "\u2581"
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def build_sentencepiece(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], unknown: str | None, *, space_prefix: bool
) -> Tokenizer:
    """Without the added tokens. With `space_prefix` a space goes before each text between special tokens."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    normal = {token: index for token, index in vocabulary.items() if types[index] in (0, NORMAL)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(normal, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=all(byte in vocabulary for byte in _BYTES),
        )
    )
    prefix = [normalizers.Prepend(_SPACE)] if space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    if unknown is not None:
        tokenizer.add_special_tokens([AddedToken(unknown, normalized=False)])
    return tokenizer


def _merges(normal: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that are a token together, the best such first."""
    ranked = [
        (-scores[index], index, token[:split], token[split:])
        for token, index in normal.items()
        for split in range(1, len(token))
        if token[:split] in normal and token[split:] in normal
    ]
    return [(left, right) for _, _, left, right in sorted(ranked)]
