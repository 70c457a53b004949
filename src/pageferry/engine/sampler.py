"""Draws each sequence's next token from its row of logits.

Order: what `adjust` does, then log-probabilities (what is reported), then temperature, top-k, top-p, min-p, and the
draw. A row's result depends on that row, its parameters and (seed, position, choice) alone: rows share
numpy's calls, but no number of one row goes into another's.
"""

import math
from collections.abc import Iterable, Iterator, Sequence as ListLike

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pageferry.core.beam import num_candidates
from pageferry.core.plan import NO_TOKEN, SampledToken, SampleFailure
from pageferry.core.sampling import SamplingParams
from pageferry.engine.adjust import SampleRow, adjust, is_adjusted
from pageferry.engine.candidates import Candidates, Filters, Mask, gather, kept_weights, likeliest, probable
from pageferry.engine.draw import Floats, Ids, Numbers, block_sums, draw_from_all, draw_weighted, uniform

Results = list[SampledToken | SampleFailure]
_ROWS = 16  # at once: what they take besides the logits stays in the processor's cache
_TEMPERATURES = np.float32(1e-30), np.float32(1e30)  # beyond, fp32 quotients are what they are here


class Sampler:
    """Keeps the memory that it works in; one call at a time."""

    def __init__(self) -> None:
        self._memory = np.empty((0, 0), np.float32)

    def sample(
        self, logits: Tensor, rows: ListLike[SampleRow], likeliest: NDArray[np.int32] | None = None
    ) -> tuple[SampledToken | SampleFailure, ...]:
        """One result for each row of `logits` [S, vocab] fp32, which is changed in place; see `ForwardPass.likeliest`.

        For greedy rows little is called: the forward pass has left none of it in the processor's caches.
        """
        if not rows:
            return ()
        numbers = logits.numpy()
        token_ids = (_likeliest(numbers) if likeliest is None else likeliest).tolist()
        results: Results = []
        drawn, reported = [], []
        for row, one in enumerate(rows):
            result = _adjusted(numbers[row], one, token_ids[row])
            results.append(result)
            if isinstance(result, SampleFailure) or one.sequence.work.beam is not None:
                continue
            token_ids[row], params = result.token_id, one.sequence.work.sampling
            if not params.is_greedy:
                drawn.append(row)
            if params.num_logprobs is not None:
                reported.append(row)
        if drawn or reported:
            likeliest_ids = np.array(token_ids)
            with np.errstate(all="ignore"):  # overflows end at 0, or at infinity below the likeliest
                self._draw_all(numbers, likeliest_ids, drawn, rows, results)
                self._report_all(numbers, likeliest_ids, reported, rows, results)
        return tuple(results)

    def report(self, logits: Floats, token_ids: Ids, count: int) -> tuple[SampledToken, ...]:
        """Given tokens, one for each row, with their log-probabilities and the `count` likeliest ones'."""
        reported: list[SampledToken] = []
        with np.errstate(all="ignore"):
            for some in _parts(list(range(len(token_ids)))):
                largest = logits[some].max(axis=1)
                reported += self._report(logits, largest, some, token_ids[some], np.full(len(some), count))
        return tuple(reported)

    def _draw_all(
        self, logits: Floats, likeliest_ids: Ids, drawn_rows: list[int], rows: ListLike[SampleRow], results: Results
    ) -> None:
        for some in _parts(drawn_rows):
            largest = logits[some, likeliest_ids[some]]
            drawn = self._draw(logits, largest, some, [rows[row] for row in some])
            for row, token_id in zip(some.tolist(), drawn.tolist(), strict=True):
                results[row] = SampledToken(token_id)

    def _report_all(
        self, logits: Floats, likeliest_ids: Ids, reported: list[int], rows: ListLike[SampleRow], results: Results
    ) -> None:
        for some in _parts(reported):
            largest = logits[some, likeliest_ids[some]]
            counts = np.array([rows[row].sequence.work.sampling.num_logprobs or 0 for row in some])
            token_ids = np.array([result.token_id for row in some if isinstance(result := results[row], SampledToken)])
            for row, result in zip(some, self._report(logits, largest, some, token_ids, counts), strict=True):
                results[row] = result

    def _draw(self, logits: Floats, largest: Floats, rows: Ids, drawn_for: list[SampleRow]) -> Ids:
        """A token id for each of some rows, whose largest logits are given."""
        params = [one.sequence.work.sampling for one in drawn_for]
        filters = _filters(params, logits.shape[1])
        uniforms = np.array(
            [uniform(p.seed, one.position, one.sequence.work.choice) for p, one in zip(params, drawn_for, strict=True)]
        )
        drawn = np.empty(len(rows), np.int64)
        is_limited = (filters.top_p < 1) | (filters.min_p > 0)
        for some in _parts_where(filters.top_k > 0):
            mask = likeliest(self._copy(logits, rows[some]), filters.top_k[some])
            among = gather(logits, rows[some], mask)
            drawn[some] = _draw_among(among, filters.of(some), np.zeros(len(some)), uniforms[some])
        for some in _parts_where((filters.top_k == 0) & is_limited):
            weights = self._weights(logits, largest[some], rows[some], filters.temperature[some])
            totals = block_sums(weights).sum(axis=1)
            among = gather(logits, rows[some], probable(weights, totals, filters.of(some)))
            drawn[some] = _draw_among(among, filters.of(some), totals, uniforms[some])
        for some in _parts_where((filters.top_k == 0) & ~is_limited):
            weights = self._weights(logits, largest[some], rows[some], filters.temperature[some])
            drawn[some] = draw_from_all(weights, uniforms[some])
        return drawn

    def _report(
        self, logits: Floats, largest: Floats, rows: Ids, token_ids: Ids, counts: Ids
    ) -> Iterator[SampledToken]:
        """The drawn tokens of some rows with log-probabilities, of `counts` likeliest ones too."""
        weights = self._weights(logits, largest, rows, np.ones(len(rows)))
        norms = largest + np.log(block_sums(weights).sum(axis=1))
        logprobs = (logits[rows, token_ids] - norms).tolist()
        top: list[tuple[tuple[int, float], ...]] = [()] * len(rows)
        for some in _parts_where(counts > 0):
            for among in gather(logits, rows[some], likeliest(self._copy(logits, rows[some]), counts[some])):
                members, order = some[among.rows], among.order[:, : counts.max()]
                columns = np.arange(len(order))[:, None], order
                values = among.logits[columns] - norms[members, None]
                for row, ids, of_row in zip(
                    members.tolist(), among.ids[columns].tolist(), values.tolist(), strict=True
                ):
                    pairs = zip(ids, of_row, strict=True)
                    top[row] = tuple(pair for pair in pairs if pair[1] > -math.inf)[: counts[row]]
        for token_id, logprob, likely in zip(token_ids.tolist(), logprobs, top, strict=True):
            yield SampledToken(token_id, logprob, likely)

    def _copy(self, logits: Floats, rows: Ids) -> Floats:
        """Of the rows; the next one overwrites it."""
        if self._memory.shape[1] != logits.shape[1]:
            self._memory = np.empty((_ROWS, logits.shape[1]), np.float32)
        copy: Floats = np.take(logits, rows, axis=0, out=self._memory[: len(rows)], mode="clip")
        return copy

    def _weights(self, logits: Floats, largest: Floats, rows: Ids, temperature: Numbers) -> Floats:
        """[S, vocab]: of each row's tokens, relative to the likeliest; the next copy overwrites them."""
        weights = self._copy(logits, rows)
        weights -= largest[:, None]
        if (temperature != 1).any():
            weights /= np.clip(temperature, *_TEMPERATURES).astype(np.float32)[:, None]
        return np.exp(weights, out=weights)


def _likeliest(logits: Floats) -> Ids:
    """The first of the largest of each row; -1 where one is not finite."""
    token_ids = logits.argmax(axis=1)  # a NaN's where there is one
    largest = logits[np.arange(len(logits)), token_ids]
    is_finite = (np.minimum.reduce(logits, axis=1) > -math.inf) & (largest < math.inf)
    return np.where(is_finite, token_ids, -1)


def _filters(params: list[SamplingParams], vocab_size: int) -> Filters:
    return Filters(
        np.array([one.temperature for one in params]),
        np.array([one.top_k if one.top_k < vocab_size else 0 for one in params]),
        np.array([one.top_p for one in params]),
        np.array([one.min_p for one in params]),
    )


def _parts(rows: list[int]) -> Iterator[Ids]:
    for start in range(0, len(rows), _ROWS):
        yield np.array(rows[start : start + _ROWS])


def _parts_where(chosen: Mask) -> Iterator[Ids]:
    """The indices of what is chosen, where anything is."""
    (indices,) = np.nonzero(chosen)
    if len(indices):
        yield indices


def _draw_among(among: Iterable[Candidates], filters: Filters, totals: Numbers, uniforms: Numbers) -> Ids:
    drawn = np.empty(len(uniforms), np.int64)
    for some in among:
        weights = kept_weights(some, filters.of(some.rows), totals[some.rows])
        drawn[some.rows] = some.ids[np.arange(len(weights)), draw_weighted(weights, uniforms[some.rows])]
    return drawn


def _adjusted(row: Floats, one: SampleRow, token_id: int) -> SampledToken | SampleFailure:
    """The likeliest token once the row is adjusted, `token_id` before; of a beam search its continuations."""
    if token_id < 0:
        return SampleFailure(f"logits of position {one.position} are not finite numbers")
    if one.sequence.work.beam is not None:
        return _continuations(row, one)
    if is_adjusted(one.sequence):
        token_id, why = adjust(row, one)
        if why:
            return SampleFailure(f"{NO_TOKEN} at position {one.position}: {why}")
    return SampledToken(token_id)


def _continuations(row: Floats, one: SampleRow) -> SampledToken | SampleFailure:
    """A beam's likeliest ones: log-probabilities are taken first and adjusted then, as transformers does."""
    with np.errstate(all="ignore"):
        largest = row.max()
        row -= largest + np.log(np.exp(row - largest).sum(dtype=np.float64)).astype(np.float32)
    if is_adjusted(one.sequence):
        adjust(row, one)
    num = min(num_candidates(one.sequence.work), len(row))
    ids = np.sort(np.argpartition(-row, num - 1)[:num])
    ids = ids[np.argsort(-row[ids], kind="stable")]
    top = tuple(pair for pair in zip(ids.tolist(), row[ids].tolist(), strict=True) if pair[1] > -math.inf)
    if not top:
        return SampleFailure(f"{NO_TOKEN} at position {one.position}")
    return SampledToken(top[0][0], top=top)
