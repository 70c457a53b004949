"""Bad words as token ids: at the start, inside and behind a space."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Encoder

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.model_files import resolve_model
from pageferry.text import bad_words
from pageferry.text.chat_template import ChatTemplate
from pageferry.text.tokenizer import Tokenizer, load_tokenizer

TOKENS = ["<unk>", "</s>", "▁", "▁cat", "cat", "▁▁", "<0x0A>", "▁c", "at", "c", "a", "t", "ca"]
MERGES = ["c a", "ca t", "▁ cat"]


def test_a_word_is_written_with_and_without_a_space(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(resolve_model(str(tiny_model)))
    sequences = bad_words.token_sequences(["the", "to x"], tokenizer)
    assert [tokenizer.decode(ids) for ids in sequences] == ["the", " the", "to x", " to x"]
    assert all(tokenizer.encode(text) in map(list, sequences) for text in ("the", " the", "to x", " to x"))


def test_where_every_text_begins_with_a_space_the_word_inside_one_is_found_too() -> None:
    """SentencePiece puts a space before a text: `cat` alone is ▁cat, and behind a quote it is cat."""
    encoder = Encoder.from_str(
        json.dumps(
            {
                "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
                "normalizer": {"type": "Sequence", "normalizers": [
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                ]},
                "pre_tokenizer": None, "post_processor": None,
                "decoder": {"type": "Sequence", "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"}, {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ]},
                "model": {
                    "type": "BPE", "byte_fallback": True, "unk_token": "<unk>",
                    "vocab": {token: index for index, token in enumerate(TOKENS)}, "merges": MERGES,
                },
            }
        )
    )  # fmt: skip
    tokenizer = Tokenizer(encoder, template=ChatTemplate(None, {}), eos_ids=(1,), bos_id=None)
    sequences = bad_words.token_sequences(["cat"], tokenizer)
    assert (TOKENS.index("▁cat"),) in sequences
    assert (TOKENS.index("cat"),) in sequences


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a"] * 65, "bad_words is '65 words', must be at most 64"),
        (["a", ""], r"bad_words\[1\] is '0 characters', must have from 1 to 256"),
        (["a" * 257], r"bad_words\[0\] is '257 characters', must have from 1 to 256"),
    ],
)
def test_limits(words: list[str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        bad_words.check(words)
    bad_words.check(["a" * 256] * 64)


def test_more_tokens_than_may_be_banned_are_refused_by_the_field_that_has_them(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(resolve_model(str(tiny_model)))
    words = [chr(0x4E00 + index) * 256 for index in range(64)]  # several tokens a character
    with pytest.raises(InvalidArgumentError, match=r"bad_words is '\d+ tokens in all', must be at most 16384"):
        bad_words.token_sequences(words, tokenizer)
