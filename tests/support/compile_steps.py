"""Runs steps with Triton compiling for a GPU that need not be there, and starting nothing.

    python tests/support/compile_steps.py 90

Prints, as JSON, how many variants of each kernel a few steps have compiled, and which ones more steps have added.
"""

import importlib
import json
import pkgutil
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import triton
from device_steps import LLAMA, MAX_POSITIONS, RandomTensors, Steps, layout_of, logits, pools
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pageferry.engine.gpu_load import DeviceLoader
from pageferry.engine.rope import inverse_frequencies
from pageferry.kernels import gpu

MODEL = replace(LLAMA, num_heads=6, head_dim=64, qk_norm=True, attention_bias=True)
FORMATS = ("int8", "k=int8:channel,v=int4")
# As warm-up has them, and as they come: other lengths, other numbers of sequences, chunks beside single tokens.
FIRST: Steps = [[(0, 0, 7)], [(0, 7, 8)]]
MORE: Steps = [[(0, 0, 11)], [(1, 0, 5), (2, 0, 1)], [(0, 11, 12), (2, 1, 10)], [(1, 5, 6), (2, 10, 11)]]


class AbsentGpu:
    """What Triton asks of a driver before it starts a kernel."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_only(run: Any) -> Any:
    def instead(self: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> object:
        return run(self, *args, grid=grid, warmup=True, **options)

    return instead


def variants() -> set[tuple[str, str]]:
    modules = (importlib.import_module(f"{gpu.__name__}.{found.name}") for found in pkgutil.iter_modules(gpu.__path__))
    kernels = {value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}
    return {(k.fn.__name__, str(key)) for k in kernels for caches in k.device_caches.values() for key in caches[0]}


def main() -> None:
    triton.runtime.driver.set_active(AbsentGpu(int(sys.argv[1])))
    JITFunction.run = compile_only(JITFunction.run)
    torch.set_num_threads(1)
    added: set[tuple[str, str]] = set()
    for page_format in FORMATS:
        loader = DeviceLoader(MODEL, RandomTensors(MODEL), "bf16", torch.device("cpu"), 4)
        model = loader.load(inverse_frequencies(MODEL), MAX_POSITIONS, lambda _: None)
        _, pages = pools(layout_of(MODEL, page_format), "cpu")
        logits(model, pages, FIRST)
        first = variants()
        logits(model, pages, MORE)
        added |= variants() - first
    print(json.dumps({"compiled": Counter(name for name, _ in variants()), "added": sorted(added)}))


if __name__ == "__main__":
    main()
