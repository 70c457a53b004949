"""Where a model's chat templates lie, and those of the user's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pageferry.core.errors import InvalidArgumentError

DEFAULT, TOOL_USE = "default", "tool_use"  # names of templates that are used, as transformers has them
_GGUF_KEY = "tokenizer.chat_template"


def read_template(path: Path) -> str:
    """A template's text. Raises InvalidArgumentError naming the file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"chat template {path} can't be read: {error}", reason="MODEL_INVALID") from None


def directory_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name: of tokenizer_config.json, which has a text or a list of named ones, and of files, which go before it."""
    value = config.get("chat_template")
    entries = value if isinstance(value, list) else [{"name": DEFAULT, "template": value}]
    pairs = [(entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, dict)]
    found = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    own_file = directory / "chat_template.jinja"
    if own_file.is_file():
        found = {DEFAULT: read_template(own_file)}
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = read_template(path)
    return found


def gguf_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    keys = {DEFAULT: _GGUF_KEY, TOOL_USE: f"{_GGUF_KEY}.{TOOL_USE}"}
    return {name: value for name, key in keys.items() if isinstance(value := metadata.get(key), str)}
