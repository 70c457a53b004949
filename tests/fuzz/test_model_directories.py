"""A Hugging Face directory's JSON files: configuration, generation defaults, tokenizer and its configuration."""

import json
from pathlib import Path
from typing import Any

import pytest
from fuzzing import JSON_VALUES, altered, as_json, held_to_contract, mutated
from hypothesis import given, strategies as st
from tiny_model import tokenizer_json, write_tiny_model

from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import ModelFiles, load_config_of, sampling_defaults
from pageferry.core.model_shapes import check_shapes, expected_shapes
from pageferry.core.sampling import SamplingParams, StopParams
from pageferry.core.sequence import WorkItem
from pageferry.engine.rope import inverse_frequencies
from pageferry.runtime.convert_work import work_to_proto
from pageferry.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("fuzzed"))


CONFIG = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_window_layers": 0,
    "eos_token_id": [1, 2],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 1000, "original_max_position_embeddings": 2**31 - 1}
SUITED = {
    "model_type": ["llama", "mistral", "qwen2", "qwen3"],
    "layer_types": [["full_attention"] * 4, ["sliding_attention"] * 4, ["sliding_attention", []], [{}], "full"],
    "num_hidden_layers": [0, 10**9, 2**63],
    "rope_parameters": [{"rope_type": "linear", "factor": 2}, {"type": "yarn"}, YARN, DYNAMIC, [], "x"],
    "type": ["linear", "llama3", "yarn", "dynamic", [], {}],
    "partial_rotary_factor": [0.5, 1, "1"],
    "quantization_config": [None, {}],
}


def use(config: Any, generation: Any) -> None:
    with held_to_contract():
        model = ModelConfig.from_hf(config, generation, "fuzzed")
        shapes = expected_shapes(model)
        check_shapes(shapes, {})
    with held_to_contract():
        model = ModelConfig.from_hf(config, generation, "fuzzed")
        inverse_frequencies(model.served(model.most_positions), None)


@given(altered(CONFIG, SUITED), altered({"eos_token_id": [1], "bos_token_id": 0}) | st.none())
def test_a_configuration(config: dict[str, Any], generation: dict[str, Any] | None) -> None:
    use(config, generation)


FILES = st.sampled_from(["config.json", "generation_config.json"])
DOCUMENTS = mutated(st.just(as_json(CONFIG))) | JSON_VALUES.map(as_json) | st.sampled_from([b"", b"[" * 100_000])
GENERATION = {"eos_token_id": 2, "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5}


@given(name=FILES, data=DOCUMENTS | altered(GENERATION).map(as_json))
def test_configuration_files(directory: Path, name: str, data: bytes) -> None:
    path = directory / name
    whole = path.read_bytes()
    path.write_bytes(data)
    files = ModelFiles("fuzzed", "hf", directory)
    try:
        with held_to_contract():
            load_config_of(files)
        with held_to_contract():
            sampling = SamplingParams(**sampling_defaults(files))
            work_to_proto(WorkItem("r", (1,), sampling, StopParams(1)))
    finally:
        path.write_bytes(whole)


TOKENIZER = json.loads(json.dumps(tokenizer_json(["<s>"], ["<s>", "a", "b", "ab", "Ġ"], [["a", "b"]])))
DECODERS = [
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}]},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
]
PARTS = {
    "decoder": DECODERS,
    "type": ["BPE", "WordLevel", "WordPiece", "Unigram", "ByteLevel", "Sequence", "Replace"],
    "normalizer": [{"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}, {"type": "NFC"}],
    "pre_tokenizer": [{"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}],
    "vocab": [{}, {"a": 0}, {"a": 2**32 - 1}, {"a": 0, "b": 0}, [["a", -1.0]]],
    "merges": [["a b"], ["a b c"], [["a", "zz"]], ["a"]],
    "dropout": [0.5, 2.0, -1.0],
}
SPECIAL = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}"}


@given(
    tokenizer=altered(TOKENIZER, PARTS).map(as_json) | mutated(st.just(as_json(TOKENIZER))),
    config=altered(SPECIAL, {"chat_template": [[{"name": "default", "template": "x"}], [1], "{% for %}"]}).map(as_json),
    template=st.none() | st.binary(max_size=20),
)
def test_tokenizer_files(directory: Path, tokenizer: bytes, config: bytes, template: bytes | None) -> None:
    (directory / "tokenizer.json").write_bytes(tokenizer)
    (directory / "tokenizer_config.json").write_bytes(config)
    own_file = directory / "chat_template.jinja"
    own_file.unlink(missing_ok=True)
    if template is not None:
        own_file.write_bytes(template)
    with held_to_contract():
        loaded = load_tokenizer(ModelFiles("fuzzed", "hf", directory))
        ids = loaded.encode("ab a\x00ü<s> b")
        loaded.decode(ids)
        loaded.decode([2**32 - 1, 0])
        loaded.piece(3)
