"""A model's chat template, rendered in a sandbox: it comes with the model and is no code of ours."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pageferry.core.errors import FailedPreconditionError, InvalidArgumentError

_HOW_TO_SET = (
    "put a chat template into tokenizer_config.json or chat_template.jinja of the model's directory "
    "(tokenizer.chat_template of a GGUF file), or send a prompt instead of a chat"
)


class ChatTemplate:
    """Renders conversations. A template that is missing or broken is an error of each chat, not of the start."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._template: Template | None = None
        self.problem = ""  # why there is none
        if source is None:
            self.problem = "the model has no chat template"
            return
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            self.problem = f"the model's chat template has an error in line {error.lineno}: {error.message}"

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """Raises FailedPreconditionError without a template, InvalidArgumentError where the template refuses."""
        if self._template is None:
            raise FailedPreconditionError(f"{self.problem}; {_HOW_TO_SET}", reason="NO_CHAT_TEMPLATE")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except TemplateError as error:
            message = f"chat does not suit the model's chat template: {error.message}"
            raise InvalidArgumentError(message, reason="CHAT_REFUSED") from None
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            # The template's own mistake; what it says could hold text of the request.
            message = f"the model's chat template fails on this chat ({type(error).__name__}); {_HOW_TO_SET}"
            raise FailedPreconditionError(message, reason="CHAT_TEMPLATE_FAILED") from None


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers sets it up, so that templates written for it render the same."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
