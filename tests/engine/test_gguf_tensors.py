"""Dequantisation block by block against the formula, and a GGUF model that computes what its original does."""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from engines import load, logits_of, relative_error, runner_of, sequence
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from gguf_writer import quantise, random_blocks, write_gguf
from tiny_gguf import METADATA, gguf_tensors
from tiny_model import VOCAB_SIZE, TinyShape, write_tiny_model

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.gguf import GgufType
from pageferry.core.model_files import ModelFiles, load_config_of
from pageferry.engine.gguf_blocks import as_multiplied, dequantise
from pageferry.engine.gguf_tensors import GgufTensors
from pageferry.engine.model import Model
from pageferry.engine.native import NativeModel
from pageferry.kernels.cpu_library import load_kernels


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


def fifth_bits(data: bytes) -> list[int]:
    return [int.from_bytes(data, "little") >> i & 1 for i in range(32)]


def q5_0(block: bytes) -> list[float]:
    levels = [byte & 15 for byte in block[6:]] + [byte >> 4 for byte in block[6:]]
    return [(low + 16 * high - 16) * f16(block[:2]) for low, high in zip(levels, fifth_bits(block[2:6]), strict=True)]


def q5_1(block: bytes) -> list[float]:
    levels = [byte & 15 for byte in block[8:]] + [byte >> 4 for byte in block[8:]]
    d, m = f16(block[:2]), f16(block[2:4])
    return [(low + 16 * high) * d + m for low, high in zip(levels, fifth_bits(block[4:8]), strict=True)]


def q2_k(block: bytes) -> list[float]:
    scales, levels, d, m = block[:16], block[16:80], f16(block[80:82]), f16(block[82:])
    found = []
    for i in range(256):
        half, place = divmod(i, 128)
        level = levels[32 * half + place % 32] >> 2 * (place // 32) & 3
        found.append(d * (scales[i // 16] & 15) * level - m * (scales[i // 16] >> 4))
    return found


def q3_k(block: bytes) -> list[float]:
    high, levels, packed, d = block[:32], block[32:96], block[96:108], f16(block[108:])
    scales = [(packed[i % 8] >> 4 * (i // 8) & 15) | (packed[8 + i % 4] >> 2 * (i // 4) & 3) << 4 for i in range(16)]
    found = []
    for i in range(256):
        half, place = divmod(i, 128)
        level = levels[32 * half + place % 32] >> 2 * (place // 32) & 3
        is_high = high[i % 32] >> (4 * half + place // 32) & 1
        found.append(d * (scales[i // 16] - 32) * (level - (0 if is_high else 4)))
    return found


def scales_and_minima(packed: bytes) -> list[tuple[int, int]]:
    """Of Q4_K and Q5_K: six bits each."""
    low = [(packed[j] & 63, packed[j + 4] & 63) for j in range(4)]
    high = [
        ((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4, (packed[j + 4] >> 4) | (packed[j] >> 6) << 4)
        for j in range(4, 8)
    ]
    return low + high


def q4_k(block: bytes, fifths: bytes = bytes(32)) -> list[float]:
    d, m, pairs, levels = f16(block[:2]), f16(block[2:4]), scales_and_minima(block[4:16]), block[-128:]
    found = []
    for i in range(256):
        scale, minimum = pairs[i // 32]
        level = levels[32 * (i // 64) + i % 32] >> 4 * (i // 32 % 2) & 15
        found.append(d * scale * (level + 16 * (fifths[i % 32] >> i // 32 & 1)) - m * minimum)
    return found


def q5_k(block: bytes) -> list[float]:
    return q4_k(block, block[16:48])


def q6_k(block: bytes) -> list[float]:
    low, high, scales, d = block[:128], block[128:192], struct.unpack("<16b", block[192:208]), f16(block[208:])
    found = []
    for i in range(256):
        half, place = divmod(i, 128)
        level = low[64 * half + place % 64] >> 4 * (place // 64) & 15
        level |= (high[32 * half + place % 32] >> 2 * (place // 32) & 3) << 4
        found.append(d * scales[i // 16] * (level - 32))
    return found


IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_nl(block: bytes) -> list[float]:
    levels = [byte & 15 for byte in block[2:]] + [byte >> 4 for byte in block[2:]]
    return [IQ4[level] * f16(block[:2]) for level in levels]


def iq4_xs(block: bytes) -> list[float]:
    d, high, low, levels = f16(block[:2]), struct.unpack("<H", block[2:4])[0], block[4:8], block[8:]
    found = []
    for i in range(256):
        group = i // 32
        scale = (low[group // 2] >> 4 * (group % 2) & 15) | (high >> 2 * group & 3) << 4
        found.append(d * (scale - 32) * IQ4[levels[16 * group + i % 16] >> 4 * (i // 16 % 2) & 15])
    return found


FORMULAS: dict[GgufType, Callable[[bytes], list[float]]] = {
    GgufType.F32: lambda data: [struct.unpack("<f", data)[0]],
    GgufType.F16: lambda data: [f16(data)],
    GgufType.BF16: bf16,
    GgufType.Q4_0: q4_0,
    GgufType.Q4_1: q4_1,
    GgufType.Q8_0: q8_0,
    GgufType.Q5_0: q5_0,
    GgufType.Q5_1: q5_1,
    GgufType.Q2_K: q2_k,
    GgufType.Q3_K: q3_k,
    GgufType.Q4_K: q4_k,
    GgufType.Q5_K: q5_k,
    GgufType.Q6_K: q6_k,
    GgufType.IQ4_NL: iq4_nl,
    GgufType.IQ4_XS: iq4_xs,
}
# Largest error of a value within a block of standard normal ones: half a step of the format.
STEPS = {GgufType.Q4_0: 0.6, GgufType.Q4_1: 0.25, GgufType.Q8_0: 0.02, GgufType.F16: 2e-3, GgufType.BF16: 0.04}


def follows(data: bytes, kind: GgufType, formula: GgufType) -> list[float]:
    size = kind.block[1]
    return [value for at in range(0, len(data), size) for value in FORMULAS[formula](data[at : at + size])]


@pytest.mark.parametrize("kind", [GgufType.F32, *STEPS])
def test_blocks_of_numbers_follow_the_formula(kind: GgufType) -> None:
    values = np.random.default_rng(kind.value).standard_normal(32 * 63).astype(np.float32)
    data = quantise(values, kind)
    result = dequantise(np.frombuffer(data, np.uint8), kind)
    torch.testing.assert_close(result, torch.tensor(follows(data, kind, kind)), rtol=1e-6, atol=1e-7)
    assert np.abs(result.numpy() - values).max() <= STEPS.get(kind, 0)


@pytest.mark.parametrize("kind", [kind for kind in GgufType if kind not in (GgufType.F32, *STEPS)])
def test_blocks_of_any_levels_follow_the_formula(kind: GgufType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pageferry.engine.gguf_blocks._CHUNK_BLOCKS", 2)  # in several chunks, the last one odd
    data = random_blocks(kind, (7, 256), 0.5).data
    result = dequantise(np.frombuffer(data, np.uint8), kind)
    torch.testing.assert_close(result, torch.tensor(follows(data, kind, kind)), rtol=1e-5, atol=1e-6)
    halved = dequantise(np.frombuffer(data, np.uint8), kind, torch.bfloat16)
    assert torch.equal(halved, result.bfloat16())


@pytest.mark.parametrize("kind", [GgufType.Q5_0, GgufType.IQ4_NL])
def test_blocks_without_kernels_become_ones_of_the_same_numbers(kind: GgufType) -> None:
    data = np.frombuffer(random_blocks(kind, (6, 64), 0.5).data, np.uint8)
    blocks = as_multiplied(data.reshape(6, 2, -1), kind)
    target = kind.multiplied_as
    assert target is GgufType.Q8_0
    assert blocks.shape == (6, 2, target.block[1])
    assert torch.equal(dequantise(blocks.reshape(-1), target), dequantise(data, kind))


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


WIDE = TinyShape(hidden_size=256, num_hidden_layers=2, intermediate_size=256, head_dim=64)
WIDE_METADATA = METADATA | {"llama.embedding_length": 256, "llama.block_count": 2, "llama.feed_forward_length": 256}
Q4_K_M = {"attn_v": GgufType.Q6_K, "ffn_down": GgufType.Q6_K, "token_embd": GgufType.Q6_K}


def mixed_files(directory: Path, types: Mapping[str, GgufType], other: GgufType, scale: float) -> tuple[Path, Path]:
    """A file of random blocks, and one of the numbers that the package `gguf` makes of them."""
    write_tiny_model(directory / "plain", WIDE)
    stored, plain = {}, {}
    for name, (kind, values) in gguf_tensors(directory / "plain", GgufType.F32).items():
        stored[name] = plain[name] = (kind, values)
        if values.ndim == 2:
            chosen = types.get(name.split(".")[-2], other)
            blocks = random_blocks(chosen, values.shape, scale, seed=len(stored))
            data = np.frombuffer(blocks.data, np.uint8).reshape(len(values), -1)
            numbers = dequantize(data, GGMLQuantizationType(chosen.value))
            stored[name], plain[name] = (chosen, blocks), (GgufType.F32, numbers)
    (directory / "stored.gguf").write_bytes(write_gguf(WIDE_METADATA, stored))
    (directory / "plain.gguf").write_bytes(write_gguf(WIDE_METADATA, plain))
    return directory / "stored.gguf", directory / "plain.gguf"


def test_a_file_of_mixed_k_quants_computes_what_its_numbers_do(tmp_path: Path) -> None:
    stored, plain = mixed_files(tmp_path, Q4_K_M, GgufType.Q4_K, 2e-4)
    target = sequence(TOKENS, 0, 4)
    expected = logits_of(load(plain), target, [50])
    assert torch.equal(logits_of(load(stored), target, [50]), expected)
    assert relative_error(logits_of(load(stored, compute_dtype="auto"), target, [50]), expected) < 0.05


@pytest.mark.skipif(load_kernels(1) is None, reason="the kernels are not built")
def test_types_that_the_kernels_can_hold_are_multiplied_by_them(tmp_path: Path) -> None:
    stored, plain = mixed_files(tmp_path, {"attn_v": GgufType.IQ4_NL}, GgufType.Q5_0, 0.01)
    engine = load(stored, compute_dtype="auto", kernels="cpu")
    assert isinstance(runner_of(engine).model, NativeModel)
    target = sequence(TOKENS, 0, 4)
    assert relative_error(logits_of(engine, target, [50]), logits_of(load(plain), target, [50])) < 0.03
    assert engine.memory_report["weights"] / stored.stat().st_size == pytest.approx(34 / 22, rel=0.1)


@pytest.mark.skipif(load_kernels(1) is None, reason="the kernels are not built")
@pytest.mark.parametrize("other", ["token_embd", "attn_v"])
def test_matrices_that_the_kernels_can_not_hold_are_left_to_torch(other: str, tmp_path: Path) -> None:
    stored, plain = mixed_files(tmp_path, {other: GgufType.Q6_K}, GgufType.Q5_0, 0.01 if other == "attn_v" else 2e-4)
    engine = load(stored, compute_dtype="auto", kernels="cpu")
    model = runner_of(engine).model
    assert isinstance(model, Model)
    target = sequence(TOKENS, 0, 4)
    assert relative_error(logits_of(engine, target, [20, 50]), logits_of(load(plain), target, [50])) < 0.03
    dense = load(stored, compute_dtype="bf16").memory_report["weights"]
    assert engine.memory_report["weights"] < 0.8 * dense


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
