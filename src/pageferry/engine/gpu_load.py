"""What `engine.device` names, and a model loaded onto it."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from pageferry.core.errors import InvalidArgumentError, invalid
from pageferry.core.layout import CacheLayout
from pageferry.core.memory import MemoryPlan, unpacked_bytes
from pageferry.core.model_config import ModelConfig
from pageferry.engine.gguf_tensors import GgufTensors
from pageferry.engine.gpu_pages import DevicePages
from pageferry.engine.pages import PageTensors
from pageferry.engine.quantised_weights import is_quantised, quantised_bytes
from pageferry.engine.runner import ForwardPass
from pageferry.engine.tensors import TensorFiles

_CAPABILITY = (8, 0)  # of the GPUs that the kernels are compiled for: bf16 products


def open_device(name: str) -> torch.device:
    """Raises InvalidArgumentError, which says what there is, unless a model can be loaded onto the GPU `name`."""
    device = torch.device(name)
    if find_spec("triton") is None:
        raise _unusable(name, "but Triton, which compiles its kernels, is not installed: install pageferry[gpu]")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type != "cuda" or (device.index or 0) >= count:
        there = "torch sees no GPU" if count == 0 else f"torch sees cuda:0 to cuda:{count - 1}"
        why = "" if torch.version.cuda else ", and this build of torch is for processors only"
        raise _unusable(name, f"but {there}{why}; cpu is always there")
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        have, need = (".".join(map(str, version)) for version in (capability, _CAPABILITY))
        raise _unusable(name, f"a {torch.cuda.get_device_name(device)} of compute capability {have}, must be {need}")
    return device


def _unusable(name: str, limit: str) -> InvalidArgumentError:
    return invalid("device", name, limit, reason="DEVICE_UNUSABLE")


@dataclass(frozen=True, slots=True)
class DeviceLoader:
    """A model on a device, computed as `engine.compute_dtype` says: `auto` is in a file's own groups, or in bf16."""

    config: ModelConfig
    tensors: TensorFiles
    compute_dtype: str
    device: torch.device
    max_num_seqs: int

    for_torch = False  # what batches are laid out for

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.compute_dtype == "fp32" else torch.bfloat16

    @property
    def grouped(self) -> GgufTensors | None:
        """The tensors, where they are multiplied as the file has them."""
        if self.compute_dtype != "auto" or not isinstance(self.tensors, GgufTensors):
            return None
        return self.tensors if is_quantised(self.tensors) else None

    @property
    def how(self) -> str:
        numbers = str(self.dtype).removeprefix("torch.") if self.grouped is None else "the file's groups"
        return f"{numbers} on {self.device}"

    @property
    def weight_bytes(self) -> int:
        if self.grouped is None:
            return unpacked_bytes(self.config, self.dtype.itemsize)
        return quantised_bytes(self.grouped)

    def available_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        return free

    def load(self, frequencies: Tensor, max_positions: int, progress: Callable[[str], None]) -> ForwardPass:
        # Here, since Triton need not be installed where no device is used.
        from pageferry.engine.gpu_model import DeviceModel
        from pageferry.engine.gpu_weights import load_dense, load_grouped

        if self.grouped is not None:
            weights = load_grouped(self.config, self.grouped, self.device, progress)
        else:
            weights = load_dense(self.config, self.tensors, self.dtype, self.device, progress)
        return DeviceModel(self.config, weights, self.dtype, frequencies, max_positions, self.max_num_seqs)

    def pages(self, layout: CacheLayout, memory: MemoryPlan) -> PageTensors:
        return DevicePages(layout, memory.num_pages, memory.num_tails, self.device)
