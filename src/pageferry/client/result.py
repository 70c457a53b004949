"""What a client is told: pieces of the output, and the whole with its figures."""

from dataclasses import dataclass
from typing import Any

from pageferry.core.errors import CancelledError, InternalError, PageferryError
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token; `logprob` and `top` (likeliest first) only where `logprobs` was asked for."""

    position: int
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """More of the output. `text` is final, and empty while a stop string or a character is incomplete."""

    text: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens; `cached_tokens` of the prompt's were not computed, since their pages were found in a cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Pages:
    """What was handed from prefill to decode; `format` is None where nothing was.

    `hidden` is the share of the transfer that went on behind compute.
    """

    format: str | None
    shipped: int
    cached: int
    bytes: int
    hidden: float


@dataclass(frozen=True, slots=True)
class Result:
    """A complete answer. `timings_ms` has the contract's Timings, without `_ms` in their names."""

    request_id: str
    trace_id: str
    model: str
    text: str
    tokens: tuple[Token, ...]
    finish_reason: str  # "stop" or "length"
    matched_stop: str
    usage: Usage
    timings_ms: dict[str, float]
    pages: Pages

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)


class Collector:
    """Puts the messages of one stream together."""

    def __init__(self) -> None:
        self.started = pb.Started()  # empty until the router has accepted the request
        self.error: PageferryError | None = None
        self._texts: list[str] = []
        self._tokens: list[Token] = []
        self._finished: pb.Finished | None = None

    @property
    def text(self) -> str:
        """What has come so far."""
        return "".join(self._texts)

    def take(self, response: pb.GenerateResponse) -> Delta | None:
        """The delta, if that is what the message holds."""
        match response.WhichOneof("event"):
            case "started":
                self.started = response.started
            case "finished":
                self._finished = response.finished
            case "delta":
                delta = Delta(response.delta.text, tuple(map(_token, response.delta.tokens)))
                self._texts.append(delta.text)
                self._tokens.extend(delta.tokens)
                return delta
        return None

    def end(self, error: PageferryError | None, *, cancelled: bool) -> PageferryError | None:
        """Note how the stream ended; returns what its reader must be told, if anything."""
        if self._finished is None:
            if cancelled:
                error = CancelledError("the generation was cancelled by its caller")
            self.error = error or InternalError("the stream ended without a finish", reason="NO_FINISH")
        return None if cancelled else self.error

    def result(self) -> Result:
        """Once the stream is over. Raises the error it ended with."""
        if self.error is not None:
            raise self.error
        assert self._finished is not None
        finished = self._finished
        usage = finished.usage
        return Result(
            request_id=self.started.request_id,
            trace_id=self.started.trace_id,
            model=self.started.model,
            text=self.text,
            tokens=tuple(self._tokens),
            finish_reason=types.FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower(),
            matched_stop=finished.matched_stop,
            usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            timings_ms={
                field.name.removesuffix("_ms"): getattr(finished.timings, field.name)
                for field in pb.Timings.DESCRIPTOR.fields
            },
            pages=_pages(finished.pages),
        )


class AnyGeneration:
    """What both kinds of generation have: a call, and what has come of it so far."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._collector = Collector()
        self._over = False
        self._cancelled = False

    @property
    def request_id(self) -> str:
        """Empty until the router has accepted the request."""
        return self._collector.started.request_id

    @property
    def trace_id(self) -> str:
        """Hex id of the request's trace; empty until the router has accepted the request."""
        return self._collector.started.trace_id

    @property
    def text(self) -> str:
        """What has been read so far."""
        return self._collector.text

    def cancel(self) -> None:
        """Stop the work; does nothing once it is over."""
        self._cancelled = True
        self._call.cancel()

    def _end(self, error: PageferryError | None) -> PageferryError | None:
        """The reading is over; returns what the reader must be told, if anything."""
        self._call.cancel()
        self._over = True
        return self._collector.end(error, cancelled=self._cancelled)

    def __del__(self) -> None:
        if not self._over:
            self._call.cancel()


def _token(token: types.GeneratedToken) -> Token:
    if not token.HasField("logprobs"):
        return Token(token.position, token.token_id)
    top = tuple((entry.token_id, entry.logprob) for entry in token.logprobs.top)
    return Token(token.position, token.token_id, token.logprobs.sampled.logprob, top)


def _pages(pages: pb.HandoffStats) -> Pages:
    return Pages(pages.page_format or None, pages.shipped, pages.cached, pages.bytes, pages.hidden)
