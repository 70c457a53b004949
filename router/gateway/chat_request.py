"""The body of POST /v1/chat/completions."""

from pageferry.router.gateway.fields import Fields, Reading
from pageferry.router.gateway.generation_fields import read_generation, read_top_logprobs
from pageferry.router.gateway.messages import function_tools, read_messages, set_tools
from pageferry.router.gateway.parsed import Parsed, read_streaming
from pageferry.router.gateway.strict_json import as_json, decode_json, kind_of
from pageferry.v1 import inference_pb2 as pb

# Fields of OpenAI's that change no answer.
HARMLESS = (
    *("metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
    "user",
)
# Fields of OpenAI's and other servers' that would change it, with the value that asks for nothing.
NEUTRAL: dict[str, object] = {
    **dict.fromkeys(("allowed_token_ids", "cache_salt", "chat_template", "reasoning_effort", "truncate_prompt_tokens")),
    "include_stop_str_in_output": False,
    "store": False,
}
_NEUTRAL = NEUTRAL | {
    **dict.fromkeys(("audio", "documents", "function_call", "web_search_options")),
    "add_special_tokens": False,
    "echo": False,
    "functions": [],
    "modalities": ["text"],
    "verbosity": "medium",
}


def parse_chat(body: bytes, reading: Reading) -> Parsed:
    """Raises InvalidArgumentError."""
    fields = Fields(decode_json(body), reading)
    request = read_generation(fields)
    if (limit := fields.integer("max_completion_tokens")) is not None:
        if request.stop.HasField("max_tokens") and request.stop.max_tokens != limit:
            fields.refuse("max_completion_tokens", "differs from max_tokens; set one of them")
        request.stop.max_tokens = limit
        fields.sets("max_completion_tokens", "stop.max_tokens", "max_tokens")
    request.chat.messages.extend(read_messages(fields))
    tools = function_tools(fields, nested=True)
    set_tools(request.chat, tools)
    _read_template(fields, request.chat)
    read_top_logprobs(fields, request.sampling, "needs logprobs to be true", wanted=fields.flag("logprobs"))
    streaming = read_streaming(fields)
    fields.finish("/v1/chat/completions", harmless=HARMLESS, neutral=_NEUTRAL)
    asked_prompt = request.sampling.HasField("prompt_logprobs")
    return Parsed(request, streaming, calls=bool(tools), prompt_logprobs=asked_prompt)


def _read_template(fields: Fields, chat: pb.ChatMessages) -> None:
    chat.continue_last = fields.flag("continue_final_message")
    begins_answer = fields.flag("add_generation_prompt", absent=not chat.continue_last)
    if chat.continue_last and begins_answer:
        fields.refuse("add_generation_prompt", "must be false where continue_final_message is true")
    if chat.continue_last and chat.messages[-1].role != "assistant":
        fields.refuse("continue_final_message", "needs the last message to be the assistant's")
    variables = fields.get("chat_template_kwargs")
    if variables is None:
        variables = {}
    if not isinstance(variables, dict):
        fields.refuse("chat_template_kwargs", f"is {kind_of(variables)}, must be an object")
    if not begins_answer and not chat.continue_last:
        variables = variables | {"add_generation_prompt": False}
    if variables:
        chat.template_variables_json = as_json(variables, "chat_template_kwargs")
