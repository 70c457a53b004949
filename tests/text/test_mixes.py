"""A thousand random mixes of emoji, CJK, combining marks and stop strings: parts join to the text decoded at once."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from mixes import BROKEN, cut_at_stop, draw_mix
from replay import write_replay_model
from tokenizers import Tokenizer as Encoder

from pageferry.core.model_files import map_gguf, resolve_model
from pageferry.text.detokenize import TextStream
from pageferry.text.gguf_tokenizer import GgufVocabulary
from pageferry.text.tokenizer import Tokenizer, load_tokenizer

NUM_MIXES = 1000
SENTENCE_WORDS = ["▁", "a", "▁a", "▁the", "Hello", "▁world", "User", "北", "京", "日", "é", "\n", "😀", "\u200d"]
Decode = Callable[[Sequence[int]], str]


@cache
def smollm2() -> tuple[Tokenizer, Decode]:
    """The tokenizer, and the library's own way to decode all at once."""
    files = resolve_model("smollm2")
    buffer, file = map_gguf(files.path)
    buffer.close()
    library = GgufVocabulary(file.metadata).build()
    return load_tokenizer(files), lambda ids: str(library.decode(list(ids), skip_special_tokens=True))


@pytest.fixture(scope="module")
def sentencepiece(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Decode]:
    """The same; where a character is incomplete, the library breaks whole ones before it too, so it is spelled out."""
    directory = tmp_path_factory.mktemp("sentences") / "tiny"
    write_replay_model(directory, tiny_model, SENTENCE_WORDS, sentencepiece=True)
    library = Encoder.from_file(str(directory / "tokenizer.json"))

    def decode(token_ids: Sequence[int]) -> str:
        tokens = [library.id_to_token(id_) for id_ in token_ids]
        data = b"".join(
            bytes([int(token[3:5], 16)]) if token.startswith("<0x") else token.replace("▁", " ").encode()
            for token in tokens
        )
        text = data.decode(errors="replace").removeprefix(" ")
        assert BROKEN in text or text == library.decode(list(token_ids), skip_special_tokens=True)
        return text

    return load_tokenizer(resolve_model(str(directory))), decode


def check(number: int, tokenizer: Tokenizer, decode: Decode) -> str | None:
    """The stop string that the mix ended with."""
    mix = draw_mix(number, lambda text: tokenizer.encode(text, add_special=False))
    whole, stop = cut_at_stop(decode(mix.token_ids), mix.stops)
    stream = TextStream(tokenizer.pieces, mix.stops)
    parts = [stream.push(mix.token_ids[start : start + mix.batch]) for start in range(0, len(mix.token_ids), mix.batch)]
    parts.append(stream.finish())
    assert "".join(parts) == whole
    assert stream.matched_stop == stop
    assert not any(BROKEN in part for part in parts[:-1])
    assert parts[-1].rstrip(BROKEN).count(BROKEN) == 0
    assert mix.is_cut or BROKEN not in parts[-1]
    return stop


def test_a_thousand_mixes_of_the_packaged_models_tokens() -> None:
    stops = [check(number, *smollm2()) for number in range(NUM_MIXES)]
    assert NUM_MIXES // 4 < sum(stop is not None for stop in stops) < 3 * NUM_MIXES // 4


def test_a_thousand_mixes_of_a_sentencepiece_vocabulary(sentencepiece: tuple[Tokenizer, Decode]) -> None:
    stops = [check(number, *sentencepiece) for number in range(NUM_MIXES)]
    assert NUM_MIXES // 4 < sum(stop is not None for stop in stops) < 3 * NUM_MIXES // 4
