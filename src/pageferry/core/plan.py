"""What a scheduler decides for one step, and what came of it."""

from dataclasses import dataclass
from typing import Protocol

from pageferry.core.beam import Hypothesis
from pageferry.core.errors import InternalError, InvalidArgumentError, PageferryError
from pageferry.core.layout import Place
from pageferry.core.sequence import FinishReason, Sequence

NO_TOKEN = "no token may follow"  # how a failure begins that is the request's own doing, by bans or its grammar


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's part of a step: positions `start` to `start + num_tokens`; samples where it reaches the end.

    Behind the end, up to `num_drafts` guessed tokens are computed too: `drafts`, or without them what the runner's own
    drafter guesses. Those that are drawn there anyway are accepted; what the others have written is overwritten later.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    num_drafts: int = 0
    drafts: tuple[int, ...] = ()

    @property
    def is_prompt(self) -> bool:
        """Whether it is more than a step of a sequence that decodes."""
        return self.num_tokens > 1 or not self.samples

    @property
    def num_prompt_rows(self) -> int:
        """Of its last tokens' logits, those from the first on that tells of a prompt token that is to be reported.

        0 where none does; the last ones of others may tell of tokens that are generated already.
        """
        sequence, end = self.sequence, self.start + self.num_tokens
        if sequence.prompt_logprobs is None or not sequence.wants_prompt_logprobs:
            return 0
        first = max(self.start, len(sequence.prompt_logprobs))
        return end - first if first < min(end, sequence.num_prompt - 1) else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: first blank `fresh`, then copy `copies` (source, target), then compute `chunks` as one flat batch."""

    chunks: tuple[Chunk, ...]
    fresh: tuple[Place, ...] = ()
    copies: tuple[tuple[Place, Place], ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Without drafts."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A drawn token; `logprob` and `top` (likeliest first) only where asked for.

    For a beam search nothing is drawn: `top` are the candidates to go on with, the likeliest of which is the token.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """No token could be drawn, such as from logits that are not numbers; fails its own sequence alone."""

    message: str


Samples = tuple[SampledToken, ...] | SampleFailure  # the accepted drafts, and the token drawn behind them


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry for each chunk of the plan that samples, in the plan's order."""

    samples: tuple[Samples, ...]
    forward_s: float = 0.0  # seconds in the model's forward pass alone, without sampling
    prompt_logprobs: tuple[tuple[Sequence, tuple[SampledToken, ...]], ...] = ()  # of prompt tokens, where wanted
    num_drafted: tuple[int, ...] = ()  # drafts computed behind each of those chunks; empty: none behind any
    draft_s: float = 0.0  # seconds that making them took
    verify_s: float = 0.0  # seconds of all else
    device_s: float | None = None  # seconds in the forward pass by the clock of a device that is no processor


class Runner(Protocol):
    """Runs a plan's step on the model; blocks; called on the engine's thread only."""

    def run(self, plan: Plan) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class Emitted:
    """A token that goes to the router; `position` counts the output from 0."""

    sequence: Sequence
    position: int
    token: SampledToken


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that is over and holds no pages: `reason` if it is complete, else `failure`."""

    sequence: Sequence
    reason: FinishReason | None = None
    failure: str = ""
    hypotheses: tuple[Hypothesis, ...] = ()  # of a beam search, best first

    def error(self, reason: str) -> PageferryError:
        """What a failure is to the caller; `reason` says where it came about, unless the request is to blame."""
        if self.failure.startswith(NO_TOKEN):
            return InvalidArgumentError(self.failure, reason="NO_TOKEN_LEFT")
        return InternalError(self.failure, reason=reason)


@dataclass(frozen=True, slots=True)
class Output:
    """All that the shell must do after a step."""

    emitted: tuple[Emitted, ...] = ()
    ended: tuple[Ended, ...] = ()
