"""Writes small GGUF files, byte by byte from the format's description."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pageferry.core.gguf import GgufType

ALIGNMENT = 32
# Where the scales of types that are not written from numbers lie in a block, as (first byte, last byte + 1).
_SCALES = {
    GgufType.Q5_0: (0, 2),
    GgufType.Q5_1: (0, 4),
    GgufType.Q2_K: (80, 84),
    GgufType.Q3_K: (108, 110),
    GgufType.Q4_K: (0, 4),
    GgufType.Q5_K: (0, 4),
    GgufType.Q6_K: (208, 210),
    GgufType.IQ4_NL: (0, 2),
    GgufType.IQ4_XS: (0, 2),
}


@dataclass(frozen=True)
class Blocks:
    """A tensor as it is in the file."""

    shape: tuple[int, ...]
    data: bytes


def random_blocks(kind: GgufType, shape: tuple[int, ...], scale: float, seed: int = 0) -> Blocks:
    """Blocks of any levels, with scales of up to `scale` either way."""
    random = np.random.default_rng((seed, kind.value))
    values, num_bytes = kind.block
    blocks = random.integers(0, 256, (int(np.prod(shape)) // values, num_bytes), dtype=np.uint8)
    start, end = _SCALES[kind]
    scales = random.uniform(-scale, scale, (len(blocks), (end - start) // 2)).astype(np.float16)
    blocks[:, start:end] = scales.view(np.uint8)
    return Blocks(shape, blocks.tobytes())


def write_gguf(
    metadata: Mapping[str, object], tensors: Mapping[str, tuple[GgufType, np.ndarray | Blocks]], *, version: int = 3
) -> bytes:
    """The file's bytes; whole numbers become INT32, lists get their first item's type, arrays are quantised here."""
    header = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, data = _value(value)
        header += _string(key) + struct.pack("<I", kind) + data
    data = b""
    for name, (kind, values) in tensors.items():
        shape = values.shape[::-1]
        header += _string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        header += struct.pack("<IQ", kind.value, len(data))
        data += _padded(values.data if isinstance(values, Blocks) else quantise(values, kind))
    return _padded(header) + data


def quantise(values: np.ndarray, kind: GgufType) -> bytes:
    flat = values.astype(np.float32).reshape(-1)
    if kind is GgufType.F32:
        return flat.tobytes()
    if kind is GgufType.F16:
        return flat.astype(np.float16).tobytes()
    if kind is GgufType.BF16:
        return (flat.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return b"".join(_block(block, kind) for block in flat.reshape(-1, 32))


def _block(values: np.ndarray, kind: GgufType) -> bytes:
    if kind is GgufType.Q8_0:
        scale = np.float16(np.abs(values).max() / 127)
        return scale.tobytes() + np.round(values / np.float32(scale or 1)).clip(-127, 127).astype(np.int8).tobytes()
    if kind is GgufType.Q4_1:
        low = np.float16(values.min())
        scale = np.float16((values.max() - values.min()) / 15)
        levels = np.round((values - np.float32(low)) / np.float32(scale or 1)).clip(0, 15).astype(np.uint8)
        head = scale.tobytes() + low.tobytes()
    else:
        scale = np.float16(np.abs(values).max() / 8)
        levels = (np.round(values / np.float32(scale or 1)) + 8).clip(0, 15).astype(np.uint8)
        head = scale.tobytes()
    return head + (levels[:16] | (levels[16:] << 4)).astype(np.uint8).tobytes()


def _value(value: object) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 5, struct.pack("<i", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _string(value)
    assert isinstance(value, list)
    items = [_value(item) for item in value]
    return 9, struct.pack("<IQ", items[0][0], len(items)) + b"".join(data for _, data in items)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)
