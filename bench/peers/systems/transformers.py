"""`transformers serve` with its continuous batching."""

from collections.abc import Mapping

from peers.system import Place, Setting, System

NAME = "transformers"
_DOCS = "https://huggingface.co/docs/transformers/v5.17.0/continuous_batching"
_BLOCK = 32  # tokens, its default


def command(place: Place) -> list[str]:
    blocks = place.streams * (-(-place.max_tokens // _BLOCK) + 1)
    return [
        *(str(place.environments.directory(NAME) / "bin" / "transformers"), "serve", str(place.weights.hf_endless)),
        *("--host", "127.0.0.1", "--port", str(place.port), "--device", "cpu", "--dtype", "bfloat16"),
        *("--continuous-batching", "--attn-implementation", "sdpa"),
        *("--cb-num-blocks", str(blocks), "--cb-max-batch-tokens", "256", "--cb-block-size", str(_BLOCK)),
    ]


def variables(place: Place) -> Mapping[str, str]:
    return {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(place.cores)}


SYSTEMS = (
    System(
        NAME,
        "transformers serve",
        command,
        environment=NAME,
        module="transformers",
        packages=("transformers", "torch"),
        variables=variables,
        settings=(
            Setting("`--continuous-batching`, bf16, sdpa", "serves several requests at once", _DOCS),
            Setting("`--cb-num-blocks` for the load", "takes most of the memory otherwise", _DOCS),
            Setting("`--cb-max-batch-tokens 256`", "as for the others", "measured here"),
            Setting("a copy of the model without an end token", "it has no `ignore_eos`", "bench/peers"),
        ),
        model=lambda place: str(place.weights.hf_endless),
    ),
)
