"""How full and how busy a GPU is, as its driver's library (NVML) tells, without loading torch."""

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pageferry.runtime.logs import log

_LIBRARY = "libnvidia-ml.so.1"
_OK = 0


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class GpuUse:
    """One GPU's; what the driver does not tell is left out."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def memory(self) -> list[tuple[Sequence[str], float]]:
        """Bytes, by kind."""
        memory = _Memory()
        if self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(memory)) != _OK:
            return []
        return [(("used",), memory.used), (("total",), memory.total)]

    def utilisation(self) -> list[tuple[Sequence[str], float]]:
        """A share; of a part of a GPU (MIG) drivers tell none."""
        share = _Utilisation()
        if self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(share)) != _OK:
            return []
        return [((), share.gpu / 100)]


def open_gpu(
    device: str,
    environment: Mapping[str, str] = os.environ,
    load: Callable[[str], Any] = ctypes.CDLL,
) -> GpuUse | None:
    """Of `cuda:N`, among those that the process may see; None, and a line of log, where the driver can't be asked."""
    if not device.startswith("cuda:"):
        return None
    index = int(device.removeprefix("cuda:"))
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[index] if index < len(visible) else str(index)
    try:
        library = load(_LIBRARY)
        handle = ctypes.c_void_p()
        status = library.nvmlInit_v2()
        if status == _OK and name.isdecimal():
            status = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        elif status == _OK:
            status = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    except (OSError, AttributeError) as error:
        log("gpu_use_unknown", level="warning", device=device, reason=str(error))
        return None
    if status != _OK:
        log("gpu_use_unknown", level="warning", device=device, reason=f"NVML status {status}")
        return None
    return GpuUse(library, handle)
