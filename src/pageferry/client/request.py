"""What a client asks for, as the contract's messages."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

from google.protobuf.descriptor import FieldDescriptor

from pageferry.core.errors import FieldViolation, InvalidArgumentError, invalid
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import SamplingParams

Message = Mapping[str, str]  # {"role": "user", "content": "…"}
Prompt = str | Sequence[int] | Sequence[Message]  # text as it is, token ids, or a conversation

# Options that are fields of these messages, under the same names.
_SAMPLING = tuple(SamplingParams.DESCRIPTOR.fields_by_name)
_STOP = ("max_tokens", "min_tokens", "ignore_eos")
_REQUEST = ("request_id", "model", "priority", "skip_special_tokens")

_TOKEN_ID = "a whole number from 0 to 2**32 - 1"
_LIMITS = {
    FieldDescriptor.CPPTYPE_UINT32: f"must be {_TOKEN_ID}",
    FieldDescriptor.CPPTYPE_UINT64: "must be a whole number from 0 to 2**64 - 1",
    FieldDescriptor.CPPTYPE_INT32: "must be a whole number from -2**31 to 2**31 - 1",
    FieldDescriptor.CPPTYPE_DOUBLE: "must be a number",
    FieldDescriptor.CPPTYPE_BOOL: "must be True or False",
}


class Options(TypedDict, total=False):
    """How to generate. What is left out takes the model's own default."""

    max_tokens: int  # default: what the context length leaves
    temperature: float  # 0 is greedy
    top_k: int  # 0 is off
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int  # the same seed draws the same tokens; the router draws one if there is none
    logprobs: int  # likeliest tokens to report beside each sampled one
    stop: str | Sequence[str]  # strings that end the text, and are left out of it
    stop_token_ids: Sequence[int]
    min_tokens: int  # nothing but max_tokens ends the text before
    ignore_eos: bool
    skip_special_tokens: bool
    priority: int  # lower runs first
    model: str  # default: the only one
    request_id: str  # unique among live requests; the router draws one if there is none
    timeout_s: float  # then DeadlineExceededError, and the work stops everywhere


def credentials(api_key: str) -> tuple[tuple[str, str], ...]:
    """The metadata by which the router tells callers apart."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def generate_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """Raises InvalidArgumentError for a value of a wrong type or beyond its field's range."""
    request = pb.GenerateRequest()
    given: dict[str, Any] = dict(options)
    given.pop("timeout_s", None)
    for names, message in ((_SAMPLING, request.sampling), (_STOP, request.stop), (_REQUEST, request)):
        for name in names:
            if (value := given.pop(name, None)) is not None:
                _set(message, name, value)
    stop = given.pop("stop", None) or ()
    _extend(request.stop_strings, "stop", [stop] if isinstance(stop, str) else stop, "a string")
    _extend(request.stop.stop_token_ids, "stop_token_ids", given.pop("stop_token_ids", None) or (), _TOKEN_ID)
    if given:
        raise TypeError(f"generate() has no option {min(given)!r}")
    if isinstance(prompt, str):
        _set(request, "prompt", prompt)
    elif is_conversation(prompt):
        request.chat.CopyFrom(chat_messages(cast(Sequence[Message], prompt)))
    else:
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, "token_ids", prompt, _TOKEN_ID)
    return request


def tokenize_request(text: str | Sequence[Message], model: str) -> pb.TokenizeRequest:
    """Asks for the token ids of a text, or of a conversation as the model would be given it."""
    if isinstance(text, str):
        return pb.TokenizeRequest(model=model, text=text)
    return pb.TokenizeRequest(model=model, chat=chat_messages(text))


def is_conversation(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def chat_messages(messages: Sequence[Message]) -> pb.ChatMessages:
    chat = pb.ChatMessages()
    for index, message in enumerate(messages):
        try:
            chat.messages.add(**message)
        except (TypeError, ValueError):
            raise _wrong(f"messages[{index}]", "must have role and content, both strings") from None
    return chat


def _set(message: Any, name: str, value: object) -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError):
        limit = _LIMITS.get(message.DESCRIPTOR.fields_by_name[name].cpp_type)
        if limit is None:  # the value is text, which errors don't repeat
            raise _wrong(name, "must be a string of valid Unicode") from None
        raise invalid(name, value, limit) from None


def _extend(field: Any, name: str, values: object, limit: str) -> None:
    try:
        field.extend(values)
    except (TypeError, ValueError):
        raise _wrong(name, f"must be a list, and each of it {limit}") from None


def _wrong(name: str, description: str) -> InvalidArgumentError:
    violations = (FieldViolation(name, description),)
    return InvalidArgumentError(f"{name} {description}", reason="INVALID_FIELD", violations=violations)
