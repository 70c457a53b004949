"""The few tokens of each row that can be drawn, or are to be reported, found without sorting the vocabulary."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pageferry.engine.draw import Floats, Ids, Numbers

Mask = NDArray[np.bool_]
_GROUPED = 64  # tokens of which the largest stands for all
_USUALLY_ENOUGH = 128  # likeliest tokens for top-p
_FEW = 4096  # candidates; rows with more are taken one by one, so that they don't widen others
_MARGIN = 1e-4  # of probabilities that are compared in fp32


@dataclass(frozen=True, slots=True)
class Filters:
    """What rows keep, [S] each."""

    temperature: Numbers  # above 0
    top_k: Ids  # 0 is off
    top_p: Numbers
    min_p: Numbers

    def of(self, rows: Ids) -> "Filters":
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Candidates:
    """Columns are in the order of ids; those behind a row's own have the logit −inf."""

    rows: Ids  # [S] of the mask
    ids: Ids  # [S, columns]
    logits: Floats  # [S, columns]
    order: Ids  # [S, columns]: from the largest logit to the smallest, equals by id


def likeliest(logits: Floats, counts: Ids) -> Mask:
    """[S, vocab]: at least the `counts` largest of each row [S, vocab] that are not −inf, and seldom many more."""
    num_groups = logits.shape[1] // _GROUPED
    threshold = np.full(len(logits), np.finfo(np.float32).min, np.float32)  # what is banned is below
    (few,) = np.nonzero(counts <= num_groups)
    if len(few):
        # As many groups have a largest that is no smaller: each is of another token.
        grouped = logits[:, : num_groups * _GROUPED].reshape(len(logits), _GROUPED, num_groups).max(axis=1)
        positions = num_groups - counts[few]
        found = np.partition(grouped[few], np.unique(positions), axis=1)[np.arange(len(few)), positions]
        threshold[few] = np.maximum(found, threshold[few])
    mask: Mask = logits >= threshold[:, None]
    return mask


def probable(weights: Floats, totals: Numbers, filters: Filters) -> Mask:
    """[S, vocab]: at least what top-p and min-p keep of weights [S, vocab], of which each row's largest is 1.

    That is mostly among the likeliest few. Else tokens below (1 − top_p) / vocab have less together than what top-p
    leaves out, and can be left out too.
    """
    mask = likeliest(weights, np.full(len(weights), _USUALLY_ENOUGH)) & (weights > 0)
    flat, vocab_size = np.flatnonzero(mask), weights.shape[1]
    reached = np.bincount(flat // vocab_size, weights.reshape(-1)[flat], minlength=len(weights))
    (short,) = np.nonzero(reached < filters.top_p * totals * (1 + _MARGIN))
    if len(short):
        least = np.maximum((1 - filters.top_p) * totals / vocab_size, filters.min_p)[short] * (1 - _MARGIN)
        mask[short] = weights[short] >= least.astype(np.float32)[:, None]
    return mask


def gather(logits: Floats, rows: Ids, mask: Mask) -> Iterator[Candidates]:
    """The tokens in the mask [S, vocab] of the rows of logits [batch, vocab]; every row is in one of the results."""
    flat = np.flatnonzero(mask)
    of_row, ids = np.divmod(flat, mask.shape[1])
    counts = np.bincount(of_row, minlength=len(rows))
    starts = np.cumsum(counts) - counts
    small, large = (np.flatnonzero(chosen) for chosen in (counts <= _FEW, counts > _FEW))
    for members in (*([small] if len(small) else []), *large[:, None]):
        columns = np.arange(counts[members].max())
        is_own = columns < counts[members, None]
        places = np.minimum(starts[members, None] + columns, len(ids) - 1)
        own_ids = ids[places]
        values = np.where(is_own, logits[rows[members, None], own_ids], np.float32(-np.inf))
        yield Candidates(members, own_ids, values, np.argsort(-values, axis=1, kind="stable"))


def kept_weights(some: Candidates, filters: Filters, totals: Numbers) -> Numbers:
    """[S, columns]: weights of the candidates, 0 where top-k, top-p or min-p leave one out; the likeliest always stays.

    Each keeps the first ones of the order. Top-p takes its share of what top-k keeps, or where that is off of
    `totals`, the weights of all tokens; the largest weight is 1.
    """
    rows, columns = np.arange(len(some.ids))[:, None], np.arange(some.ids.shape[1])
    largest = some.logits[rows, some.order[:, :1]]
    # In float64, and the largest subtracted first, no temperature overflows or divides zero by zero.
    ordered = np.exp((some.logits[rows, some.order] - largest).astype(np.float64) / filters.temperature[:, None])
    has_top_k = filters.top_k > 0
    ordered[has_top_k[:, None] & (columns >= filters.top_k[:, None])] = 0
    cumulative = ordered.cumsum(axis=1)
    wanted = filters.top_p * np.where(has_top_k, cumulative[:, -1], totals)
    num_top_p = np.where(filters.top_p < 1, (cumulative < wanted[:, None]).sum(axis=1) + 1, len(columns))
    num_kept = np.minimum(num_top_p, (ordered >= filters.min_p[:, None]).sum(axis=1))
    ordered[columns >= num_kept[:, None]] = 0
    weights = np.empty_like(ordered)
    np.put_along_axis(weights, some.order, ordered, axis=1)
    return weights
