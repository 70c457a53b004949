"""OpenVINO GenAI's continuous batching, behind the small server beside this package."""

from pathlib import Path

from peers.system import Place, Setting, System
from peers.weights import MODEL

NAME = "openvino"
_SERVER = Path(__file__).parents[1] / "openvino_server.py"
_DOCS = "https://docs.openvino.ai/2025/"
_PRECISION = _DOCS + "openvino-workflow/running-inference/optimize-inference/precision-control.html"
_WEIGHTS = _DOCS + "openvino-workflow/model-optimization-guide/weight-compression.html"
_SCHEDULER = _DOCS + "api/genai_api/_autosummary/openvino_genai.SchedulerConfig.html"


def command(place: Place) -> list[str]:
    return [
        *(str(place.environments.python(NAME)), str(_SERVER), "--model", str(place.weights.ov_int8)),
        *("--tokenizer", str(place.weights.hf / "tokenizer.json"), "--name", MODEL),
        *("--port", str(place.port), "--threads", str(place.cores)),
        *("--precision", "bf16", "--kv-precision", "u8", "--cache-gb", "1"),
        *("--max-num-batched-tokens", "256", "--max-num-seqs", "32"),
    ]


SYSTEMS = (
    System(
        NAME,
        "OpenVINO GenAI",
        command,
        environment=NAME,
        module="openvino_genai",
        packages=("openvino", "openvino-genai", "optimum-intel", "nncf"),
        settings=(
            Setting("int8 weights, by optimum-intel and NNCF", "a quarter of the memory to read", _WEIGHTS),
            Setting("`INFERENCE_PRECISION_HINT` bf16", "the processor has bf16 instructions", _PRECISION),
            Setting("`KV_CACHE_PRECISION` u8", "half the memory to read", "measured here"),
            Setting(
                "`dynamic_split_fuse`, 256 tokens a step", "as by default: prompts in chunks beside decode", _SCHEDULER
            ),
            Setting("`enable_prefix_caching`", "off by default", _SCHEDULER),
            Setting(
                "server: pipeline in a process of its own, aiohttp and uvloop before it", "it has none", "bench/peers"
            ),
        ),
    ),
)
