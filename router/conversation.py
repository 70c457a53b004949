"""A conversation as the contract has it, rendered by the model's chat template."""

import json
import secrets
from collections.abc import Iterator
from typing import Any, NoReturn

from pageferry.core.errors import invalid, invalid_field
from pageferry.text.chat_template import ChatTemplate
from pageferry.v1.inference_pb2 import ChatMessage, ChatMessages

_OWN_VARIABLES = ("messages", "tools")  # that have fields of their own


async def rendered(chat: ChatMessages, template: ChatTemplate, *, normalise_system: bool) -> str:
    """The text; it ends with the last message where that is to be continued. Raises PageferryError."""
    if not chat.messages:
        raise invalid("chat.messages", [], "must hold at least one message")
    messages = [_message(message, f"chat.messages[{index}]") for index, message in enumerate(chat.messages)]
    if normalise_system:
        _normalise_system(messages)
    variables = _variables(chat)
    if variables.get("tools") and not template.takes_tools:
        raise invalid_field("chat.tools_json", "must be absent: the model's chat template takes no tools")
    if not chat.continue_last:
        return await template.render_async(messages, variables)
    mark = secrets.token_hex(16)
    messages[-1]["content"] += mark + " "
    whole = await template.render_async(messages, variables | {"add_generation_prompt": False})
    text, found, after = whole.partition(mark)
    if not found or messages[-1]["role"] != "assistant":
        description = "needs a last message that is the assistant's, and a template that shows it"
        raise invalid_field("chat.continue_last", description)
    return text if after.startswith(" ") else text.rstrip()  # a template that strips messages strips this one too


def num_bytes(chat: ChatMessages) -> int:
    """Of all texts that a template is given."""
    return sum(len(text.encode()) for text in _texts(chat))


def _texts(chat: ChatMessages) -> Iterator[str]:
    yield from (chat.tools_json, chat.template_variables_json)
    for message in chat.messages:
        yield from (message.content, message.name, message.tool_calls_json, message.tool_call_id)


def _message(message: ChatMessage, path: str) -> dict[str, Any]:
    if not message.role:
        raise invalid(f"{path}.role", "", "must not be empty")
    values: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        values["name"] = message.name
    if message.tool_call_id:
        values["tool_call_id"] = message.tool_call_id
    if message.tool_calls_json:
        field = f"{path}.tool_calls_json"
        values["tool_calls"] = [_call(call, field) for call in _objects(message.tool_calls_json, field)]
    return values


def _call(call: dict[str, Any], field: str) -> dict[str, Any]:
    """With its arguments as an object, which is what templates expect and OpenAI's form has as text."""
    function = call.get("function")
    if not isinstance(function, dict):
        raise invalid_field(field, "must have a function in each call")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = _parsed(arguments)
        except ValueError:
            return call
    return call | {"function": function | {"arguments": arguments}}


def _variables(chat: ChatMessages) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    if chat.template_variables_json:
        field = "chat.template_variables_json"
        value = _json(chat.template_variables_json, field)
        if not isinstance(value, dict):
            raise invalid_field(field, "must be a JSON object")
        if own := [name for name in _OWN_VARIABLES if name in value]:
            raise invalid_field(field, f"must not set {own[0]}, which has a field of its own")
        variables = value
    if chat.tools_json:
        variables = variables | {"tools": _objects(chat.tools_json, "chat.tools_json")}
    return variables


def _objects(text: str, field: str) -> list[dict[str, Any]]:
    value = _json(text, field)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise invalid_field(field, "must be a JSON list of objects")
    return value


def _json(text: str, field: str) -> Any:
    try:
        return _parsed(text)
    except ValueError:
        raise invalid_field(field, "must be JSON without halves of surrogate pairs or deep nesting") from None


def _parsed(text: str) -> Any:
    """Raises ValueError, also for what could not be written into a prompt."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("too deep") from error
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _normalise_system(messages: list[dict[str, Any]]) -> None:
    """Even out system prompts that differ in outer whitespace or line ends only, so that they share pages."""
    for message in messages:
        if message["role"] == "system":
            message["content"] = message["content"].replace("\r\n", "\n").replace("\r", "\n").strip()
