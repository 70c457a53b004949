"""The tensors of a model file, by their Hugging Face names: what is there, and each one's values and first bytes."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

# How much of each tensor's stored bytes tells two checkpoints of one shape apart.
FINGERPRINT_BYTES = 64 * 1024


class TensorFiles(Protocol):
    """An opened model: a context manager that holds the files only while weights are read."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor's values in `dtype`, else in fp32 or as stored (fp16, bf16); a copy."""
        ...

    def first_bytes(self, name: str) -> bytes:
        """The first `FINGERPRINT_BYTES` of the tensor as stored."""
        ...

    def close(self) -> None: ...
