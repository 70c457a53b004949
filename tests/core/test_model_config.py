"""Model configurations from Hugging Face and GGUF; what is not supported is refused by name."""

from typing import Any

import numpy as np
import pytest
from gguf_writer import write_gguf

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.gguf import GgufType, parse_gguf
from pageferry.core.model_config import ModelConfig, RopeScaling

HF = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GGUF = {
    "general.architecture": "llama",
    "llama.embedding_length": 64,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 96,
    "llama.context_length": 512,
    "llama.attention.layer_norm_rms_epsilon": 0.25,
    "llama.rope.freq_base": 1e5,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.eot_token_id": 7,
}


def from_hf(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(HF | changes, generation, "tiny")


def from_gguf(changes: dict[str, object], *names: str) -> ModelConfig:
    tensors = {name: (GgufType.F32, np.zeros((300, 1))) for name in ("token_embd.weight", *names)}
    return ModelConfig.from_gguf(parse_gguf(memoryview(write_gguf(GGUF | changes, tensors))), "tiny")


def test_a_llama_configuration() -> None:
    assert from_hf() == ModelConfig(
        name="tiny",
        architecture="llama",
        vocab_size=300,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        max_positions=512,
        norm_eps=1e-5,
        rope_theta=1e5,
        bos_id=1,
        eos_ids=(2,),
    )


@pytest.mark.field("vllm-project/vllm#2622", "NVIDIA/TensorRT-LLM#5912", "deepspeedai/DeepSpeed#8389")
def test_the_head_size_that_the_configuration_names_wins() -> None:
    assert from_hf(head_dim=32).head_dim == 32
    assert from_hf(head_dim=None).head_dim == 16
    assert from_hf(num_key_value_heads=1, head_dim=32).num_kv_heads == 1


def test_every_end_id_of_model_and_generation_config_counts() -> None:
    assert from_hf({"eos_token_id": [106, 2]}, eos_token_id=[1, 106]).eos_ids == (106, 2, 1)
    assert from_hf({}, eos_token_id=None).eos_ids == ()


def test_every_end_id_of_a_gguf_counts_and_control_tokens_that_are_known_ends() -> None:
    tokens = ["<|endoftext|>", "<s>", "</s>", "a", "<|eot_id|>", "<|im_end|>"]
    types = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, 3, 1, 3, 1]}
    lists = {"tokenizer.ggml.eos_token_ids": [2, 9], "tokenizer.ggml.eom_token_id": 8}
    assert from_gguf(lists | types).eos_ids == (2, 9, 7, 8, 0, 4)


@pytest.mark.parametrize("eos", ["2", True, [2, "3"], 2.0])
def test_end_ids_that_are_none_are_refused(eos: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"generation_config\.json: eos_token_id is .*, must be a token id"):
        from_hf({"eos_token_id": eos})


@pytest.mark.field("Blaizzy/mlx-vlm#1710", "huggingface/text-generation-inference#816", "vllm-project/vllm#10293")
def test_rope_is_read_in_both_spellings() -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert from_hf(rope_scaling={"rope_type": "llama3"} | llama3).rope_scaling == expected
    assert from_hf(rope_scaling={"type": "linear", "factor": 2}).rope_scaling == RopeScaling("linear", 2.0)
    new = from_hf(rope_theta=None, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5} | llama3)
    assert (new.rope_theta, new.rope_scaling) == (5e5, expected)
    assert from_hf(rope_scaling={"rope_type": "default"}).rope_scaling is None


def test_what_distinguishes_the_architectures() -> None:
    qwen2, qwen3 = from_hf(model_type="qwen2"), from_hf(model_type="qwen3", head_dim=32)
    assert (qwen2.attention_bias, qwen2.o_bias, qwen2.qk_norm, qwen2.sliding_window) == (True, False, False, None)
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 32)
    assert from_hf(model_type="mistral", sliding_window=128).sliding_window == 128
    assert from_hf(model_type="mistral", sliding_window=None).sliding_window is None
    windowed = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 128}
    assert from_hf(**windowed, max_window_layers=0).sliding_window == 128
    assert from_hf(**windowed, max_window_layers=2).sliding_window is None
    biased = from_hf(attention_bias=True, mlp_bias=True)
    assert (biased.attention_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 2.0}
WINDOWED = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"model_type is 'gpt2', supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "model_type is None"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, must be a whole number from 1"),
        ({"num_key_value_heads": 3}, "num_kv_heads is 3, must divide num_heads, 4"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"head_dim": 15}, "head_dim is 15, must be even"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000, must be at most 1000"),
        (
            {"num_hidden_layers": 10**12},
            "num_hidden_layers is 1000000000000, must be a whole number from 1 to 2147483647",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'silu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "foo"}}, "is 'foo', supported are default, linear, dynamic, yarn, llama3"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_type is 'longrope', supported are"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1e9}}, r"factor is 1000000000\.0, must be from 1 to 1000"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}, "head_dim": 2}, "head_dim is 2, must be more than 2"),
        ({"rope_scaling": YARN | {"beta_fast": 1}}, "beta_fast is 1.0, must be more than beta_slow, 1.0"),
        (
            {"rope_scaling": YARN | {"beta_slow": 1e-9}},
            "beta_fast is 32.0, must be more than beta_slow, 1e-09",
        ),
        ({"rope_scaling": YARN | {"truncate": "no"}}, "truncate is 'no', must be true or false"),
        ({"rope_scaling": YARN, "rope_theta": 1}, "rope_theta is 1.0, must be more than 1"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "high_freq_factor is 4.0, must be more than low_freq_fac"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_scaling": [2]}, "rope_scaling is \\[2\\], must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": 300}, "is 300, must be from 0 to 299"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "all layers must attend alike",
        ),
        ({"rope_theta": 10**400}, "rope_theta is a number of 1329 bits, must be a positive number"),
        (WINDOWED | {"layer_types": ["sliding_attention", []]}, "layer_types is .*, must be a list of texts"),
        (WINDOWED | {"layer_types": {"0": "full_attention"}}, "layer_types is .*, must be a list of texts"),
        (WINDOWED | {"max_window_layers": "all"}, "max_window_layers is 'all', must be absent or a whole number"),
        (WINDOWED | {"num_hidden_layers": 2**31 - 1}, "num_layers is 2147483647, must be at most 1000"),
        ({"sliding_window": 2**40, "model_type": "mistral"}, "sliding_window is 1099511627776"),
    ],
)
@pytest.mark.field(
    "vllm-project/vllm#2622",
    "NVIDIA/TensorRT-LLM#5912",
    "deepspeedai/DeepSpeed#8389",
    "Blaizzy/mlx-vlm#1710",
    "huggingface/text-generation-inference#816",
    "vllm-project/vllm#10293",
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        from_hf(**changes)


def test_a_gguf_configuration() -> None:
    config = from_gguf({})
    assert (config.vocab_size, config.head_dim, config.num_kv_heads) == (300, 16, 2)
    assert (config.norm_eps, config.rope_theta, config.eos_ids) == (0.25, 1e5, (2, 7))
    assert config.tied_embeddings
    assert not from_gguf({}, "output.weight").tied_embeddings
    assert from_gguf({"llama.attention.key_length": 32}).head_dim == 32
    assert from_gguf({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}).rope_scaling == (
        RopeScaling("linear", 2.0)
    )


GGUF_YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}


def test_yarn_of_both_forms_is_the_same() -> None:
    length = {"llama.rope.scaling.original_context_length": 256}
    scaling = from_gguf(GGUF_YARN | length).rope_scaling
    assert scaling == from_hf(rope_scaling=YARN | {"factor": 4, "original_max_position_embeddings": 256}).rope_scaling
    assert scaling is not None
    assert scaling.attention_factor == pytest.approx(1.138629)
    betas = {"llama.rope.scaling.yarn_beta_fast": 16.0, "llama.rope.scaling.yarn_beta_slow": 2.0}
    scaled = from_gguf(GGUF_YARN | betas | {"llama.rope.scaling.attn_factor": 0.5}).rope_scaling
    assert scaled is not None
    assert (scaled.beta_fast, scaled.beta_slow, scaled.attention_factor) == (16, 2, scaling.attention_factor / 2)


def test_a_gguf_factor_without_a_type_is_linear() -> None:
    assert from_gguf({"llama.rope.scaling.factor": 2.0}).rope_scaling == RopeScaling("linear", 2.0)
    assert from_gguf({"llama.rope.scale_linear": 2.0}).rope_scaling == RopeScaling("linear", 2.0)
    assert from_gguf({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}).rope_scaling is None
    assert from_gguf({"llama.rope.scaling.factor": 0.0}).rope_scaling is None


def test_longrope_of_a_gguf_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"longrope .* is not supported; supported are none, linear, yarn"):
        from_gguf({}, "rope_factors_long.weight")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma"}, "general.architecture is 'gemma', supported are llama, qwen2, qwen3"),
        ({"llama.expert_count": 8}, "expert_count is 8"),
        ({"split.count": 3}, "split.count is 3, only whole files are read: join the parts with llama-gguf-split"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8, only 16"),
        (
            {"llama.rope.scaling.type": "su"},
            "rope.scaling.type is 'su', supported are none, linear, yarn, and llama3's",
        ),
        ({"llama.rope.scaling.type": "yarn"}, "factor is None"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.attn_factor": 2.0}, "attn_factor is 2.0"),
        (GGUF_YARN | {"llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5"),
        ({"llama.block_count": 0}, "block_count is 0"),
    ],
)
def test_what_gguf_may_not_hold(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        from_gguf(changes)


def test_a_gguf_without_an_embedding_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"no tensor token_embd\.weight"):
        ModelConfig.from_gguf(parse_gguf(memoryview(write_gguf(GGUF, {}))), "tiny")
