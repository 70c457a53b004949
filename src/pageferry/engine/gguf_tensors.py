"""Tensors of a GGUF file: dequantised, under Hugging Face names and in its order of rows."""

from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.gguf import GgufTensor, GgufType
from pageferry.core.gguf_names import hf_name
from pageferry.core.model_config import ModelConfig
from pageferry.core.model_files import map_gguf
from pageferry.engine.gguf_blocks import as_multiplied, dequantise
from pageferry.engine.tensors import FINGERPRINT_BYTES

Rows = TypeVar("Rows", Tensor, NDArray[np.uint8])
ROPE_FACTORS = "rope_freqs.weight"  # its own name: Hugging Face files have no such tensor


class GgufTensors:
    """`TensorFiles` of a GGUF file; tensors with names unknown here keep them."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._buffer, file = map_gguf(path)
        self._config = config
        self._tensors = {hf_name(name): tensor for name, tensor in file.tensors.items()}
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._tensors[name]
        values = dequantise(self._bytes(tensor), tensor.type, dtype or torch.float32)
        return self._ordered(name, values.view(tensor.shape))

    def multiplied_as(self, name: str) -> GgufType | None:
        """The type of `load_blocks`; None where the tensor has to be dequantised."""
        return self._tensors[name].type.multiplied_as

    def multiplied_bytes(self, name: str) -> int:
        """What it takes as that, or as stored."""
        tensor = self._tensors[name]
        return tensor.type_bytes(tensor.type.multiplied_as or tensor.type)

    def load_blocks(self, name: str) -> NDArray[np.uint8]:
        """A matrix as the kernels multiply it, in rows of blocks: [rows, blocks of a row, bytes of a block].

        It may be the file itself: copy what is to be kept.
        """
        tensor = self._tensors[name]
        values, num_bytes = tensor.type.block
        rows, columns = tensor.shape
        blocks = self._bytes(tensor).reshape(rows, columns // values, num_bytes)
        return self._ordered(name, as_multiplied(blocks, tensor.type))

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


def _unpermute(rows: Rows, num_heads: int) -> Rows:
    """Rows of each head from pairs (i, i + D/2) interleaved to halves; weights [H D, N] and biases [H D]."""
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
