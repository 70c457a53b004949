"""Changes a row of logits by what was generated before it and by what a request wants.

Order: penalties, bias, bans (stop ids before `min_tokens`, sequences), grammar. What is banned has the logit −inf.
"""

import math
from typing import NamedTuple

import numpy as np

from pageferry.core.sequence import Sequence
from pageferry.engine.draw import Floats, Ids


class SampleRow(NamedTuple):
    """Whose next token is drawn, if `extra` are accepted before it in this step."""

    sequence: Sequence
    extra: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Of the token, in the output."""
        return self.sequence.num_output + len(self.extra)


def is_adjusted(sequence: Sequence) -> bool:
    """Whether logits are changed before anything is drawn from them."""
    stop, params = sequence.work.stop, sequence.work.sampling
    return (
        params.has_penalties
        or bool(params.logit_bias or params.banned)
        or sequence.constraint is not None
        or (stop.min_tokens > 0 and sequence.num_output < stop.min_tokens)
    )


def adjust(row: Floats, one: SampleRow) -> tuple[int, str]:
    """The likeliest token afterwards; or why none may follow."""
    params = one.sequence.work.sampling
    with np.errstate(all="ignore"):
        if params.has_penalties:
            _penalise(row, one)
        if params.logit_bias:
            token_ids, biases = zip(*params.logit_bias, strict=True)
            row[list(token_ids)] += np.array(biases, np.float32)
    why = _ban(row, one)
    likeliest = int(row.argmax())
    return (0, why) if row.item(likeliest) == -math.inf else (likeliest, "")


def _ban(row: Floats, one: SampleRow) -> str:
    """Ban what may not follow; what to say where that is everything."""
    sequence, reasons = one.sequence, []
    if sequence.constraint is not None:
        problem = _constrain(row, one)
        if problem:
            row[:] = -np.inf
            return problem
        reasons.append("the grammar")
    if sequence.work.sampling.banned:
        before = [*sequence.token_ids, *one.extra] if one.extra else sequence.token_ids
        row[sequence.bans().after(before, sequence.num_prompt)] = -np.inf
        reasons.append("what is banned")
    stop = sequence.work.stop
    if one.position < stop.min_tokens and stop.stop_token_ids:
        stop_ids = list(stop.stop_token_ids)
        values = row[stop_ids]
        row[stop_ids] = -np.inf
        reasons.append("stop ids before min_tokens")
        if sequence.constraint is not None and row.max() == -math.inf:
            row[stop_ids] = values  # a complete answer ends, however short
    return f"nothing is left by {' and '.join(reasons)}"


def _constrain(row: Floats, one: SampleRow) -> str:
    """Ban what does not match; or why the grammar can't say."""
    sequence, constraint = one.sequence, one.sequence.constraint
    assert constraint is not None
    constraint.follow([*sequence.output_ids, *one.extra])
    mask = constraint.allowed()
    if mask is None:
        return constraint.problem
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(row), bitorder="little")
    np.putmask(row, bits == 0, -np.inf)
    return ""


def _counts(one: SampleRow) -> tuple[Ids, Ids]:
    """The different tokens before the row's, and how often each is in the output."""
    counts = one.sequence.token_counts()
    ids, num_output = np.frombuffer(counts.ids, np.int64), np.frombuffer(counts.num_output, np.int64)
    if not one.extra:
        return ids, num_output
    new = np.setdiff1d(one.extra, ids)
    ids, num_output = np.concatenate((ids, new)), np.concatenate((num_output, np.zeros(len(new), np.int64)))
    for token_id in one.extra:
        num_output[ids == token_id] += 1
    return ids, num_output


def _penalise(row: Floats, one: SampleRow) -> None:
    """Repetition (arXiv:1909.05858) counts prompt and output, presence and frequency the output alone."""
    params = one.sequence.work.sampling
    ids, num_output = _counts(one)
    values = row[ids]
    if params.repetition_penalty != 1:
        penalty = np.float32(params.repetition_penalty)
        values = np.where(values > 0, values / penalty, values * penalty)
        # An extreme penalty overflows: infinities would leave nothing that can be drawn from.
        values = np.nan_to_num(values, nan=0.0)
    if params.presence_penalty or params.frequency_penalty:
        added = params.presence_penalty + params.frequency_penalty * num_output
        values = values - np.where(num_output > 0, added, 0.0)
    row[ids] = values
