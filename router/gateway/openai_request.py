"""What the HTTP gateway accepts: OpenAI's request bodies, checked field by field and turned into a GenerateRequest.

A field that is not known, or known and not supported, is refused and never ignored. Ranges of sampling parameters are
the frontend's to check; here is only what the contract's types can't carry.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from pageferry.router.gateway.strict_json import Json, decode_json, kind_of, refuse, shown
from pageferry.v1 import inference_pb2 as pb

_UINT32 = 2**32 - 1
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

_COMMON_NAMES = (
    "model stream stream_options stop seed logprobs max_tokens temperature top_p presence_penalty frequency_penalty "
    "top_k min_p repetition_penalty min_tokens ignore_eos stop_token_ids skip_special_tokens priority"
)
_COMMON = frozenset(_COMMON_NAMES.split())
_CHAT = _COMMON | {"messages", "max_completion_tokens", "top_logprobs"}
_COMPLETION = _COMMON | {"prompt"}

_UNSUPPORTED_NAMES = (
    "add_generation_prompt allowed_token_ids audio bad_words cache_salt chat_template chat_template_kwargs "
    "function_call guided_choice guided_grammar guided_json guided_regex include_stop_str_in_output length_penalty "
    "metadata prediction prompt_cache_key prompt_logprobs reasoning_effort safety_identifier service_tier "
    "structured_outputs suffix tool_choice truncate_prompt_tokens user verbosity web_search_options"
)
# Fields of OpenAI's and vLLM's APIs that this gateway does not serve, with the value that asks for nothing.
_UNSUPPORTED: Mapping[str, object] = {
    **dict.fromkeys(_UNSUPPORTED_NAMES.split()),
    "best_of": 1,
    "echo": False,
    "functions": [],
    "logit_bias": {},
    "modalities": ["text"],
    "n": 1,
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "store": False,
    "tools": [],
    "use_beam_search": False,
}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A checked body: what to generate, and how the answer is to look."""

    generate: pb.GenerateRequest
    chat: bool
    stream: bool
    include_usage: bool


def parse_completion(body: bytes) -> ParsedRequest:
    """The body of POST /v1/completions. Raises InvalidArgumentError."""
    fields = _known_fields(body, _COMPLETION, "/v1/completions")
    request = _generate_request(fields)
    if fields.get("max_tokens") is None:
        request.stop.max_tokens = _COMPLETION_MAX_TOKENS
    _set_prompt(request, fields.get("prompt"))
    logprobs = _integer(fields, "logprobs")
    if logprobs is not None:
        request.sampling.logprobs = logprobs
    return _parsed(request, fields, chat=False)


def parse_chat(body: bytes) -> ParsedRequest:
    """The body of POST /v1/chat/completions. Raises InvalidArgumentError."""
    fields = _known_fields(body, _CHAT, "/v1/chat/completions")
    request = _generate_request(fields)
    if (limit := _integer(fields, "max_completion_tokens")) is not None:
        if fields.get("max_tokens") not in (None, limit):
            refuse("max_completion_tokens", "differs from max_tokens; set one of them")
        request.stop.max_tokens = limit
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        refuse("messages", "must be a list of at least one message")
    request.chat.messages.extend(_message(message, f"messages[{i}]") for i, message in enumerate(messages))
    top_logprobs = _integer(fields, "top_logprobs")
    if _flag(fields, "logprobs"):
        request.sampling.logprobs = top_logprobs or 0
    elif top_logprobs is not None:
        refuse("top_logprobs", "needs logprobs to be true")
    return _parsed(request, fields, chat=True)


def _known_fields(body: bytes, known: frozenset[str], path: str) -> Json:
    fields = decode_json(body)
    for name, value in fields.items():
        if name in known:
            continue
        if name in _UNSUPPORTED:
            if value is not None and value != _UNSUPPORTED[name]:
                refuse(name, "is not supported; leave it out", reason="UNSUPPORTED_FIELD")
            continue
        close = difflib.get_close_matches(name[:64], known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        refuse(shown(name), f"is not a field of {path}{hint}", reason="UNKNOWN_FIELD")
    return fields


def _generate_request(fields: Json) -> pb.GenerateRequest:
    request = pb.GenerateRequest(model=_string(_given(fields, "model", ""), "model"))
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if (number := _number(fields, name)) is not None:
            setattr(request.sampling, name, number)
    for message, name, high in (
        (request.sampling, "top_k", _UINT32),
        (request.sampling, "seed", 2**64 - 1),
        (request.stop, "max_tokens", _UINT32),
    ):
        if (count := _integer(fields, name, high=high)) is not None:
            setattr(message, name, count)
    request.stop.min_tokens = _integer(fields, "min_tokens") or 0
    request.stop.ignore_eos = _flag(fields, "ignore_eos")
    request.stop.stop_token_ids.extend(_token_ids(_given(fields, "stop_token_ids", []), "stop_token_ids"))
    request.stop_strings.extend(_stop_strings(fields.get("stop")))
    request.priority = _integer(fields, "priority", low=-(2**31), high=2**31 - 1) or 0
    if fields.get("skip_special_tokens") is not None:
        request.skip_special_tokens = _flag(fields, "skip_special_tokens")
    return request


def _given(fields: Json, name: str, absent: object) -> object:
    """The field's value; null stands for absence."""
    value = fields.get(name)
    return absent if value is None else value


def _parsed(request: pb.GenerateRequest, fields: Json, *, chat: bool) -> ParsedRequest:
    stream = _flag(fields, "stream")
    options = fields.get("stream_options")
    if options is None:
        return ParsedRequest(request, chat, stream, include_usage=False)
    if not stream:
        refuse("stream_options", "needs stream to be true")
    if not isinstance(options, dict):
        refuse("stream_options", f"is {kind_of(options)}, must be an object")
    for name in options:
        if name != "include_usage":
            refuse(f"stream_options.{shown(name)}", "is not supported; leave it out", reason="UNSUPPORTED_FIELD")
    return ParsedRequest(request, chat, stream, include_usage=_flag(options, "include_usage"))


def _set_prompt(request: pb.GenerateRequest, prompt: object) -> None:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        request.prompt = _string(prompt, "prompt")
    elif isinstance(prompt, list) and any(isinstance(part, (str, list)) for part in prompt):
        refuse("prompt", f"holds {len(prompt)} prompts; send one in a request", reason="UNSUPPORTED_FIELD")
    elif isinstance(prompt, list):
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(_token_ids(prompt, "prompt"))
    else:
        refuse("prompt", "must be a string or a list of token ids")


def _message(message: object, path: str) -> pb.ChatMessage:
    if not isinstance(message, dict):
        refuse(path, f"is {kind_of(message)}, must be an object")
    for name, value in message.items():
        if name not in ("role", "content") and value is not None:
            refuse(f"{path}.{shown(name)}", "is not supported; leave it out", reason="UNSUPPORTED_FIELD")
    role = message.get("role")
    if role not in ("system", "developer", "user", "assistant"):
        refuse(f"{path}.role", "must be system, user or assistant")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(part, f"{path}.content[{i}]") for i, part in enumerate(content))
    return pb.ChatMessage(role="system" if role == "developer" else role, content=_string(content, f"{path}.content"))


def _text_part(part: object, path: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or part.keys() - {"type", "text"}:
        refuse(path, 'must be {"type": "text", "text": …}; other parts are not supported', reason="UNSUPPORTED_FIELD")
    return _string(part.get("text"), f"{path}.text")


def _stop_strings(stop: object) -> list[str]:
    if stop is None:
        return []
    if not isinstance(stop, list):
        return [_string(stop, "stop")]
    return [_string(text, f"stop[{i}]") for i, text in enumerate(stop)]


def _token_ids(ids: object, name: str) -> list[int]:
    if not isinstance(ids, list):
        refuse(name, f"is {kind_of(ids)}, must be a list of token ids")
    for i, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id <= _UINT32:
            refuse(f"{name}[{i}]", f"is {kind_of(token_id)}, must be a token id, at least 0")
    return ids


def _string(value: object, name: str) -> str:
    if not isinstance(value, str):
        refuse(name, f"is {kind_of(value)}, must be a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        refuse(name, f"holds half of a surrogate pair at character {error.start}")
    return value


def _number(fields: Json, name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        refuse(name, f"is {kind_of(value)}, must be a number")
    return float(value)


def _integer(fields: Json, name: str, *, low: int = 0, high: int = _UINT32) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        refuse(name, f"is {kind_of(value)}, must be a whole number from {low} to {high}")
    return value


def _flag(fields: Json, name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        refuse(name, f"is {kind_of(value)}, must be true or false")
    return bool(value)
