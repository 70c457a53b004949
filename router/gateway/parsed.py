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

    requests: tuple[pb.GenerateRequest, ...]  # one a prompt
    streaming: Streaming | None  # None: the answer comes whole
    calls: bool = False  # whether tools may be called, whose calls are looked for in the text
    echo_logprobs: bool = False  # whether the prompt's log-probabilities are the beginning of the answer's
    prompt_logprobs: bool = False  # whether the answer has them in a field of its own
    details: dict[str, object] | None = None  # of the body, that the answer repeats

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return max(1, self.requests[0].n)


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
