"""A model's own defaults for sampling, which stand where a request says nothing."""

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.model_files import ModelFiles, read_json
from pageferry.core.sampling import SamplingParams

_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(files: ModelFiles) -> dict[str, float]:
    """From `generation_config.json` of a model's directory; a GGUF file has none.

    Raises InvalidArgumentError, naming the file, for values that no request could ask for either.
    """
    path = files.path / "generation_config.json"
    if files.kind != "hf" or not path.is_file():
        return {}
    config = read_json(path)
    defaults = {name: config[name] for name in _FIELDS if isinstance(config.get(name), int | float)}
    try:
        SamplingParams(**defaults)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error.message}", reason="MODEL_INVALID") from None
    return defaults
