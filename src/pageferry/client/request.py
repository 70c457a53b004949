"""What a client asks for, as the contract's messages."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

from google.protobuf.descriptor import FieldDescriptor

from pageferry.core.errors import invalid, invalid_field
from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import EarlyStopping

# {"role": "user", "content": "…"}, and where the chat template knows them "name", "tool_call_id", and "tool_calls", a
# list in OpenAI's form.
Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]  # text as it is, token ids, or a conversation

# Options that are fields of these messages, under the same names.
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "logprobs", "prompt_logprobs"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_STOP = ("max_tokens", "min_tokens", "ignore_eos", "max_repeats")
_REQUEST = ("request_id", "model", "priority", "profile", "skip_special_tokens", "n", "best_of", "echo")
_GRAMMARS = ("json_schema", "json_object", "regex", "lark", "choices")

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
    logit_bias: Mapping[int, float]  # added to the logits of token ids
    bad_words: str | Sequence[str]  # texts that must not be generated
    banned: Sequence[Sequence[int]]  # token ids that must not come in this order
    logprobs: int  # likeliest tokens to report beside each sampled one
    prompt_logprobs: int  # the same for the prompt's tokens
    json_schema: str | Mapping[str, Any]  # the answer is JSON that matches it; of the next five, one at most
    json_object: bool  # the answer is a JSON object
    regex: str  # the answer matches it, whole
    lark: str  # the answer matches this grammar in Lark's notation, whole
    choices: Sequence[str]  # the answer is one of these
    n: int  # answers
    best_of: int  # answers to generate, of which the n likeliest are sent, once all are complete
    beam_width: int  # a beam search, whose n best answers are sent once it is complete
    length_penalty: float  # of a beam search: a score is a log-probability over the length to this power
    early_stopping: Literal["heuristic", "first", "never"]  # of a beam search, as transformers has False, True, "never"
    echo: bool  # the text begins with the prompt's
    stop: str | Sequence[str]  # strings that end the text, and are left out of it
    stop_token_ids: Sequence[int]
    min_tokens: int  # nothing but max_tokens ends the text before
    ignore_eos: bool
    max_repeats: int  # ends the text once its last tokens are the same run of tokens so many times over
    tools: Sequence[Mapping[str, Any]]  # that the model may call, in OpenAI's form; of a conversation
    template_variables: Mapping[str, Any]  # more variables for the chat template; of a conversation
    continue_last: bool  # go on with the conversation's last message, an assistant's
    skip_special_tokens: bool
    priority: int  # lower runs first
    profile: str  # name of a profile of the router's
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
    _extend(request.stop_strings, "stop", _texts(stop), "a string")
    _extend(request.stop.stop_token_ids, "stop_token_ids", given.pop("stop_token_ids", None) or (), _TOKEN_ID)
    _extend(request.bad_words, "bad_words", _texts(given.pop("bad_words", None) or ()), "a string")
    _set_bias(request.sampling, given.pop("logit_bias", None) or {})
    for index, token_ids in enumerate(given.pop("banned", None) or ()):
        _extend(request.sampling.banned.add().ids, f"banned[{index}]", token_ids, _TOKEN_ID)
    _set_grammar(request.sampling, given)
    _set_beam(request, given)
    _set_input(request, prompt, given)
    if given:
        raise TypeError(f"generate() has no option {min(given)!r}")
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
        values = dict(message)
        calls = values.pop("tool_calls", None)
        if values.get("content", "") is None:  # as OpenAI's clients have it beside calls
            del values["content"]
        try:
            added = chat.messages.add(**values)
        except (TypeError, ValueError):
            known = "must have role and content, and of name, tool_call_id and tool_calls what it needs"
            raise invalid_field(f"messages[{index}]", known) from None
        if calls:
            added.tool_calls_json = _json(f"messages[{index}].tool_calls", calls)
    return chat


def _set_input(request: pb.GenerateRequest, prompt: Prompt, given: dict[str, Any]) -> None:
    of_chat = {name: given.pop(name, None) for name in ("tools", "template_variables", "continue_last")}
    if is_conversation(prompt):
        chat = request.chat
        chat.CopyFrom(chat_messages(cast(Sequence[Message], prompt)))
        for name in ("tools", "template_variables"):
            if of_chat[name]:
                setattr(chat, f"{name}_json", _json(name, of_chat[name]))
        _set(chat, "continue_last", of_chat["continue_last"] or False)
        return
    for name, value in of_chat.items():
        if value:
            raise invalid_field(name, "must be given with a conversation only")
    if isinstance(prompt, str):
        _set(request, "prompt", prompt)
    else:
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, "token_ids", prompt, _TOKEN_ID)


def _set_bias(sampling: Any, bias: object) -> None:
    try:
        sampling.logit_bias.update(bias)
    except (TypeError, ValueError, AttributeError):
        raise invalid_field("logit_bias", f"must map token ids, each {_TOKEN_ID}, to numbers") from None


def _set_grammar(sampling: Any, given: dict[str, Any]) -> None:
    wanted = {name: value for name in _GRAMMARS if (value := given.pop(name, None)) not in (None, False)}
    if len(wanted) > 1:
        names = list(wanted)
        raise invalid_field(names[1], f"must not be given together with {names[0]}")
    for name, value in wanted.items():
        if name == "choices":
            _extend(sampling.grammar.choices.texts, name, value, "a string")
        elif name == "json_schema" and not isinstance(value, str):
            sampling.grammar.json_schema = _json(name, value)
        else:
            _set(sampling.grammar, name, value)


def _set_beam(request: pb.GenerateRequest, given: dict[str, Any]) -> None:
    names = ("beam_width", "length_penalty", "early_stopping")
    width, length_penalty, early_stopping = (given.pop(name, None) for name in names)
    if width is None:
        for name, value in zip(names[1:], (length_penalty, early_stopping), strict=True):
            if value is not None:
                raise invalid_field(name, "must be given with beam_width only")
        return
    _set(request.beam, "width", width, "beam_width")
    if length_penalty is not None:
        _set(request.beam, "length_penalty", length_penalty)
    if early_stopping is not None:
        try:
            name = f"EARLY_STOPPING_{early_stopping.upper()}"
            request.beam.early_stopping = cast(EarlyStopping, EarlyStopping.Value(name))
        except (ValueError, AttributeError):
            raise invalid_field("early_stopping", "must be heuristic, first or never") from None


def _texts(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise invalid_field(name, "must be what JSON can hold") from None


def _set(message: Any, name: str, value: object, option: str = "") -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError):
        limit = _LIMITS.get(message.DESCRIPTOR.fields_by_name[name].cpp_type)
        if limit is None:  # the value is text, which errors don't repeat
            raise invalid_field(option or name, "must be a string of valid Unicode") from None
        raise invalid(option or name, value, limit) from None


def _extend(field: Any, name: str, values: object, limit: str) -> None:
    try:
        field.extend(values)
    except (TypeError, ValueError):
        raise invalid_field(name, f"must be a list, and each of it {limit}") from None
