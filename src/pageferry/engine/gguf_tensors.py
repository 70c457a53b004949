"""Tensors of a GGUF file: dequantised, under Hugging Face names and in its order of rows.

Block formats: github.com/ggml-org/ggml, src/ggml-common.h and ggml-quants.c. A block of 32 values is
Q4_0: fp16 d, 16 bytes q;         value = (q - 8) d
Q4_1: fp16 d, fp16 m, 16 bytes q; value = q d + m
Q8_0: fp16 d, 32 int8 q;          value = q d
where byte i of a 4-bit block holds value i in its low half and value i + 16 in its high half.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.gguf import GgufTensor, GgufType
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import map_gguf
from pageferry.engine.tensors import FINGERPRINT_BYTES

Rows = TypeVar("Rows", Tensor, NDArray[np.uint8])
ROPE_FACTORS = "rope_freqs.weight"  # its own name: Hugging Face files have no such tensor
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufTensors:
    """`TensorFiles` of a GGUF file; tensors with names unknown here keep them."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._buffer, file = map_gguf(path)
        self._config = config
        self._tensors = {_hf_name(name): tensor for name, tensor in file.tensors.items()}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def load(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return self._ordered(name, dequantise(self._bytes(tensor), tensor.type).view(tensor.shape))

    def type_of(self, name: str) -> GgufType:
        return self._tensors[name].type

    def num_bytes(self, name: str) -> int:
        """As stored."""
        return self._tensors[name].num_bytes

    def load_blocks(self, name: str) -> NDArray[np.uint8]:
        """A matrix as stored, in rows of blocks: [rows, blocks of a row, bytes of a block].

        It may be the file itself: copy what is to be kept.
        """
        tensor = self._tensors[name]
        values, num_bytes = tensor.type.block
        rows, columns = tensor.shape
        return self._ordered(name, self._bytes(tensor).reshape(rows, columns // values, num_bytes))

    def _ordered(self, name: str, rows: Rows) -> Rows:
        # llama.cpp's converter reorders the query and key rows of this architecture for its own rotary form.
        if self._config.architecture == "llama":
            if ".q_proj." in name:
                return _unpermute(rows, self._config.num_heads)
            if ".k_proj." in name:
                return _unpermute(rows, self._config.num_kv_heads)
        return rows

    def first_bytes(self, name: str) -> bytes:
        return self._bytes(self._tensors[name])[:FINGERPRINT_BYTES].tobytes()

    def close(self) -> None:
        with suppress(BufferError):  # an error's traceback holds some of it, and then unmaps it
            self._buffer.close()

    def _bytes(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """In the file."""
        return np.frombuffer(self._buffer, np.uint8, tensor.num_bytes, tensor.offset)


def dequantise(data: NDArray[np.uint8], kind: GgufType) -> Tensor:
    """Fp32 values, flat, of whole blocks."""
    if kind is GgufType.F32:
        return torch.from_numpy(data.view(np.float32).copy())
    if kind is GgufType.F16:
        return torch.from_numpy(data.view(np.float16).astype(np.float32))
    if kind is GgufType.BF16:
        return torch.from_numpy((data.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
    blocks = torch.from_numpy(data.reshape(-1, kind.block[1]).copy())
    scales = blocks[:, :2].contiguous().view(torch.float16).float()
    if kind is GgufType.Q8_0:
        return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(scales).view(-1)
    packed = blocks[:, 4 if kind is GgufType.Q4_1 else 2 :]
    values = torch.cat((packed & 15, packed >> 4), dim=1).float()
    if kind is GgufType.Q4_1:
        return values.mul_(scales).add_(blocks[:, 2:4].contiguous().view(torch.float16).float()).view(-1)
    return values.sub_(8).mul_(scales).view(-1)


def _unpermute(rows: Rows, num_heads: int) -> Rows:
    """Rows of each head from pairs (i, i + D/2) interleaved to halves; weights [H D, N] and biases [H D]."""
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _hf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{suffix}"
    return f"{_TOP[stem]}.{suffix}" if stem in _TOP else name
