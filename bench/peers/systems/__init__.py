"""All systems, in the order in which they take turns."""

from peers.system import System
from peers.systems import llama_cpp, openvino, pageferry, transformers, vllm

SYSTEMS: dict[str, System] = {
    system.name: system for module in (pageferry, vllm, openvino, llama_cpp, transformers) for system in module.SYSTEMS
}
