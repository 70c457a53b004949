"""Text of replayed tokens, in every way that clients have: whole characters, no stop string, the decoder's spaces."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from mixes import BROKEN, cut_at_stop, draw_mix
from replay import WAYS, Replay, byte_id, word_id, write_replay_model
from tiny_model import BOS_ID, EOS_ID
from tokenizers import Tokenizer as Encoder

MIXED = "😀 ďábel 北京 👩‍👩‍👧"
WORDS = ["\nUser", ":", "s", "Hello", "own fox", "a br", "own", " fox", " f", "\n", "x", "ab", "cd", "cx"]
WORD_IDS = {word: word_id(number) for number, word in enumerate(WORDS)}
SENTENCE_WORDS = ["▁Daen", "erys", "▁is", "▁the", "▁", "▁leading", "▁x", "▁▁a"]


@pytest.fixture(scope="module")
def words_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_replay_model(tmp_path_factory.mktemp("words") / "tiny", tiny_model, WORDS)


@pytest.fixture(scope="module")
def sentence_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sentences") / "tiny"
    return write_replay_model(directory, tiny_model, SENTENCE_WORDS, sentencepiece=True)


@pytest.fixture
async def replay(words_model: Path) -> AsyncIterator[Replay]:
    async with Replay(words_model) as replay:
        yield replay
        await replay.rig.check_idle()


@pytest.mark.field("waybarrios/vllm-mlx#109", "tenstorrent/tt-inference-server#2594", "exo-explore/exo#1691")
@pytest.mark.parametrize("way", WAYS)
async def test_bytes_of_a_character_come_as_a_character_whatever_tokens_they_are_in(replay: Replay, way: str) -> None:
    data = MIXED.encode()
    said = await replay.ask(way, [byte_id(byte) for byte in data])
    assert said.text == MIXED
    assert (said.reason, said.num_tokens) == ("length", len(data))
    for end in range(1, len(data)):  # max_tokens, most of them in the middle of a character
        said = await replay.ask(way, [byte_id(byte) for byte in data], max_tokens=end)
        whole = data[:end].decode(errors="ignore")
        assert said.text == data[:end].decode(errors="replace")
        assert BROKEN not in said.text[: len(whole)]
        assert said.text in (whole, whole + BROKEN)


@pytest.mark.field("SharpAI/SwiftLM#126", "huggingface/text-generation-inference#1254")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("words", "stop", "text", "reason"),
    [
        (["Hello", "\nUser", ":", "x"], ["\nUser:"], "Hello", "stop"),
        (["Hello", "\nUser", "s"], ["\nUser:"], "Hello\nUsers", "length"),
        (["Hello", "\nUser"], ["\nUser:"], "Hello\nUser", "length"),
        (["a br", "own fox", "x"], ["own fox"], "a br", "stop"),
        (["a br", "own", " f", "x"], ["own fox"], "a brown fx", "length"),
        (["a br", "own", " fox", "x"], ["own fox", "own"], "a br", "stop"),
        (["x", "ab", "cd"], ["abcd", "abc"], "x", "stop"),  # one is a prefix of the other
        (["x", "ab", "cx"], ["abcd", "abc"], "x", "stop"),
        (["x", "ab", "cd"], ["bc", "abcd"], "xa", "stop"),  # the earliest
    ],
)
async def test_nothing_of_a_stop_string_is_sent_and_what_was_none_is_sent_whole(
    replay: Replay, way: str, words: list[str], stop: list[str], text: str, reason: str
) -> None:
    said = await replay.ask(way, [WORD_IDS[word] for word in words], stop=stop)
    assert (said.text, said.reason) == (text, reason)


@pytest.mark.field(
    "huggingface/transformers#22710",
    "huggingface/transformers#28776",
    "deepjavalibrary/djl-serving#1272",
    "ml-explore/mlx-lm#1754",
)
@pytest.mark.parametrize("way", WAYS)
async def test_spaces_of_a_sentencepiece_vocabulary_are_its_decoders(sentence_model: Path, way: str) -> None:
    library = Encoder.from_file(str(sentence_model / "tokenizer.json"))
    async with Replay(sentence_model) as replay:
        for words, text in (
            (["▁Daen", "erys", "▁is", "▁the"], "Daenerys is the"),
            (["▁", "▁leading", "▁x"], " leading x"),
            (["▁▁a", "▁x"], " a x"),
        ):
            token_ids = [word_id(SENTENCE_WORDS.index(word)) for word in words]
            assert library.decode(token_ids) == text
            assert (await replay.ask(way, token_ids)).text == text
        await replay.rig.check_idle()


@pytest.mark.field("ai-dynamo/dynamo#8780", "kserve/kserve#4490")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("skip", [None, True, False])
async def test_special_tokens_are_hidden_unless_they_are_asked_for(replay: Replay, way: str, skip: bool | None) -> None:
    token_ids = [WORD_IDS["Hello"], BOS_ID, WORD_IDS["x"], EOS_ID]
    fields = {} if skip is None else {"skip_special_tokens": skip}
    said = await replay.ask(way, token_ids, max_tokens=10, **fields)
    assert said.text == ("Hello<|im_start|>x<|im_end|>" if skip is False else "Hellox")
    assert (said.reason, said.num_tokens) == ("stop", 4)


@pytest.mark.field("vllm-project/vllm#21987")
@pytest.mark.parametrize("way", WAYS)
async def test_a_stop_string_waits_for_min_tokens(replay: Replay, way: str) -> None:
    newline, other = WORD_IDS["\n"], WORD_IDS["x"]
    early = [other, newline, *[other] * 40]
    said = await replay.ask(way, early, stop=["\n"], min_tokens=20, max_tokens=25)
    assert (said.text, said.reason, said.num_tokens) == ("x\n" + "x" * 23, "length", 25)
    again = [other, newline, *[other] * 19, newline, *[other] * 20]
    said = await replay.ask(way, again, stop=["\n"], min_tokens=20, max_tokens=25)
    assert (said.text, said.reason, said.num_tokens) == ("x\n" + "x" * 19, "stop", 22)


@pytest.fixture(scope="module")
def several_eos(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_replay_model(tmp_path_factory.mktemp("eos") / "tiny", tiny_model, WORDS, eos_ids=[1, 106])


@pytest.mark.field("vllm-project/vllm#21987", "vllm-project/vllm#4589", "vllm-project/vllm#5849")
@pytest.mark.parametrize("way", WAYS)
async def test_each_end_of_sequence_id_waits_for_min_tokens_and_is_ignored_where_asked(
    several_eos: Path, way: str
) -> None:
    other = WORD_IDS["x"]
    script = [other, 106, *[other] * 19, 106, *[other] * 20]
    async with Replay(several_eos) as replay:
        for fields, reason, num_tokens in (
            ({}, "stop", 2),
            ({"min_tokens": 20}, "stop", 22),
            ({"ignore_eos": True}, "length", 25),
            ({"ignore_eos": True, "min_tokens": 20}, "length", 25),
        ):
            said = await replay.ask(way, script, max_tokens=25, **fields)
            assert (said.reason, said.num_tokens) == (reason, num_tokens)
        await replay.rig.check_idle()


@pytest.mark.field("waybarrios/vllm-mlx#109", "SharpAI/SwiftLM#126")
@pytest.mark.parametrize("way", WAYS)
async def test_random_mixes_of_emoji_cjk_and_stop_strings_are_the_decoded_text_cut_at_the_stop(way: str) -> None:
    """Few of those in tests/text/test_mixes.py, over all of the router."""
    async with Replay("smollm2") as replay:
        tokenizer = replay.rig.tokenizer
        for number in range(40):
            mix = draw_mix(number, lambda text: tokenizer.encode(text, add_special=False))
            whole, stop = cut_at_stop(tokenizer.decode(mix.token_ids), mix.stops)
            said = await replay.ask(way, mix.token_ids, stop=mix.stops, batch=mix.batch)
            assert (said.text, said.reason) == (whole, "length" if stop is None else "stop")
            assert BROKEN not in said.text.removesuffix(BROKEN)
        await replay.rig.check_idle()
