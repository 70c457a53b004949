"""What an endpoint answers: whole, or chunk by chunk, from the events of one generation a prompt."""

from dataclasses import dataclass, field
from typing import Protocol

from pageferry.core.errors import PageferryError
from pageferry.router.gateway.strict_json import Json
from pageferry.router.gateway.tool_calls import ToolCallReader
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types

FINISH_REASONS = {
    types.FINISH_REASON_STOP: "stop",
    types.FINISH_REASON_LENGTH: "length",
    types.FINISH_REASON_REPETITION: "length",  # `stop_reason` says what it was
}


class Reply(Protocol):
    """Built from every event in turn; then `closing` or `whole` is called, once."""

    done: bytes  # how a stream ends

    def take(self, prompt: int, event: pb.GenerateResponse) -> list[Json]:
        """The chunks that have become due, of a stream."""
        ...

    def closing(self) -> list[Json]:
        """The last chunks of a stream."""
        ...

    def whole(self) -> Json:
        """The one object of an answer that is not streamed."""
        ...

    def failed(self, error: PageferryError) -> Json:
        """The last event of a stream that has begun and can't go on."""
        ...


@dataclass(slots=True)
class Choice:
    """One answer, as it comes."""

    index: int
    reader: ToolCallReader | None = None
    texts: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    tokens: list[types.GeneratedToken] = field(default_factory=list)
    has_begun: bool = False
    num_tokens: int = 0
    reason: types.FinishReason = types.FINISH_REASON_UNSPECIFIED
    matched_stop: str = ""
    score: float | None = None

    def push(self, text: str) -> tuple[str, list[Json]]:
        """Text that is no call of a tool, and such calls."""
        return self._kept(*((text, []) if self.reader is None else self.reader.push(text)))

    def finish(self, end: pb.ChoiceFinished) -> tuple[str, list[Json]]:
        """The same of what was held back."""
        self.reason, self.matched_stop = end.reason, end.matched_stop
        self.score = end.score if end.HasField("score") else None
        return self._kept(*(("", []) if self.reader is None else self.reader.finish()))

    def _kept(self, text: str, calls: list[Json]) -> tuple[str, list[Json]]:
        if text:
            self.texts.append(text)
        self.calls += calls
        return text, calls

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def is_finished(self) -> bool:
        return self.reason != types.FINISH_REASON_UNSPECIFIED

    @property
    def finish_reason(self) -> str:
        if self.calls and self.reason == types.FINISH_REASON_STOP:
            return "tool_calls"
        return FINISH_REASONS[self.reason]

    @property
    def stop_reason(self) -> str | None:
        """What a finish reason leaves open."""
        return "repetition" if self.reason == types.FINISH_REASON_REPETITION else self.matched_stop or None


def summed(counts: list[types.Usage]) -> types.Usage:
    return types.Usage(
        prompt_tokens=sum(each.prompt_tokens for each in counts),
        completion_tokens=sum(each.completion_tokens for each in counts),
        cached_tokens=sum(each.cached_tokens for each in counts),
    )


def end_of(finished: pb.Finished) -> pb.ChoiceFinished:
    """That of the first choice, where it has no end of its own."""
    return pb.ChoiceFinished(reason=finished.reason, matched_stop=finished.matched_stop)
