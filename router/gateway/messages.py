"""Messages and tools of a conversation, from OpenAI's form to the contract's."""

from collections.abc import Collection
from typing import Any

from pageferry.router.gateway.fields import Fields, as_text
from pageferry.router.gateway.strict_json import as_json, kind_of, refuse
from pageferry.v1 import inference_pb2 as pb

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text",)


def read_messages(fields: Fields) -> list[pb.ChatMessage]:
    """The field `messages`. Raises InvalidArgumentError."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        fields.refuse("messages", "must be a list of at least one message")
    return [read_message(message) for message in fields.parts("messages")]


def read_message(message: Fields, *, parts: Collection[str] = _TEXT_PARTS) -> pb.ChatMessage:
    """One message; `parts` are the types of part that hold text."""
    role = message.text("role")
    if role not in _ROLES:
        message.refuse("role", f"must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}")
    calls = message.parts("tool_calls") if role == "assistant" else []
    result = pb.ChatMessage(
        role="system" if role == "developer" else role,
        content="" if calls and message.get("content") is None else read_content(message, "content", parts),
        name=message.text("name") or "",
    )
    if calls:
        path = message.path("tool_calls")
        result.tool_calls_json = as_json([_call(call) for call in calls], path)
    if role == "tool":
        result.tool_call_id = message.text("tool_call_id") or ""
    message.finish("a message", neutral={"refusal": "", "audio": None, "function_call": None, "annotations": []})
    return result


def read_content(fields: Fields, name: str, parts: Collection[str] = _TEXT_PARTS) -> str:
    """A string, or a list of parts whose texts are joined."""
    content = fields.get(name)
    if not isinstance(content, list):
        return as_text(content, fields.path(name))
    return "".join(_text_part(part, f"{fields.path(name)}[{i}]", parts) for i, part in enumerate(content))


def _text_part(part: object, path: str, kinds: Collection[str]) -> str:
    if not isinstance(part, dict) or part.get("type") not in kinds:
        kind = next(iter(kinds))
        wanted = f'{{"type": "{kind}", "text": …}}; other parts are not supported'
        refuse(path, f"must be {wanted}", reason="UNSUPPORTED_FIELD")
    return as_text(part.get("text"), f"{path}.text")


def _call(call: Fields) -> dict[str, Any]:
    function = call.part("function")
    if call.text("type") not in (None, "function") or function is None:
        call.refuse("function", 'must be {"name": …, "arguments": …}, and type "function"')
    name, arguments = function.text("name"), function.text("arguments")
    if not name:
        function.refuse("name", "must not be empty")
    function.finish()
    call.get("index")  # of a streamed answer that is sent back
    identity = call.text("id")
    call.finish()
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}


def function_tools(fields: Fields, *, nested: bool) -> list[dict[str, Any]]:
    """The tools as /v1/chat/completions has them, for a template; empty where none may be called.

    In /v1/responses a function's fields are not `nested` in an object of their own.
    """
    tools = [
        _tool(tool, f"{fields.path('tools')}[{i}]", nested) for i, tool in enumerate(fields.list_of("tools", "objects"))
    ]
    choice = fields.get("tool_choice")
    if choice not in (None, "auto", "none"):
        fields.refuse("tool_choice", "must be auto or none: a call can't be forced", reason="UNSUPPORTED_FIELD")
    if tools and not fields.flag("parallel_tool_calls", absent=True):
        reason = "UNSUPPORTED_FIELD"
        fields.refuse("parallel_tool_calls", "must be true: the number of calls can't be limited", reason=reason)
    fields.get("parallel_tool_calls")
    return [] if choice == "none" else tools


def _tool(tool: object, path: str, nested: bool) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = kind_of(tool) if not isinstance(tool, dict) else "of another type"
        refuse(path, f'is {kind}, must have the type "function"', reason="UNSUPPORTED_FIELD")
    function = tool.get("function") if nested else {name: value for name, value in tool.items() if name != "type"}
    name_path = f"{path}.function" if nested else path
    if not isinstance(function, dict):
        refuse(name_path, f"is {kind_of(function)}, must be an object")
    if not as_text(function.get("name"), f"{name_path}.name"):
        refuse(f"{name_path}.name", "must not be empty")
    return {"type": "function", "function": function}


def set_tools(chat: pb.ChatMessages, tools: list[dict[str, Any]]) -> None:
    if tools:
        chat.tools_json = as_json(tools, "tools")
