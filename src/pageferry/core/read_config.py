"""Configuration as it is given: from TOML, then environment, then flags."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from pageferry.core.config import Config
from pageferry.core.errors import FieldViolation, InvalidArgumentError
from pageferry.core.settings import Setting, convert, read_environment, read_file


def load_config(
    path: Path | None, environment: Mapping[str, str], overrides: Mapping[str, object], *, base: Config | None = None
) -> Config:
    """Read TOML `[section] field`, then `PAGEFERRY_SECTION_FIELD`, then overrides keyed "section.field".

    What none of them sets is as in `base`, or the field's default. A text is parsed where the field is none; lists are
    separated by commas. Raises InvalidArgumentError naming the file or variable, the field, the value and the limit.
    """
    settings = read_file(path) if path is not None else {}
    settings.update(read_environment(environment))
    settings.update({key: Setting(value, f"option {key}") for key, value in overrides.items()})
    defaults = Config().describe()
    values: dict[str, object] = {}
    for key, setting in settings.items():
        if key not in defaults:
            raise _unknown(key, setting)
        values[key] = convert(key, setting, defaults[key])
    config = base or Config()
    for section in fields(Config):
        prefix = section.name + "."
        changes = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
        try:
            config = replace(config, **{section.name: replace(getattr(config, section.name), **changes)})
        except InvalidArgumentError as error:
            raise _located(error, prefix, settings) from None
    return config


def _unknown(key: str, setting: Setting) -> InvalidArgumentError:
    section, _, name = key.partition(".")
    sections = [part.name for part in fields(Config)]
    if section in sections:
        names = [known.partition(".")[2] for known in Config().describe() if known.startswith(section + ".")]
        message = f"[{section}] has no field {name!r}, but {', '.join(names)}"
    else:
        message = f"there is no section {section!r}, but {', '.join(sections)}"
    return InvalidArgumentError(f"{setting.source}: {message}", reason="BAD_CONFIG")


def _located(error: InvalidArgumentError, prefix: str, settings: Mapping[str, Setting]) -> InvalidArgumentError:
    """The error of a section's check with the section before the field, and the source before all."""
    violations = tuple(FieldViolation(prefix + item.field, item.description) for item in error.violations)
    sources = [settings[item.field].source + ": " for item in violations if item.field in settings]
    message = "".join(sources[:1]) + prefix + error.message
    return InvalidArgumentError(message, reason="BAD_CONFIG", violations=violations)
