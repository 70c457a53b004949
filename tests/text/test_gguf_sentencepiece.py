"""A SentencePiece vocabulary of a GGUF file, against merging by score as it is defined."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from pageferry.text.chat_template import ChatTemplate
from pageferry.text.gguf_tokenizer import GgufVocabulary
from pageferry.text.tokenizer import Tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "t", "h", "e", "a", "n", "d", ".", "é", "▁t", "he", "▁the", "an", "▁an", "nd", "▁and", "th", "▁▁"]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *WORDS, "<|user|>"]
TYPES = [2, 3, 3, *[6] * 256, *[1] * len(WORDS), 4]
BY_LENGTH = [float(len(token)) for token in TOKENS]
# Unlike the order of the tokens, and all different: what is merged first shows.
MIXED = [0.0] * 259 + [-((7 * i) % len(WORDS)) - 1.0 for i in range(len(WORDS))] + [0.0]


def metadata(**changes: object) -> Mapping[str, object]:
    fields = {
        "model": "llama",
        "tokens": TOKENS,
        "token_type": TYPES,
        "scores": BY_LENGTH,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def load(**changes: object) -> Tokenizer:
    vocabulary = GgufVocabulary(metadata(**changes))
    bos_id = vocabulary.get("bos_token_id") if vocabulary.adds_bos else None
    return Tokenizer(vocabulary.build(), template=ChatTemplate(None, {}), eos_ids=(2,), bos_id=bos_id)


def merged(text: str) -> list[int]:
    """Again and again the pair that is the best token, the first of equal ones; the rest as bytes."""
    scores = dict(zip(WORDS, MIXED[259:-1], strict=True))
    symbols = list(("▁" + text if text else "").replace(" ", "▁"))
    while pairs := [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]:
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids: list[int] = []
    for symbol in symbols:
        known = [TOKENS.index(symbol)] if symbol in scores else [3 + byte for byte in symbol.encode()]
        ids += known
    return ids


@given(st.text("thean d.é ü😀\n", max_size=30))
def test_texts_are_merged_by_score_with_bytes_for_the_rest(text: str) -> None:
    tokenizer = load(add_bos_token=False, scores=MIXED)
    assert tokenizer.encode(text) == merged(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_text_begins_with_bos_unless_the_file_says_no() -> None:
    assert load().encode("the") == [1, TOKENS.index("▁the")]
    assert load().encode("<s>the", add_special=False) == [1, TOKENS.index("▁the")]
    assert load(add_bos_token=False).encode("the") == [TOKENS.index("▁the")]


def test_the_space_before_a_text_can_be_left_out() -> None:
    bare = load(add_space_prefix=False, add_bos_token=False)
    assert [TOKENS[id_] for id_ in bare.encode("the and")] == ["t", "he", "▁and"]
    assert bare.decode(bare.encode(" the")) == " the"


def test_special_tokens_are_whole_and_control_ones_are_left_out() -> None:
    tokenizer = load(add_bos_token=False)
    ids = tokenizer.encode("<|user|>the</s>")
    assert [TOKENS[id_] for id_ in ids] == ["<|user|>", "▁the", "</s>"]
    assert tokenizer.decode(ids) == "<|user|> the"
    assert TOKENS.index("<0x0A>") not in tokenizer.encode("<0x0A>")  # a byte's name is a text like any other


def test_without_bytes_what_is_unknown_is_the_unknown_token() -> None:
    kept = [i for i, kind in enumerate(TYPES) if kind != 6]
    lists = {"tokens": TOKENS, "token_type": TYPES, "scores": BY_LENGTH}
    tokenizer = load(**{name: [values[i] for i in kept] for name, values in lists.items()}, add_bos_token=False)
    assert tokenizer.encode("😀😀") == [3, 0]


@pytest.mark.parametrize("text", ["the and", " the", "an.\n", "😀", ""])
def test_pieces_are_those_of_the_library(text: str) -> None:
    tokenizer = load(add_bos_token=False)
    library = GgufVocabulary(metadata()).build()
    assert library.decode(library.encode(text).ids) == tokenizer.decode(tokenizer.encode(text)) == text
