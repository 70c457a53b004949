"""Draws the rows of a step's chunks, and accepts the drafts that are drawn.

Row i of a chunk is drawn as it always is, for the position behind i drafts, and a draft is accepted where it is what
was drawn. A draw depends on the row and on (seed, position, choice) alone, so tokens are the same with any drafts; for
drafts that were chosen without knowing the draw that is rejection sampling (arXiv:2211.17192) of point masses.
"""

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.plan import SampledToken, SampleFailure, Samples
from pageferry.core.sequence import Sequence
from pageferry.engine.adjust import SampleRow, is_adjusted
from pageferry.engine.sampler import Sampler

Likeliest = NDArray[np.int32] | None
Drafts = ListLike[int]


@dataclass(frozen=True, slots=True)
class Verifier:
    """Of one step: `logits`, and `likeliest` as `ForwardPass` gives it, have a row for each sequence's next token and
    one for each of its drafts.
    """

    sampler: Sampler
    logits: Tensor
    likeliest: Likeliest

    def samples(self, sequences: ListLike[Sequence], drafts: ListLike[Drafts]) -> tuple[Samples, ...]:
        """Each sequence's accepted drafts and the token behind them.

        Where draws depend on the tokens before them, rows are drawn one after the other while drafts are accepted.
        """
        if not any(drafts):  # as mostly
            results = self.sampler.sample(self.logits, [SampleRow(one) for one in sequences], self.likeliest)
            return tuple(one if isinstance(one, SampleFailure) else (one,) for one in results)
        at: list[int] = []
        rows: list[SampleRow] = []
        start = 0
        for sequence, guessed in zip(sequences, drafts, strict=True):
            count = 1 if is_adjusted(sequence) else 1 + len(guessed)
            at += range(start, start + count)
            rows += [SampleRow(sequence, tuple(guessed[:i])) for i in range(count)]
            start += 1 + len(guessed)
        drawn_of = iter(self._sample(at, rows))
        samples, start = [], 0
        for sequence, guessed in zip(sequences, drafts, strict=True):
            if is_adjusted(sequence):
                drawn = self._in_turn(next(drawn_of), sequence, guessed, start)
            else:
                drawn = [next(drawn_of) for _ in range(1 + len(guessed))]
            samples.append(_accept(drawn, guessed))
            start += 1 + len(guessed)
        return tuple(samples)

    def _in_turn(
        self, first: SampledToken | SampleFailure, sequence: Sequence, drafts: Drafts, start: int
    ) -> list[SampledToken | SampleFailure]:
        drawn = [first]
        for i, draft in enumerate(drafts):
            last = drawn[-1]
            if isinstance(last, SampleFailure) or last.token_id != draft:
                break
            drawn += self._sample([start + i + 1], [SampleRow(sequence, tuple(drafts[: i + 1]))])
        return drawn

    def _sample(self, at: list[int], rows: list[SampleRow]) -> tuple[SampledToken | SampleFailure, ...]:
        if len(at) == len(self.logits):
            return self.sampler.sample(self.logits, rows, self.likeliest)
        likeliest = None if self.likeliest is None else self.likeliest[at]
        return self.sampler.sample(self.logits[at], rows, likeliest)


def _accept(drawn: ListLike[SampledToken | SampleFailure], drafts: Drafts) -> Samples:
    """The tokens drawn up to the first that is not its draft; a failure counts only where nothing is before it."""
    accepted: list[SampledToken] = []
    for i, one in enumerate(drawn):
        if isinstance(one, SampleFailure):
            return tuple(accepted) or one
        accepted.append(one)
        if i == len(drafts) or one.token_id != drafts[i]:
            break
    return tuple(accepted)
