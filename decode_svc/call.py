"""One live Decode call, as the event loop sees it: what it has generated, and what its reader has not been told."""

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from pageferry.core.errors import PageferryError
from pageferry.core.plan import Emitted
from pageferry.core.sequence import Sequence
from pageferry.decode_svc.step import Completed, Figures
from pageferry.runtime.convert import (
    finish_to_proto,
    hypothesis_to_proto,
    prompt_logprobs_to_proto,
    token_to_proto,
)
from pageferry.v1 import decode_pb2 as pb

MOST_TOKENS = 4096  # of a message, whatever is told of each, so that receivers take it


class Subscription(Protocol):
    """The stream that tells of this call and others."""

    def mark(self, call: "Call") -> None: ...
    def leave(self, call: "Call") -> None: ...


@dataclass(slots=True, eq=False)
class Call:
    """Its tokens gather while their reader is slow: at most as many as it may generate."""

    sequence: Sequence
    is_pushed: bool
    number: int = 0  # what the subscription calls it
    subscription: Subscription | None = None  # None: the call's own stream tells all
    parent: Context = field(default_factory=otel_context.get_current)
    tokens: list[Emitted] = field(default_factory=list)  # not told yet
    begun: Figures | None = None  # of its first tokens, to be told with the next ones
    num_emitted: int = 0
    end: Completed | PageferryError | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # there is something to do for the call's own stream

    def take_token(self, emitted: Emitted) -> None:
        self.tokens.append(emitted)
        self.num_emitted += 1
        if self.subscription is None:
            self.changed.set()
        else:
            self.subscription.mark(self)

    def take_end(self, end: Completed | PageferryError) -> None:
        if self.end is None:  # the first one counts
            self.end = end
            if isinstance(end, Completed):
                self.num_emitted += sum(len(one.token_ids) for one in end.hypotheses)
        self.changed.set()
        if self.subscription is not None:
            self.subscription.mark(self)

    @property
    def num_drawn(self) -> int:
        """Tokens drawn here: not the first one of a pushed prompt, which is the prefill worker's, but for beams."""
        has_first = self.is_pushed and self.sequence.work.beam is None
        return max(0, self.num_emitted - has_first)

    @property
    def num_untold(self) -> int:
        """Tokens that the next news tell of, those of the prompt included."""
        num_tokens = min(len(self.tokens), MOST_TOKENS)
        return num_tokens + len(self.sequence.prompt_logprobs or ()) if self._tells_prompt else num_tokens

    @property
    def _tells_prompt(self) -> bool:
        """Log-probabilities of the prompt are told with the first token: then all are there."""
        sequence = self.sequence
        begins = bool(self.tokens) and self.tokens[0].position == len(sequence.work.output_ids)
        return begins and sequence.prompt_logprobs is not None

    def news(self) -> pb.CallEvents:
        """What was not told yet; with very many tokens, the first of them, and the rest is left."""
        want_logprobs = self.sequence.work.sampling.num_logprobs is not None
        tells_prompt = self._tells_prompt
        told, self.tokens = self.tokens[:MOST_TOKENS], self.tokens[MOST_TOKENS:]
        events = pb.CallEvents(
            call=self.number, tokens=[token_to_proto(item.position, item.token, want_logprobs) for item in told]
        )
        if told and self.begun is not None:
            events.first_steps.CopyFrom(_first_steps(self.begun, is_pushed=self.is_pushed))
            self.begun = None
        if tells_prompt:
            events.prompt_logprobs.CopyFrom(prompt_logprobs_to_proto(self.sequence.prompt_logprobs or ()))
        if not self.tokens:
            if isinstance(self.end, Completed):
                events.completed.CopyFrom(_completed(self.end, is_pushed=self.is_pushed))
            events.failed = isinstance(self.end, PageferryError)
        return events


def first_own_ms(figures: Figures) -> float:
    """From when it could run to the first token drawn here."""
    return 0.0 if figures.first_own is None else (figures.first_own - figures.ready) * 1000


def _first_steps(figures: Figures, *, is_pushed: bool) -> pb.FirstSteps:
    first, second = figures.first_own, figures.second_own
    second_ms = 0.0 if first is None or second is None else (second - first) * 1000
    return pb.FirstSteps(
        queue_ms=0.0 if figures.first_step is None else (figures.first_step - figures.ready) * 1000,
        prefill_ms=0.0 if is_pushed else first_own_ms(figures),
        first_step_ms=first_own_ms(figures) if is_pushed else second_ms,
        cached_tokens=figures.num_cached,
    )


def _completed(end: Completed, *, is_pushed: bool) -> pb.Completed:
    figures = end.figures
    first = _first_steps(figures, is_pushed=is_pushed)
    return pb.Completed(
        reason=finish_to_proto(end.reason),
        queue_ms=first.queue_ms,
        prefill_ms=first.prefill_ms,
        steps=figures.num_steps,
        preemptions=figures.num_preemptions,
        cached_tokens=first.cached_tokens,
        first_step_ms=first.first_step_ms,
        hypotheses=[hypothesis_to_proto(one) for one in end.hypotheses],
        drafted=figures.num_drafted,
        accepted=figures.num_accepted,
    )
