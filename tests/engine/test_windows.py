"""Whole models over windows and selective caching, pages freed behind: equal to forward passes with a full mask."""

from pathlib import Path

import pytest
import torch
from engines import load, relative_error, windowed_logits_of
from page_pools import TAILED
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.groups import CacheGroup, parse_groups

LIMIT = 1e-4
NUM_TOKENS = 150
TOKENS = [4 + (index * index * 31 + index * 7) % 300 for index in range(NUM_TOKENS)]
CHUNKINGS: dict[str, list[int]] = {
    "one chunk": [NUM_TOKENS],
    "odd chunks": [7, 16, 48, 49, 101, NUM_TOKENS],
    "token by token": [*range(1, NUM_TOKENS + 1)],
}


def full_mask(model: PreTrainedModel, groups: tuple[CacheGroup, ...], token_ids: list[int]) -> torch.Tensor:
    """Logits where every layer has all keys at hand and a mask of its own."""
    query, key = torch.arange(len(token_ids))[:, None], torch.arange(len(token_ids))[None]
    model.set_attn_implementation("eager")
    for group in groups:
        seen = key <= query
        if group.window is not None:
            seen &= (key > query - group.window) | (key < group.sinks)
        mask = torch.zeros(seen.shape).masked_fill(~seen, -1e30)[None, None]
        for layer in group.layers:
            forward = model.model.layers[layer].self_attn.forward
            model.model.layers[layer].self_attn.forward = lambda *args, forward=forward, mask=mask, **kwargs: forward(
                *args, **kwargs | {"attention_mask": mask}
            )
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def oracle(directory: Path, cache_layers: str, token_ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return full_mask(model, parse_groups(cache_layers, 4, None), token_ids)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("window", [16, 37])
def test_windows_equal_a_full_mask(tiny_model: Path, window: int, sinks: int, kernels: str) -> None:
    """Prompts far longer than the window, and every length from 1 on: W - 1, W and W + 1 among them."""
    cache_layers = f"0-3=window:{window},sinks:{sinks}"
    expected = oracle(tiny_model, cache_layers, TOKENS)
    for ends in CHUNKINGS.values():
        engine = load(tiny_model, page_size=16, num_pages=14, cache_layers=cache_layers, kernels=kernels)
        assert relative_error(windowed_logits_of(engine, TOKENS, ends), expected) < LIMIT


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("page_size", [5, 16])
@pytest.mark.parametrize("cache_layers", ["0-1=window:20,sinks:4;2-3=full", "0,3=window:33;1=full;2=window:8,sinks:1"])
def test_selective_caching_equals_a_full_mask(
    tiny_model: Path, cache_layers: str, page_size: int, kernels: str
) -> None:
    expected = oracle(tiny_model, cache_layers, TOKENS)
    engine = load(tiny_model, page_size=page_size, cache_layers=cache_layers, kernels=kernels)
    for ends in CHUNKINGS.values():
        assert relative_error(windowed_logits_of(engine, TOKENS, ends), expected) < LIMIT


@pytest.mark.parametrize(
    ("page_format", "cache_layers"),
    [*((name, "") for name in TAILED), ("int8:channel:asym", "0-1=window:20,sinks:4;2-3=full")],
)
def test_channel_pages_give_the_same_answers_in_any_chunks(
    tiny_model: Path, page_format: str, cache_layers: str
) -> None:
    """What a query reads is equal; sums in another order may turn a number to the next step, as for any format."""
    engine = load(tiny_model, page_format, page_size=5, cache_layers=cache_layers, kernels="torch")
    whole, *others = (windowed_logits_of(engine, TOKENS, ends) for ends in CHUNKINGS.values())
    for other in others:
        assert float((whole - other).norm() / whole.norm()) < 3e-3


def mistral(directory: Path, window: int | None) -> PreTrainedModel:
    torch.manual_seed(7)
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    model = MistralForCausalLM(MistralConfig(**sizes, **heads, max_position_embeddings=512, sliding_window=window))
    for parameter in model.eval().parameters():
        parameter.data.normal_(0 if parameter.dim() > 1 else 1, 0.15)
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_a_models_own_window_frees_what_lies_behind(tmp_path: Path, kernels: str) -> None:
    """Six pages of 16 hold 150 tokens of a window of 20, in chunks of at most 48."""
    model = mistral(tmp_path, 20)
    engine = load(tmp_path, num_pages=6, kernels=kernels)
    assert [(group.window, group.sinks) for group in engine.layout.groups] == [(20, 0)]
    ends = [30, 78, 79, *range(80, 110), NUM_TOKENS]
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    assert relative_error(windowed_logits_of(engine, TOKENS, ends), expected) < LIMIT


def test_selective_caching_of_a_model_with_a_window(tmp_path: Path) -> None:
    model = mistral(tmp_path, 40)
    engine = load(tmp_path, cache_layers="0=window:10,sinks:2;1-2=full")
    expected = full_mask(model, (CacheGroup((0,), 10, 2), CacheGroup((1, 2), 40)), TOKENS)
    assert relative_error(windowed_logits_of(engine, TOKENS, [60, NUM_TOKENS]), expected) < LIMIT
    with pytest.raises(InvalidArgumentError, match="must be at most the model's own, 40"):
        load(tmp_path, cache_layers="0-2=window:41")
