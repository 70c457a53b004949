"""The body of POST /v1/completions."""

from typing import Any

from pageferry.router.gateway.chat_request import HARMLESS, NEUTRAL
from pageferry.router.gateway.fields import Fields, Reading, as_text, as_token_ids
from pageferry.router.gateway.generation_fields import read_generation
from pageferry.router.gateway.parsed import Parsed, read_streaming, set_prompt
from pageferry.router.gateway.strict_json import decode_json, kind_of

MAX_PROMPTS = 256  # of one body
_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_NEUTRAL = NEUTRAL | {"add_special_tokens": True, "suffix": ""}


def parse_completion(body: bytes, reading: Reading) -> Parsed:
    """Raises InvalidArgumentError."""
    return read_completion(Fields(decode_json(body), reading))


def read_completion(fields: Fields) -> Parsed:
    """The same of fields that came in another form."""
    request = read_generation(fields)
    if not request.stop.HasField("max_tokens"):
        request.stop.max_tokens = _DEFAULT_MAX_TOKENS
    request.echo = fields.flag("echo")
    logprobs = fields.integer("logprobs")
    asked_prompt = request.sampling.HasField("prompt_logprobs")
    if logprobs is not None:
        request.sampling.logprobs = logprobs
        if request.echo and not asked_prompt:
            request.sampling.prompt_logprobs = logprobs
    prompts = _prompts(fields)
    streaming = read_streaming(fields)
    fields.finish("/v1/completions", harmless=HARMLESS, neutral=_NEUTRAL)
    echo_logprobs = request.echo and logprobs is not None
    if len(prompts) == 1:
        set_prompt(request, prompts.pop())
    return Parsed(request, streaming, echo_logprobs=echo_logprobs, prompt_logprobs=asked_prompt, prompts=tuple(prompts))


def _prompts(fields: Fields) -> list[Any]:
    """Checked texts and lists of token ids."""
    prompt, path = fields.get("prompt"), fields.path("prompt")
    if isinstance(prompt, str):
        return [as_text(prompt, path)]
    if not isinstance(prompt, list):
        fields.refuse("prompt", f"is {kind_of(prompt)}, must be a string, a list of token ids, or a list of either")
    if not any(isinstance(part, str | list) for part in prompt):
        return [as_token_ids(prompt, path)]
    if len(prompt) > MAX_PROMPTS:
        fields.refuse("prompt", f"holds {len(prompt)} prompts, at most {MAX_PROMPTS} fit into one request")
    return [
        as_token_ids(part, f"{path}[{i}]") if isinstance(part, list) else as_text(part, f"{path}[{i}]")
        for i, part in enumerate(prompt)
    ]
