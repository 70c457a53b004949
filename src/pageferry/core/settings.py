"""Settings before they are configuration: values as they were given, each with its source, and their conversion."""

import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pageferry.core.errors import FieldViolation, InvalidArgumentError, invalid, shown

ENVIRONMENT_PREFIX = "PAGEFERRY_"
_MAX_BITS = 63
_MAX_CHARACTERS = 4096  # of one text: more than 4300 digits are no number that Python reads
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
_TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list of texts",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One given value and where it came from; keyed "section.field" everywhere."""

    value: object
    source: str


def read_file(path: Path) -> dict[str, Setting]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"configuration file {path} cannot be read: {error}", reason="BAD_CONFIG") from None
    settings: dict[str, Setting] = {}
    for section, table in document.items():
        if not isinstance(table, dict):
            message = f"{path}: {section} stands outside a section; write [section] first"
            raise InvalidArgumentError(message, reason="BAD_CONFIG")
        settings.update({f"{section}.{name}": Setting(value, str(path)) for name, value in table.items()})
    return settings


def read_environment(environment: Mapping[str, str]) -> dict[str, Setting]:
    """The settings named PAGEFERRY_SECTION_FIELD."""
    settings: dict[str, Setting] = {}
    for variable, text in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("_", ".", 1)
            settings[key] = Setting(text, f"environment variable {variable}")
    return settings


def parse_overrides(texts: Iterable[str]) -> dict[str, object]:
    """Of the option `--set SECTION.FIELD=VALUE`, however often it was given."""
    overrides: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or "." not in name:
            raise invalid("--set", text, "must be SECTION.FIELD=VALUE")
        overrides[name] = value
    return overrides


def convert(key: str, setting: Setting, default: object) -> object:
    """The setting as its field's type, which is the type of the field's default."""
    value = setting.value
    if isinstance(value, str) and not isinstance(default, str):
        value = _parse(value, default)
    if isinstance(default, float) and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    texts = [item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, str)]
    if any(len(text) > _MAX_CHARACTERS for text in texts):
        raise InvalidArgumentError(
            f"{setting.source}: {key} has a text of more than {_MAX_CHARACTERS} characters",
            reason="BAD_CONFIG",
            violations=(FieldViolation(key, f"must have texts of at most {_MAX_CHARACTERS} characters"),),
        )
    if isinstance(default, tuple) and isinstance(value, list | tuple) and len(texts) == len(value):
        return tuple(value)
    is_huge = type(default) is int and type(value) is int and value.bit_length() > _MAX_BITS
    if type(value) is not type(default) or isinstance(value, tuple) or is_huge:
        expected = f"of at most {_MAX_BITS} bits" if is_huge else _TYPE_NAMES[type(default)]
        raise InvalidArgumentError(
            f"{setting.source}: {key} is {shown(setting.value)}, must be {expected}",
            reason="BAD_CONFIG",
            violations=(FieldViolation(key, f"must be {expected}"),),
        )
    return value


def _parse(text: str, default: object) -> object:
    """The text as the default's type, or the text itself where it can't be."""
    if isinstance(default, bool):
        return _BOOLEANS.get(text.lower(), text)
    if isinstance(default, tuple):
        return tuple(item.strip() for item in text.split(",") if item.strip())
    try:
        return int(text) if isinstance(default, int) else float(text)
    except ValueError:
        return text
