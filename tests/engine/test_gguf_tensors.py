"""Dequantisation block by block against the formula, and a GGUF model that computes what its original does."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import load, logits_of, relative_error, sequence
from gguf_writer import quantise, write_gguf
from tiny_gguf import METADATA, gguf_tensors
from tiny_model import VOCAB_SIZE

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.gguf import GgufType
from pageferry.core.model_files import ModelFiles, load_config_of
from pageferry.engine.gguf_tensors import GgufTensors, dequantise


def f16(data: bytes) -> float:
    return float(struct.unpack("<e", data)[0])


def q4_0(block: bytes) -> list[float]:
    levels = [byte & 15 for byte in block[2:]] + [byte >> 4 for byte in block[2:]]
    return [(level - 8) * f16(block[:2]) for level in levels]


def q4_1(block: bytes) -> list[float]:
    levels = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
    return [level * f16(block[:2]) + f16(block[2:4]) for level in levels]


def q8_0(block: bytes) -> list[float]:
    return [level * f16(block[:2]) for level in struct.unpack("<32b", block[2:])]


def bf16(data: bytes) -> list[float]:
    return [struct.unpack("<f", b"\0\0" + data)[0]]


FORMULAS: dict[GgufType, Callable[[bytes], list[float]]] = {
    GgufType.F32: lambda data: [struct.unpack("<f", data)[0]],
    GgufType.F16: lambda data: [f16(data)],
    GgufType.BF16: bf16,
    GgufType.Q4_0: q4_0,
    GgufType.Q4_1: q4_1,
    GgufType.Q8_0: q8_0,
}
# Largest error of a value within a block of standard normal ones: half a step of the format.
STEPS = {GgufType.Q4_0: 0.6, GgufType.Q4_1: 0.25, GgufType.Q8_0: 0.02, GgufType.F16: 2e-3, GgufType.BF16: 0.04}


@pytest.mark.parametrize("kind", GgufType)
def test_blocks_follow_the_formula(kind: GgufType) -> None:
    values = np.random.default_rng(kind.value).standard_normal(32 * 63).astype(np.float32)
    data = quantise(values, kind)
    size = kind.block[1]
    expected = [value for at in range(0, len(data), size) for value in FORMULAS[kind](data[at : at + size])]
    result = dequantise(np.frombuffer(data, np.uint8), kind)
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=1e-7)
    assert np.abs(result.numpy() - values).max() <= STEPS.get(kind, 0)


TOKENS = [(index * 37) % VOCAB_SIZE for index in range(50)]


@pytest.mark.parametrize(("kind", "limit"), [(GgufType.F32, 1e-5), (GgufType.BF16, 0.05), (GgufType.Q8_0, 0.05)])
def test_a_gguf_model_computes_what_the_original_does(
    kind: GgufType, limit: float, tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(write_gguf(METADATA, gguf_tensors(tiny_model, kind)))
    target = sequence(TOKENS, 0, 4)
    expected = logits_of(load(tiny_model), target, [50])
    assert relative_error(logits_of(load(path), target, [50]), expected) < limit


def test_rope_factors_of_the_file_divide_the_frequencies(tiny_model: Path, tmp_path: Path) -> None:
    """Factors of 2 throughout are what linear scaling by 2 is."""
    tensors = gguf_tensors(tiny_model, GgufType.F32)
    linear = METADATA | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    files = {
        "plain": write_gguf(METADATA, tensors),
        "linear": write_gguf(linear, tensors),
        "factors": write_gguf(METADATA, tensors | {"rope_freqs.weight": (GgufType.F32, np.full(8, 2.0))}),
    }
    logits = {}
    for name, data in files.items():
        (tmp_path / f"{name}.gguf").write_bytes(data)
        logits[name] = logits_of(load(tmp_path / f"{name}.gguf"), sequence(TOKENS, 0, 4), [50])
    torch.testing.assert_close(logits["factors"], logits["linear"])
    assert relative_error(logits["plain"], logits["linear"]) > 0.01


def test_a_file_cut_short_is_refused_by_its_name(tiny_model: Path, tmp_path: Path) -> None:
    data = write_gguf(METADATA, gguf_tensors(tiny_model, GgufType.Q8_0))
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 10, 100, 1000, 5000, len(data) // 2, len(data) - 64):
        path.write_bytes(data[:length])
        with pytest.raises(InvalidArgumentError, match=r"cut\.gguf: model file"):
            load(path)


def test_a_file_that_is_closed_while_an_error_holds_some_of_it_stays_readable(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(write_gguf(METADATA, gguf_tensors(tiny_model, GgufType.Q8_0)))
    tensors = GgufTensors(path, load_config_of(ModelFiles("tiny", "gguf", path)))
    held = tensors.load_blocks("model.embed_tokens.weight")
    before = held.copy()
    tensors.close()
    assert np.array_equal(held, before)
