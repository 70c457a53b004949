"""Tensors of a Hugging Face directory's safetensors files."""

from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pageferry.core.errors import InvalidArgumentError
from pageferry.engine.tensors import FINGERPRINT_BYTES

_DTYPES = ("F32", "F16", "BF16")


class HfTensors:
    """`TensorFiles` over one or several safetensors files."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self._stack = ExitStack()
        self._files: dict[str, tuple[safe_open, Path]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        try:
            for path in paths:
                self._open(path)
        except BaseException:
            self._stack.close()
            raise

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        file, path = self._files[name]
        try:
            tensor: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise _damaged(path, str(error)) from None
        return tensor if dtype is None else tensor.to(dtype)

    def first_bytes(self, name: str) -> bytes:
        flat = self.load(name).reshape(-1)
        return flat[: FINGERPRINT_BYTES // flat.element_size()].contiguous().view(torch.uint8).numpy().tobytes()

    def close(self) -> None:
        self._stack.close()

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            for name in file.offset_keys():
                described = file.get_slice(name)
                if described.get_dtype() not in _DTYPES:
                    supported = ", ".join(_DTYPES)
                    raise _damaged(path, f"tensor {name} has type {described.get_dtype()}, supported are {supported}")
                if name in self._files:
                    raise _damaged(path, f"tensor {name} is in {self._files[name][1].name} too")
                self._files[name] = (file, path)
                self.shapes[name] = tuple(described.get_shape())
        except (SafetensorError, OSError) as error:
            raise _damaged(path, f"is not a whole safetensors file: {error}") from None


def _damaged(path: Path, text: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{path}: {text}", reason="MODEL_FILE_INVALID")
