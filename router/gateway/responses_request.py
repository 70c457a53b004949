"""The body of POST /v1/responses, as far as it needs nothing that was kept from an earlier one."""

from typing import Any

from pageferry.router.gateway.chat_request import HARMLESS, NEUTRAL
from pageferry.router.gateway.fields import Fields, Reading, as_text
from pageferry.router.gateway.generation_fields import read_generation, read_top_logprobs
from pageferry.router.gateway.grammar_fields import name_grammar, read_format
from pageferry.router.gateway.messages import function_tools, read_content, read_message, set_tools
from pageferry.router.gateway.parsed import Parsed, read_streaming
from pageferry.router.gateway.strict_json import Json, as_json, decode_json, kind_of
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types

_LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text")
_HARMLESS = (*HARMLESS, "max_tool_calls")
_NEUTRAL = NEUTRAL | {
    **dict.fromkeys(("conversation", "previous_response_id", "prompt", "reasoning")),
    "background": False,
    "truncation": "disabled",
}
# What an answer repeats of its body.
_REPEATED = ("instructions", "max_output_tokens", "metadata", "temperature", "tool_choice", "tools", "top_p", "user")


def parse_responses(body: bytes, reading: Reading) -> Parsed:
    """Raises InvalidArgumentError."""
    values = decode_json(body)
    fields = Fields(values, reading)
    for name in ("max_tokens", "n", "best_of", "use_beam_search", "prompt_logprobs", "response_format"):
        if fields.get(name) is not None:
            fields.refuse(name, "is not a field of /v1/responses", reason="UNKNOWN_FIELD")
    request = read_generation(fields)
    fields.sets("input", "chat")
    fields.sets("max_output_tokens", "stop.max_tokens", "max_tokens")
    if (limit := fields.integer("max_output_tokens")) is not None:
        request.stop.max_tokens = limit
    if (instructions := fields.text("instructions")) is not None:
        request.chat.messages.add(role="system", content=instructions)
    _read_input(fields, request.chat)
    tools = function_tools(fields, nested=False)
    set_tools(request.chat, tools)
    _read_form(fields, request.sampling)
    _read_logprobs(fields, request.sampling)
    fields.get("metadata")  # the answer repeats it
    streaming = read_streaming(fields)
    fields.finish("/v1/responses", harmless=_HARMLESS, neutral=_NEUTRAL)
    details = {name: values[name] for name in _REPEATED if values.get(name) is not None}
    as_json(details, "body")  # or it could not be repeated
    return Parsed(request, streaming, calls=bool(tools), details=details)


def _read_input(fields: Fields, chat: pb.ChatMessages) -> None:
    given = fields.get("input")
    if isinstance(given, str):
        chat.messages.add(role="user", content=as_text(given, "input"))
        return
    if not isinstance(given, list) or not given:
        fields.refuse("input", "must be a string or a list of at least one item")
    for item in fields.parts("input"):
        match item.text("type"):
            case None | "message":
                _pass_over(item)
                chat.messages.append(read_message(item, parts=_TEXT_PARTS))
            case "function_call":
                _add_call(item, chat)
            case "function_call_output":
                message = pb.ChatMessage(role="tool", tool_call_id=item.text("call_id") or "")
                message.content = read_content(item, "output", _TEXT_PARTS)
                _finish(item)
                chat.messages.append(message)
            case _:
                reason = "UNSUPPORTED_FIELD"
                item.refuse("type", "must be message, function_call or function_call_output", reason=reason)


def _add_call(item: Fields, chat: pb.ChatMessages) -> None:
    name = item.text("name")
    if not name:
        item.refuse("name", "must not be empty")
    function = {"name": name, "arguments": item.text("arguments") or "{}"}
    calls: list[Json] = [{"id": item.text("call_id"), "type": "function", "function": function}]
    _finish(item)
    chat.messages.add(role="assistant", tool_calls_json=as_json(calls, item.path("arguments")))


def _finish(item: Fields) -> None:
    _pass_over(item)
    item.finish("an item")


def _pass_over(item: Fields) -> None:
    """What an item has where it is of an answer that is sent back."""
    for name in ("id", "status"):
        item.get(name)


def _read_form(fields: Fields, sampling: types.SamplingParams) -> None:
    text = fields.part("text")
    if text is None:
        return
    form = text.part("format")
    grammar = None if form is None else read_format(form, nested=False)
    if grammar is not None:
        if sampling.HasField("grammar"):
            text.refuse("format", "can't be asked for together with guided_… or structured_outputs")
        sampling.grammar.CopyFrom(grammar)
        name_grammar(text, grammar, "format")
    text.finish(neutral={"verbosity": "medium"})


def _read_logprobs(fields: Fields, sampling: types.SamplingParams) -> None:
    included: list[Any] = fields.list_of("include", "strings")
    for name in included:
        if name != _LOGPROBS:
            shown = kind_of(name)
            fields.refuse("include", f"holds {shown}, may hold {_LOGPROBS} only", reason="UNSUPPORTED_FIELD")
    read_top_logprobs(fields, sampling, f"needs include to hold {_LOGPROBS}", wanted=bool(included))
