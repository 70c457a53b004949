"""Which continuations a beam search keeps, and which it ends with: as transformers' `GenerationMixin._beam_search`.

The score of a running beam is the sum of its tokens' log-probabilities, and that of a hypothesis, a complete one, this
sum divided by its number of tokens, the last one included, to the power of the length penalty.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

from pageferry.core.errors import invalid
from pageferry.core.sampling import BeamParams, EarlyStopping, SamplingParams, StopParams
from pageferry.core.sequence import FinishReason, WorkItem

Candidates = ListLike[tuple[int, float]]  # token ids with log-probabilities, likeliest first


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete output."""

    token_ids: tuple[int, ...]
    score: float
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Beam:
    """A running output, and which of the running ones before it goes on."""

    token_ids: tuple[int, ...]
    score: float  # sum of log-probabilities
    parent: int = 0


class BeamSearch:
    """The search of one request; it begins with the empty output alone."""

    def __init__(self, params: BeamParams, stop: StopParams) -> None:
        self.running = [Beam((), 0.0)]  # best first; none once the search is over
        self.hypotheses: list[Hypothesis] = []  # best first, at most `width`
        self._params = params
        self._stop = stop

    @property
    def is_over(self) -> bool:
        return not self.running

    def advance(self, candidates: ListLike[Candidates]) -> None:
        """Choose among the continuations of each running beam, `num_candidates` of which are to be given, or all."""
        width, num_tokens = self._params.width, len(self.running[0].token_ids) + 1
        continued = [
            (before.score + logprob, parent, token_id)
            for parent, (before, likeliest) in enumerate(zip(self.running, candidates, strict=True))
            for token_id, logprob in likeliest
        ]
        continued.sort(key=lambda one: -one[0])  # stable: of equals the first beam's likeliest goes first
        running: list[Beam] = []
        for rank, (score, parent, token_id) in enumerate(continued):
            token_ids = (*self.running[parent].token_ids, token_id)
            reason = self._finish_reason(token_id, num_tokens)
            if reason is None:
                running.append(Beam(token_ids, score, parent))
                if len(running) == width:  # those that end further down are not among the best
                    break
            elif rank < width:
                self.hypotheses.append(Hypothesis(token_ids, self._score(score, num_tokens), reason))
        self.hypotheses = sorted(self.hypotheses, key=lambda one: -one.score)[:width]
        self.running = running if running and self._may_improve(running[0].score, num_tokens) else []

    def _score(self, sum_logprobs: float, num_tokens: int) -> float:
        return float(sum_logprobs / num_tokens**self._params.length_penalty)

    def _finish_reason(self, token_id: int, num_tokens: int) -> FinishReason | None:
        if num_tokens >= self._stop.min_tokens and token_id in self._stop.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self._stop.max_tokens else None

    def _may_improve(self, best_running: float, num_tokens: int) -> bool:
        """Whether running on could give a better hypothesis than the worst one; guessed, but for NEVER."""
        if len(self.hypotheses) < self._params.width:
            return True
        early_stopping = self._params.early_stopping
        if early_stopping is EarlyStopping.FIRST:
            return False
        if early_stopping is EarlyStopping.NEVER and self._params.length_penalty > 0:
            num_tokens = self._stop.max_tokens
        return self._score(best_running, num_tokens) > self.hypotheses[-1].score


def num_candidates(work: WorkItem) -> int:
    """Continuations of a beam that the choice needs: `width` that go on, whichever of the others end it."""
    assert work.beam is not None, f"{work.request_id} is no beam search"
    return work.beam.width + len(work.stop.stop_token_ids)


def check_beam(sampling: SamplingParams, stop: StopParams, num_output: int = 0) -> None:
    """Raise InvalidArgumentError for what a beam search can't be asked for beside."""
    refused = (
        ("logprobs", sampling.num_logprobs, sampling.num_logprobs is not None),
        ("prompt_logprobs", sampling.num_prompt_logprobs, sampling.num_prompt_logprobs is not None),
        ("grammar", "a grammar", sampling.grammar is not None),
        ("stop.max_repeats", stop.max_repeats, stop.max_repeats > 0),
        ("output_ids", f"{num_output} tokens", num_output > 0),
    )
    for field, value, is_set in refused:
        if is_set:
            raise invalid(field, value, "must not be set with beam: a beam search begins at the prompt and ends whole")
