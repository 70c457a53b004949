"""What a directory must hold: missing, wrong, unknown and damaged tensors are named; tied heads are tied."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engines import load, logits_of, sequence
from safetensors.torch import load_file, save_file

from pageferry.core.errors import InvalidArgumentError

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def change(directory: Path, tensors: Callable[[Tensors], None] | None = None, **config: object) -> Path:
    """Rewrite the weights and fields of the configuration."""
    path = directory / "model.safetensors"
    if tensors:
        found = load_file(path)
        tensors(found)
        save_file(found, path)
    document = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def logits(directory: Path) -> torch.Tensor:
    return logits_of(load(directory), sequence(range(20), 0, 2), [20])


@pytest.mark.field("sgl-project/sglang#1508", "vllm-project/vllm#6758", "vllm-project/vllm#53019")
def test_a_tied_head_is_the_embedding_whatever_the_file_has(tiny_model: Path, copy: Path) -> None:
    expected = logits(tiny_model)
    change(copy, lambda tensors: tensors.update({"lm_head.weight": torch.randn(320, 64)}))
    assert torch.equal(logits(copy), expected)


@pytest.mark.field("sgl-project/sglang#1508", "vllm-project/vllm#6758", "vllm-project/vllm#53019")
def test_an_untied_head_is_its_own(tiny_model: Path, copy: Path) -> None:
    def double(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2

    change(copy, double, tie_word_embeddings=False)
    torch.testing.assert_close(logits(copy), logits(tiny_model) * 2)


@pytest.mark.field("sgl-project/sglang#1508", "vllm-project/vllm#6758", "vllm-project/vllm#53019")
def test_an_untied_head_must_be_there(copy: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"copy: the model lacks tensors: lm_head\.weight"):
        load(change(copy, tie_word_embeddings=False))


@pytest.mark.field("sgl-project/sglang#1508", "vllm-project/vllm#6758", "vllm-project/vllm#53019")
def test_a_missing_layer_weight_is_listed(copy: Path) -> None:
    def remove(tensors: Tensors) -> None:
        del tensors["model.layers.2.mlp.up_proj.weight"]

    with pytest.raises(InvalidArgumentError, match=r"lacks tensors: model\.layers\.2\.mlp\.up_proj\.weight"):
        load(change(copy, remove))


def test_long_lists_are_shortened(copy: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"lacks tensors: model\.layers\.4\..* and 10 more$"):
        load(change(copy, num_hidden_layers=6))


def test_a_wrong_shape_is_named_with_both(copy: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"mlp\.gate_proj\.weight \(128, 64\) instead of \(100, 64\)"):
        load(change(copy, intermediate_size=100))


def test_a_tensor_that_would_be_left_out_is_refused(copy: Path) -> None:
    def bias(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)

    with pytest.raises(InvalidArgumentError, match=r"has unknown tensors: .*q_proj\.bias"):
        load(change(copy, bias))


def shard(directory: Path, parts: dict[str, Tensors], **index: str) -> Path:
    """Put the weights into the files named, with an index of all that they hold, and of what else is named."""
    (directory / "model.safetensors").unlink()
    names: dict[str, str] = {}
    for file, tensors in parts.items():
        save_file(tensors, directory / file)
        names |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names | index}))
    return directory


UP = "model.layers.3.mlp.up_proj.weight"


def halves(directory: Path) -> tuple[Tensors, Tensors]:
    found = load_file(directory / "model.safetensors")
    first = {name: found[name] for name in sorted(found)[::2]}
    return first, {name: tensor for name, tensor in found.items() if name not in first}


def test_a_tensor_in_two_shards_is_refused(copy: Path) -> None:
    first, second = halves(copy)
    second["model.norm.weight"] = first["model.norm.weight"] = torch.ones(64)
    shard(copy, {"a.safetensors": first, "b.safetensors": second})
    with pytest.raises(InvalidArgumentError, match=r"b\.safetensors: tensor model\.norm\.weight is in a\.safe"):
        load(copy)


def test_a_tensor_that_only_the_index_has_is_missing(copy: Path, tiny_model: Path) -> None:
    first, second = halves(copy)
    expected = logits(tiny_model)
    second.pop(UP, None)
    first.pop(UP, None)
    shard(copy, {"a.safetensors": first, "b.safetensors": second}, **{UP: "b.safetensors"})
    with pytest.raises(InvalidArgumentError, match=r"lacks tensors: model\.layers\.3\.mlp\.up_proj\.weight$"):
        load(copy)
    second[UP] = load_file(tiny_model / "model.safetensors")[UP]
    save_file(second, copy / "b.safetensors")
    assert torch.equal(logits(copy), expected)


def test_other_types_are_named(copy: Path) -> None:
    def narrow(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)

    with pytest.raises(InvalidArgumentError, match=r"norm\.weight has type F8_E4M3, supported are F32, F16, BF16"):
        load(change(copy, narrow))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_are_read(copy: Path, tiny_model: Path, dtype: torch.dtype) -> None:
    def round_all(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    expected = logits(tiny_model)
    torch.testing.assert_close(logits(change(copy, round_all)), expected, atol=0.1, rtol=0.1)


def test_weights_cut_short_anywhere_are_refused(copy: Path) -> None:
    path = copy / "model.safetensors"
    data = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 500, len(data) // 3, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(InvalidArgumentError, match=r"model\.safetensors: is not a whole safetensors file"):
            load(copy)
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(InvalidArgumentError, match="is not a whole safetensors file"):
        load(copy)
