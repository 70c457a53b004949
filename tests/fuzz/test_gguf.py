"""GGUF files: the container, the model's configuration and its tokenizer from the metadata, and the tensors' bytes."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from fuzzing import JSON_VALUES, altered, held_to_contract, mutated, numbers
from gguf_writer import write_gguf
from hypothesis import given, strategies as st
from tiny_gguf import METADATA, gguf_tensors
from tiny_model import TinyShape, write_tiny_model

from pageferry.core.gguf import GgufFile, GgufType, parse_gguf
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import ModelFiles, load_config_of
from pageferry.core.model_shapes import check_shapes, expected_shapes
from pageferry.engine.fingerprint import fingerprint
from pageferry.engine.gguf_tensors import GgufTensors
from pageferry.engine.rope import inverse_frequencies
from pageferry.text.gguf_tokenizer import GgufVocabulary

VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "ab", "Ġ"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 4],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.scores": [0.0, 0.0, -1.0, -2.0, -3.0, -4.0],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}
GOOD = METADATA | VOCABULARY
TENSORS = {
    "token_embd.weight": (GgufType.Q4_0, np.ones((6, 64))),
    "output_norm.weight": (GgufType.F32, np.ones(64)),
    "blk.0.attn_q.weight": (GgufType.Q4_1, np.ones((2, 64))),
    "blk.0.attn_k.weight": (GgufType.Q8_0, np.ones((2, 32))),
    "blk.0.ffn_up.weight": (GgufType.BF16, np.ones((3, 5))),
    "rope_freqs.weight": (GgufType.F16, np.ones((2, 2, 2))),
}
WRITTEN = write_gguf(GOOD, TENSORS)
KEYS = [*GOOD, "general.alignment", "llama.rope.scaling.type", "llama.attention.key_length", "llama.expert_count"]
KEYS += [f"llama.rope.scaling.{name}" for name in ("factor", "attn_factor", "yarn_beta_fast", "yarn_beta_slow")]
WORDS = st.sampled_from(["llama", "qwen3", "gpt2", "llama-bpe", "qwen2", "linear", "yarn", "a b", "", "a", "ü"])
NUMBERS = numbers(-(2**31), 2**31 - 1)
VALUES = (
    NUMBERS
    | st.floats(width=32)
    | st.booleans()
    | WORDS
    | st.lists(NUMBERS, min_size=1, max_size=8)
    | st.lists(WORDS, min_size=1, max_size=8)
    | st.lists(st.lists(NUMBERS, min_size=1, max_size=2), min_size=1, max_size=2)
)
METADATAS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4).map(lambda changes: GOOD | changes)


def read(data: bytes) -> GgufFile | None:
    with held_to_contract():
        return parse_gguf(memoryview(data))
    return None


def use(file: GgufFile) -> None:
    """All that is made of the metadata."""
    with held_to_contract():
        config = ModelConfig.from_gguf(file, "fuzzed")
        inverse_frequencies(config.served(config.most_positions))
        check_shapes(expected_shapes(config), {name: tensor.shape for name, tensor in file.tensors.items()})
    with held_to_contract():
        vocabulary = GgufVocabulary(file.metadata)
        vocabulary.token_of("bos")
        tokenizer = vocabulary.build()
        tokenizer.encode("ab a\x00ü<s> b").ids  # noqa: B018 - that it can be asked for is the point


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda tail: b"GGUF\x03\0\0\0" + tail))
def test_any_bytes(data: bytes) -> None:
    read(data)


@given(mutated(st.just(WRITTEN)))
def test_a_damaged_file(data: bytes) -> None:
    file = read(data)
    if file is not None:
        use(file)


@given(METADATAS)
def test_wrong_metadata(metadata: Mapping[str, object]) -> None:
    file = read(write_gguf(metadata, TENSORS))
    if file is not None:
        use(file)


@given(altered(GOOD, {key: [1] for key in KEYS}), st.dictionaries(st.sampled_from(KEYS), JSON_VALUES, max_size=2))
def test_metadata_of_any_type(metadata: dict[str, object], more: dict[str, object]) -> None:
    use(GgufFile(metadata | more, parse_gguf(memoryview(WRITTEN)).tensors))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, head_dim=8)
    return write_tiny_model(tmp_path_factory.mktemp("gguf"), shape)


@given(data=st.data(), kind=st.sampled_from([GgufType.F32, GgufType.Q4_0, GgufType.Q8_0]))
def test_the_tensors_of_a_file_whose_tables_are_damaged(directory: Path, data: st.DataObject, kind: GgufType) -> None:
    sizes = {"llama.embedding_length": 32, "llama.block_count": 1, "llama.feed_forward_length": 32}
    whole = write_gguf(METADATA | sizes, gguf_tensors(directory, kind))
    start = min(tensor.offset for tensor in parse_gguf(memoryview(whole)).tensors.values())
    path = directory / "fuzzed.gguf"
    path.write_bytes(data.draw(mutated(st.just(whole[:start]))) + whole[start:])
    with held_to_contract():
        config = load_config_of(ModelFiles("fuzzed", "gguf", path))
        with closing(GgufTensors(path, config)) as tensors:
            expected = expected_shapes(config)
            check_shapes(expected, tensors.shapes)
            fingerprint(config, tensors)
            for name, shape in expected.items():
                assert tensors.load(name).shape == shape
