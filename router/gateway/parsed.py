"""What a body asks for, once it is checked."""

from dataclasses import dataclass

from pageferry.router.gateway.fields import Fields
from pageferry.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class Streaming:
    """How an answer is streamed."""

    usage: bool = False  # in a last chunk of its own
    usage_everywhere: bool = False  # so far, in each chunk


@dataclass(frozen=True, slots=True)
class Parsed:
    """What to generate, and how the answer is to look."""

    request: pb.GenerateRequest  # without an input, where there are several prompts
    streaming: Streaming | None  # None: the answer comes whole
    calls: bool = False  # whether tools may be called, whose calls are looked for in the text
    echo_logprobs: bool = False  # whether the prompt's log-probabilities are the beginning of the answer's
    prompt_logprobs: bool = False  # whether the answer has them in a field of its own
    details: dict[str, object] | None = None  # of the body, that the answer repeats
    prompts: tuple[str | list[int], ...] = ()  # several; texts or token ids

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return max(1, self.request.n)

    @property
    def num_requests(self) -> int:
        return len(self.prompts) or 1

    def request_of(self, number: int) -> pb.GenerateRequest:
        """That of a prompt. Made when it is wanted: what they have in common can be large."""
        if not self.prompts:
            return self.request
        request = pb.GenerateRequest()
        request.CopyFrom(self.request)
        if number:
            request.request_id += f"-{number}"
        set_prompt(request, self.prompts[number])
        return request


def set_prompt(request: pb.GenerateRequest, prompt: str | list[int]) -> None:
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(prompt)


def read_streaming(fields: Fields) -> Streaming | None:
    """The fields `stream` and `stream_options`. Raises InvalidArgumentError."""
    is_streamed = fields.flag("stream")
    options = fields.part("stream_options")
    if options is None:
        return Streaming() if is_streamed else None
    if not is_streamed:
        fields.refuse("stream_options", "needs stream to be true")
    everywhere = options.flag("continuous_usage_stats")
    streaming = Streaming(options.flag("include_usage") or everywhere, everywhere)
    options.finish(harmless=("include_obfuscation",))
    return streaming
