"""Text from tokens as they come: whole characters, nothing of a stop string, and equal to decoding all at once."""

import json

import pytest
from hypothesis import given, strategies as st
from tokenizers import decoders

from pageferry.core.errors import InvalidArgumentError
from pageferry.text.detokenize import TextStream
from pageferry.text.pieces import PieceRule, Pieces, byte_characters, decoder_of

CHARACTERS = {byte: character for character, byte in byte_characters().items()}
SPECIAL = 256
BYTE_LEVEL = PieceRule(byte_level=True)
SENTENCEPIECE = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def one_byte_tokens() -> Pieces:
    """256 tokens of one byte each, and a special one."""
    return Pieces({**CHARACTERS, SPECIAL: "<|end|>"}.get, BYTE_LEVEL, {SPECIAL})


def words(*tokens: str, decoder: decoders.Decoder = SENTENCEPIECE) -> Pieces:
    return Pieces(dict(enumerate(tokens)).get, PieceRule.from_decoder(decoder_of(decoder.__getstate__())), set())


def texts(*tokens: str) -> Pieces:
    """Tokens that stand for these texts, byte-level."""
    return Pieces(
        {i: "".join(CHARACTERS[b] for b in token.encode()) for i, token in enumerate(tokens)}.get, BYTE_LEVEL, set()
    )


def stream_all(stream: TextStream, token_ids: list[int]) -> list[str]:
    return [*(stream.push([token_id]) for token_id in token_ids), stream.finish()]


@pytest.mark.field("waybarrios/vllm-mlx#109", "tenstorrent/tt-inference-server#2594", "exo-explore/exo#1691")
def test_split_characters_come_whole() -> None:
    text = "😀 ďábel 北京 👩‍👩‍👧"
    parts = stream_all(TextStream(one_byte_tokens()), list(text.encode()))
    assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_an_unfinished_character_is_released_at_the_end() -> None:
    stream = TextStream(one_byte_tokens())
    assert stream.push([ord("a"), *"北".encode()[:2]]) == "a"
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


@given(st.lists(st.integers(0, 255), max_size=40), st.lists(st.integers(1, 5), max_size=40))
def test_parts_join_to_the_decoded_whole(token_ids: list[int], sizes: list[int]) -> None:
    pieces = one_byte_tokens()
    stream = TextStream(pieces)
    parts, rest = [], token_ids
    for size in sizes:
        parts.append(stream.push(rest[:size]))
        rest = rest[size:]
    parts += [stream.push(rest), stream.finish()]
    library = decoders.ByteLevel().decode([CHARACTERS[token_id] for token_id in token_ids])
    assert "".join(parts) == pieces.decode(token_ids, skip_special=True) == library


@pytest.mark.field(
    "huggingface/transformers#22710",
    "huggingface/transformers#28776",
    "deepjavalibrary/djl-serving#1272",
    "ml-explore/mlx-lm#1754",
)
@pytest.mark.parametrize("decoder", [SENTENCEPIECE, decoders.Metaspace()])
@pytest.mark.parametrize(
    "tokens", [("▁Daen", "erys", "▁is", "▁the"), ("▁", "▁leading", "▁x"), ("▁", "x"), ("", "▁a"), ("▁▁a", "▁b")]
)
def test_leading_spaces_are_the_decoders(decoder: decoders.Decoder, tokens: tuple[str, ...]) -> None:
    parts = stream_all(TextStream(words(*tokens, decoder=decoder)), list(range(len(tokens))))
    assert "".join(parts) == decoder.decode(list(tokens))


def test_byte_fallback_keeps_a_whole_character_before_a_broken_one() -> None:
    pieces = words("▁a", "<0xE2>", "<0x82>", "<0xAC>", "<0xF0>", "<0xZZ>")
    assert "".join(stream_all(TextStream(pieces), [0, 1, 2, 3, 4])) == "a€\N{REPLACEMENT CHARACTER}"
    assert pieces.decode([1, 2, 3, 5], skip_special=True) == "€<0xZZ>"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.Strip(" ", 1, 0)])])
def test_an_unknown_decoder_is_refused(decoder: decoders.Decoder | None) -> None:
    description = None if decoder is None else json.loads(decoder.__getstate__())
    with pytest.raises(InvalidArgumentError, match="is not supported, but ByteLevel"):
        PieceRule.from_decoder(description)


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    token_ids = [SPECIAL, *b"a", SPECIAL, *b"b", SPECIAL]
    assert "".join(stream_all(TextStream(one_byte_tokens()), token_ids)) == "ab"
    shown = "".join(stream_all(TextStream(one_byte_tokens(), skip_special=False), token_ids))
    assert shown == "<|end|>a<|end|>b<|end|>"


@pytest.mark.field("SharpAI/SwiftLM#126", "huggingface/text-generation-inference#1254")
@pytest.mark.parametrize(
    ("tokens", "stops", "parts", "matched"),
    [
        (["hi\nUser", ":", "x"], ["\nUser:"], ["hi", "", "", ""], "\nUser:"),
        (["\nUser", "s"], ["\nUser:"], ["", "\nUsers", ""], None),
        (["a br", "own fox jumps"], ["own fox"], ["a br", "", ""], "own fox"),
        (["xab", "cd"], ["abc", "ab"], ["x", "", ""], "ab"),
        (["xabcd"], ["abcd", "bc"], ["xa", ""], "bc"),
        (["xab"], ["b", "ab"], ["x", ""], "ab"),
        (["aab", "aac"], ["aac"], ["aab", "", ""], "aac"),
        (["aa", "ab"], ["aab"], ["", "a", ""], "aab"),
        (["one st"], ["stop"], ["one ", "st"], None),
    ],
)
def test_stop_strings(tokens: list[str], stops: list[str], parts: list[str], matched: str | None) -> None:
    stream = TextStream(texts(*tokens), stops)
    assert stream_all(stream, list(range(len(tokens)))) == parts
    assert stream.matched_stop == matched


def test_tokens_after_a_stop_string_do_not_count() -> None:
    stream = TextStream(texts("a", "stop", "b"), ["stop"])
    assert stream.push([0, 1, 2]) == "a"
    assert stream.num_tokens == 2


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(1, 6)),
)
def test_a_stop_string_never_leaks_however_the_text_is_split(text: str, stops: list[str], sizes: list[int]) -> None:
    tokens, rest = [], text
    for size in sizes:
        tokens.append(rest[:size])
        rest = rest[size:]
    tokens.append(rest)
    stream = TextStream(texts(*tokens), stops)
    joined = "".join(stream_all(stream, list(range(len(tokens)))))
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert joined == text and stream.matched_stop is None
    else:
        end, negative_length, stop = min(ends)
        assert stream.matched_stop == stop
        assert joined == text[: end + negative_length]


@pytest.mark.field("vllm-project/vllm#21987")
def test_min_tokens_wins_over_stop_strings() -> None:
    stream = TextStream(texts("a", "\n", "b\n"), ["\n"], min_tokens=3)
    assert stream.push([0, 1]) == "a\n"
    assert stream.push([2]) == "b"
    assert stream.matched_stop == "\n"
    assert stream.num_tokens == 3


def test_an_echo_comes_first_as_one_text_with_the_output_and_is_not_searched() -> None:
    pieces = one_byte_tokens()
    echo, output = list("a stop 北".encode())[:-1], [*"北".encode()[2:], *b" end stop here"]
    stream = TextStream(pieces, ["stop"], echo_ids=echo)
    assert stream.push(output[:1]) == "a stop 北"
    assert "".join(stream_all(stream, output[1:])) == " end "
    assert stream.matched_stop == "stop"
    assert stream.num_tokens == len(b"X end stop")


def test_a_word_behind_an_echo_keeps_the_space_before_it() -> None:
    pieces = words("▁Say", "▁it")
    assert "".join(stream_all(TextStream(pieces, echo_ids=[0]), [1])) == "Say it"
    assert "".join(stream_all(TextStream(pieces), [1])) == "it"
