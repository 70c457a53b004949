"""Blocks of a GGUF file's tensors as plain numbers, or as blocks that the kernels multiply.

Formats: github.com/ggml-org/ggml, src/ggml-common.h and ggml-quants.c; the package `gguf` reads all of them.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.gguf import GgufType

_CHUNK_BLOCKS = 1 << 15  # at once, so that what is made on the way is a few MB
# What the levels of IQ4_NL stand for, of a scale.
_IQ4_NL = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)


def dequantise(data: NDArray[np.uint8], kind: GgufType, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values, flat, of whole blocks."""
    num_values, num_bytes = kind.block
    values = torch.empty(len(data) // num_bytes * num_values, dtype=dtype)
    step = _CHUNK_BLOCKS * num_bytes * (256 // num_values)
    for start in range(0, len(data), step):
        part = _values(data[start : start + step], kind)
        first = start // num_bytes * num_values
        values[first : first + part.numel()] = part
    return values


def _values(data: NDArray[np.uint8], kind: GgufType) -> Tensor:
    if kind is GgufType.F32:
        return torch.from_numpy(data.copy()).view(torch.float32)
    if kind is GgufType.F16:
        return torch.from_numpy(data.copy()).view(torch.float16)
    if kind is GgufType.BF16:
        return torch.from_numpy(data.copy()).view(torch.bfloat16)
    # Here, since most files are multiplied as they are.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # a damaged file's scales may be no numbers
        return torch.from_numpy(dequantize(data[None], GGMLQuantizationType(kind.value))[0])


def as_multiplied(blocks: NDArray[np.uint8], kind: GgufType) -> NDArray[np.uint8]:
    """Blocks [..., bytes] of `kind.multiplied_as` that stand for the same numbers."""
    if kind is kind.multiplied_as:
        return blocks
    scales, packed = blocks[..., :2], blocks[..., -16:]
    levels = np.concatenate((packed & 15, packed >> 4), axis=-1)
    if kind is GgufType.IQ4_NL:
        return np.concatenate((scales, _IQ4_NL[levels].view(np.uint8)), axis=-1)
    assert kind is GgufType.Q5_0
    fifths = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    return np.concatenate((scales, (levels | fifths << 4) - np.uint8(16)), axis=-1)
