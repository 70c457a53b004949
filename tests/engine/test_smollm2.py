"""The packaged model: logits against transformers' Llama with our dequantised weights, and a known answer."""

import json

import pytest
import torch
from engines import Generation, load, logits_of, relative_error, sequence
from transformers import LlamaConfig, LlamaForCausalLM

from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import load_config_of, resolve_model
from pageferry.core.sampling import StopParams
from pageferry.engine.gguf_tensors import GgufTensors
from pageferry.engine.load import Engine

# "<|im_start|>system … You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|> …
# <|im_start|>user What is the capital of France?<|im_end|> <|im_start|>assistant"
PROMPT: list[int] = json.loads(
    "[1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, "
    "8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]"
)
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30, 2]  # "The capital of France is Paris.<|im_end|>"


def build(config: ModelConfig, tensors: GgufTensors) -> LlamaForCausalLM:
    settings = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(settings)
    state = {name: tensors.load(name) for name in tensors.shapes}
    model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(settings)
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load("smollm2")


def test_logits_equal_transformers(engine: Engine) -> None:
    files = resolve_model("smollm2")
    config = load_config_of(files)
    tensors = GgufTensors(files.path, config)
    model = build(config, tensors)
    tensors.close()
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    for ends in ([len(PROMPT)], [20, len(PROMPT) - 2, len(PROMPT) - 1, len(PROMPT)]):
        assert relative_error(logits_of(engine, sequence(PROMPT, 5, 4), ends), expected) < 1e-4


def test_the_answer_is_paris_on_every_path(engine: Engine) -> None:
    stop = StopParams(max_tokens=20, stop_token_ids=frozenset({2}))
    others = [("bf16", "auto"), ("bf16", "torch"), ("auto", "auto")]
    for loaded in (engine, *(load("smollm2", "int8", compute_dtype=dtype, kernels=how) for dtype, how in others)):
        generation = Generation(loaded, [sequence(PROMPT, 0, 5, stop=stop)])
        generation.prefill()
        generation.decode(len(ANSWER) - 1)
        assert generation.sequences[0].output_ids == ANSWER
