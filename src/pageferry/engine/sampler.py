"""Draws each sequence's next token from its row of logits.

Order: penalties and the ban on early stops, then log-probabilities (what is reported), then temperature, top-k, top-p,
min-p, and the draw. A row's result depends on that row, its parameters and (seed, position, choice) alone.
"""

from collections.abc import Sequence as Sequences

import numpy as np
import torch
from torch import Tensor

from pageferry.core.plan import SampledToken, SampleFailure
from pageferry.core.sampling import SamplingParams
from pageferry.core.sequence import Sequence
from pageferry.engine.draw import uniform

_CANDIDATES = (1024, 8192)  # likeliest tokens that are sorted before the whole vocabulary is


def sample(logits: Tensor, sequences: Sequences[Sequence]) -> tuple[SampledToken | SampleFailure, ...]:
    """One result for each row of `logits` [S, vocab] fp32, which is changed in place."""
    if not sequences:
        return ()
    numbers = logits.numpy()  # the same memory; numpy is an order of magnitude faster at these than torch
    with np.errstate(invalid="ignore"):
        is_finite = np.isfinite(numbers.min(axis=-1)) & np.isfinite(numbers.max(axis=-1))  # NaN makes both NaN
    for row, sequence in enumerate(sequences):
        if is_finite[row]:
            _adjust(logits[row], sequence)
    greedy = numbers.argmax(axis=-1).tolist()
    return tuple(
        _sample_row(logits[row], sequence, greedy[row])
        if is_finite[row]
        else SampleFailure(f"logits of position {sequence.num_output} are not finite numbers")
        for row, sequence in enumerate(sequences)
    )


def _sample_row(row: Tensor, sequence: Sequence, greedy: int) -> SampledToken | SampleFailure:
    params = sequence.work.sampling
    if row[greedy] == float("-inf"):
        return SampleFailure(
            f"no token may follow at position {sequence.num_output}: all are stop ids before min_tokens"
        )
    token_id = greedy if params.is_greedy else _draw(row, sequence)
    if params.num_logprobs is None:
        return SampledToken(token_id)
    logprobs = torch.log_softmax(row, dim=-1)
    return SampledToken(token_id, logprobs[token_id].item(), _top(logprobs, params.num_logprobs))


def _adjust(row: Tensor, sequence: Sequence) -> None:
    params, stop = sequence.work.sampling, sequence.work.stop
    if params.has_penalties:
        _penalise(row, sequence)
    if sequence.num_output < stop.min_tokens and stop.stop_token_ids:
        row[sorted(stop.stop_token_ids)] = float("-inf")


def _penalise(row: Tensor, sequence: Sequence) -> None:
    """Repetition (arXiv:1909.05858) counts prompt and output, presence and frequency the output alone."""
    params = sequence.work.sampling
    if params.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(sequence.token_ids))
        values = row[seen]
        adjusted = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        # An extreme penalty overflows: infinities would leave nothing that can be drawn from.
        row[seen] = adjusted.nan_to_num(nan=0.0)
    if sequence.num_output:
        produced, counts = np.unique(sequence.output_ids, return_counts=True)
        row[torch.from_numpy(produced)] -= torch.from_numpy(params.presence_penalty + params.frequency_penalty * counts)


def _top(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """Likeliest first; equals by id."""
    values, ids = logprobs.topk(min(count, len(logprobs)))
    return tuple(sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda item: (-item[1], item[0])))


def _draw(row: Tensor, sequence: Sequence) -> int:
    """Invert the distribution function at a uniform draw, over the kept tokens in the order of their ids."""
    params, work = sequence.work.sampling, sequence.work
    # In float64, and the largest subtracted first, no temperature overflows or divides zero by zero.
    kept = _filtered((row - row.max()).double() / params.temperature, params)
    cumulative = torch.softmax(kept, dim=-1).cumsum(0)
    total = cumulative[-1]
    target = total * uniform(params.seed, sequence.num_output, work.choice)
    # Rounding may put the target at the very end: the last token that adds anything then.
    last = torch.searchsorted(cumulative, total)
    return int(torch.searchsorted(cumulative, target, right=True).minimum(last))


def _filtered(row: Tensor, params: SamplingParams) -> Tensor:
    """The row with -inf where top-k, top-p or min-p leave a token out; the likeliest always stays."""
    if params.top_k and params.top_k < len(row):
        row = _keep(row, row.topk(params.top_k).values[-1], params.top_k)
    if params.top_p < 1:
        row = _keep_nucleus(row, params.top_p)
    if params.min_p > 0:
        # The likeliest token's value is 0, so that exp gives each probability relative to it.
        row = row.masked_fill(row.exp() < params.min_p, float("-inf"))
    return row


def _keep(row: Tensor, threshold: Tensor, count: int) -> Tensor:
    """The `count` likeliest; of those equal to the threshold, the ones with the lowest ids."""
    above, equal = row > threshold, row == threshold
    spare = count - int(above.sum())
    kept = above | (equal & (equal.cumsum(0) <= spare))
    return row.masked_fill(~kept, float("-inf"))


def _keep_nucleus(row: Tensor, top_p: float) -> Tensor:
    """The fewest likeliest tokens whose probabilities reach `top_p`."""
    total = torch.logsumexp(row, dim=0)
    for count in (*(count for count in _CANDIDATES if count < len(row)), len(row)):
        values = row.topk(count).values
        reached = (values - total).exp().cumsum(0) >= top_p
        if bool(reached[-1]):
            last = int(reached.int().argmax())
            return _keep(row, values[last], last + 1)
    return row  # rounding left the sum of all just below
