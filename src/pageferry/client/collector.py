"""The messages of a stream put together, and what both kinds of generation are beside their reading of it."""

from dataclasses import dataclass, field
from typing import Any

from pageferry.client.result import Choice, Delta, Pages, Result, Token, Usage
from pageferry.core.errors import CancelledError, InternalError, PageferryError
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types


@dataclass(slots=True)
class _Gathered:
    """Of one answer, as it comes."""

    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    end: pb.ChoiceFinished | None = None

    def choice(self, finished: pb.Finished) -> Choice:
        """Once all is over; the end of an only answer is that of the stream."""
        end = self.end or finished
        score = self.end.score if self.end is not None and self.end.HasField("score") else None
        reason = types.FinishReason.Name(end.reason).removeprefix("FINISH_REASON_").lower()
        return Choice("".join(self.texts), tuple(self.tokens), reason, end.matched_stop, score)


class Collector:
    """Puts the messages of one stream together."""

    def __init__(self) -> None:
        self.started = pb.Started()  # empty until the router has accepted the request
        self.error: PageferryError | None = None
        self._gathered = {0: _Gathered()}
        self._prompt: tuple[Token, ...] = ()
        self._finished: pb.Finished | None = None

    def text(self, choice: int) -> str:
        """What has come so far."""
        return "".join(self._gathered[choice].texts) if choice in self._gathered else ""

    def take(self, response: pb.GenerateResponse) -> Delta | None:
        """The delta, if that is what the message holds."""
        match response.WhichOneof("event"):
            case "started":
                self.started = response.started
            case "choice_finished":
                self._of(response.choice_finished.choice).end = response.choice_finished
            case "finished":
                self._finished = response.finished
            case "delta":
                delta = _delta(response.delta)
                gathered = self._of(delta.choice)
                gathered.texts.append(delta.text)
                gathered.tokens.extend(delta.tokens)
                self._prompt = delta.prompt or self._prompt
                return delta
        return None

    def _of(self, choice: int) -> _Gathered:
        return self._gathered.setdefault(choice, _Gathered())

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
            choices=tuple(gathered.choice(finished) for _, gathered in sorted(self._gathered.items())),
            prompt=self._prompt,
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
        """What has been read so far of the first answer."""
        return self._collector.text(0)

    def text_of(self, choice: int) -> str:
        """What has been read so far of an answer."""
        return self._collector.text(choice)

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


def _delta(delta: pb.Delta) -> Delta:
    prompt = tuple(
        _with_logprobs(position, entry.sampled.token_id, entry)
        for position, entry in enumerate(delta.prompt_logprobs.tokens, 1)
    )
    return Delta(delta.text, tuple(map(_token, delta.tokens)), delta.choice, prompt)


def _token(token: types.GeneratedToken) -> Token:
    if not token.HasField("logprobs"):
        return Token(token.position, token.token_id)
    return _with_logprobs(token.position, token.token_id, token.logprobs)


def _with_logprobs(position: int, token_id: int, logprobs: types.Logprobs) -> Token:
    top = tuple((entry.token_id, entry.logprob) for entry in logprobs.top)
    return Token(position, token_id, logprobs.sampled.logprob, top)


def _pages(pages: pb.HandoffStats) -> Pages:
    return Pages(pages.page_format or None, pages.shipped, pages.cached, pages.bytes, pages.hidden)
