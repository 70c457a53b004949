"""The rows of a step's logits that tell of prompt tokens, apart from those that tokens are drawn from."""

from collections.abc import Iterable, Sequence as ListLike

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.plan import Chunk, SampledToken
from pageferry.core.sequence import Sequence
from pageferry.engine.sampler import Sampler

Likeliest = NDArray[np.int32] | None
Reported = tuple[Sequence, tuple[SampledToken, ...]]


def take_prompt_rows(
    chunks: ListLike[Chunk], num_drafts: Iterable[int], logits: Tensor, likeliest: Likeliest, sampler: Sampler
) -> tuple[Tensor, Likeliest, tuple[Reported, ...]]:
    """The rows that are drawn from, with their likeliest tokens, and the log-probabilities of prompt tokens.

    `logits` are the batch's [S, vocab], with a row for each draft; where there is nothing to report they are given back
    as they are.
    """
    if not any(chunk.num_prompt_rows for chunk in chunks):  # as mostly
        return logits, likeliest, ()
    row, drawn_from, reported = 0, list[int](), list[Reported]()
    for chunk, num_guessed in zip(chunks, num_drafts, strict=True):
        num_rows = chunk.num_prompt_rows
        if num_rows:
            reported.append((chunk.sequence, _report(chunk, logits[row : row + num_rows], sampler)))
        num_drawn = (1 + num_guessed) * chunk.samples
        row += max(num_rows, num_drawn)
        drawn_from += range(row - num_drawn, row)
    return logits[drawn_from], None if likeliest is None else likeliest[drawn_from], tuple(reported)


def _report(chunk: Chunk, logits: Tensor, sampler: Sampler) -> tuple[SampledToken, ...]:
    """Of the prompt tokens behind the rows'; what comes behind the prompt is left out."""
    sequence, first = chunk.sequence, chunk.start + chunk.num_tokens - len(logits) + 1
    token_ids = sequence.token_ids[first : min(first + len(logits), sequence.num_prompt)]
    count = sequence.work.sampling.num_prompt_logprobs or 0
    return sampler.report(logits[: len(token_ids)].numpy(), np.array(token_ids), count)
