"""Draws each sequence's next token from its row of logits.

Order: penalties and the ban on early stops, then log-probabilities (what is reported), then temperature, top-k, top-p,
min-p, and the draw. A row's result depends on that row, its parameters and (seed, position, choice) alone: rows share
numpy's calls, but no number of one row goes into another's.
"""

from collections.abc import Iterable, Iterator, Sequence as ListLike

import numpy as np
from torch import Tensor

from pageferry.core.plan import SampledToken, SampleFailure
from pageferry.core.sampling import SamplingParams
from pageferry.core.sequence import Sequence
from pageferry.engine.candidates import Candidates, Filters, Mask, gather, kept_weights, likeliest, probable
from pageferry.engine.draw import Floats, Ids, Numbers, block_sums, draw_from_all, draw_weighted, uniform

_ROWS = 16  # at once: what they take besides the logits stays in the processor's cache
_TEMPERATURES = np.float32(1e-30), np.float32(1e30)  # beyond, fp32 quotients are what they are here


class Sampler:
    """Keeps the memory that it works in; one call at a time."""

    def __init__(self) -> None:
        self._memory = np.empty((0, 0), np.float32)

    def sample(self, logits: Tensor, sequences: ListLike[Sequence]) -> tuple[SampledToken | SampleFailure, ...]:
        """One result for each row of `logits` [S, vocab] fp32, which is changed in place."""
        if not sequences:
            return ()
        with np.errstate(all="ignore"):  # overflows end at 0, infinity, or a row's failure
            return self._sample(logits.numpy(), sequences)

    def _sample(self, logits: Floats, sequences: ListLike[Sequence]) -> tuple[SampledToken | SampleFailure, ...]:
        rows = np.arange(len(logits))
        chosen = logits.argmax(axis=1)  # a NaN where there is one
        is_finite = np.isfinite(logits[rows, chosen]) & (logits.min(axis=1) > -np.inf)
        for row, sequence in enumerate(sequences):
            if is_finite[row] and _adjust(logits[row], sequence):
                chosen[row] = logits[row].argmax()
        largest = logits[rows, chosen]
        is_drawable = is_finite & (largest > -np.inf)
        drawn, reported = [], []
        for row in np.flatnonzero(is_drawable).tolist():
            params = sequences[row].work.sampling
            if not params.is_greedy:
                drawn.append(row)
            if params.num_logprobs is not None:
                reported.append(row)
        for some in _parts(drawn):
            chosen[some] = self._draw(logits, largest, some, [sequences[row] for row in some])
        results: list[SampledToken | SampleFailure] = [SampledToken(token_id) for token_id in chosen.tolist()]
        for some in _parts(reported):
            counts = [sequences[row].work.sampling.num_logprobs or 0 for row in some]
            for row, result in zip(
                some, self._report(logits, largest, some, chosen[some], np.array(counts)), strict=True
            ):
                results[row] = result
        for row in np.flatnonzero(~is_drawable).tolist():
            results[row] = _failure(sequences[row].num_output, is_finite=bool(is_finite[row]))
        return tuple(results)

    def _draw(self, logits: Floats, largest: Floats, rows: Ids, sequences: list[Sequence]) -> Ids:
        """A token id for each of some rows."""
        params = [sequence.work.sampling for sequence in sequences]
        filters = _filters(params, logits.shape[1])
        uniforms = np.array(
            [uniform(p.seed, one.num_output, one.work.choice) for p, one in zip(params, sequences, strict=True)]
        )
        drawn = np.empty(len(rows), np.int64)
        is_limited = (filters.top_p < 1) | (filters.min_p > 0)
        for some in _parts_where(filters.top_k > 0):
            mask = likeliest(self._copy(logits, rows[some]), filters.top_k[some])
            among = gather(logits, rows[some], mask)
            drawn[some] = _draw_among(among, filters.of(some), np.zeros(len(some)), uniforms[some])
        for some in _parts_where((filters.top_k == 0) & is_limited):
            weights = self._weights(logits, largest, rows[some], filters.temperature[some])
            totals = block_sums(weights).sum(axis=1)
            among = gather(logits, rows[some], probable(weights, totals, filters.of(some)))
            drawn[some] = _draw_among(among, filters.of(some), totals, uniforms[some])
        for some in _parts_where((filters.top_k == 0) & ~is_limited):
            weights = self._weights(logits, largest, rows[some], filters.temperature[some])
            drawn[some] = draw_from_all(weights, uniforms[some])
        return drawn

    def _report(
        self, logits: Floats, largest: Floats, rows: Ids, token_ids: Ids, counts: Ids
    ) -> Iterator[SampledToken]:
        """The drawn tokens of some rows with log-probabilities, of `counts` likeliest ones too."""
        weights = self._weights(logits, largest, rows, np.ones(len(rows)))
        norms = largest[rows] + np.log(block_sums(weights).sum(axis=1))
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
                    top[row] = tuple(zip(ids, of_row, strict=True))[: counts[row]]
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
        weights -= largest[rows, None]
        if (temperature != 1).any():
            weights /= np.clip(temperature, *_TEMPERATURES).astype(np.float32)[:, None]
        return np.exp(weights, out=weights)


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


def _adjust(row: Floats, sequence: Sequence) -> bool:
    """Whether it has changed the row."""
    params, stop = sequence.work.sampling, sequence.work.stop
    is_banning = stop.min_tokens > 0 and bool(stop.stop_token_ids) and sequence.num_output < stop.min_tokens
    if params.has_penalties:
        _penalise(row, sequence)
    if is_banning:
        row[list(stop.stop_token_ids)] = -np.inf
    return params.has_penalties or is_banning


def _penalise(row: Floats, sequence: Sequence) -> None:
    """Repetition (arXiv:1909.05858) counts prompt and output, presence and frequency the output alone."""
    params, counts = sequence.work.sampling, sequence.token_counts()
    ids, num_output = np.frombuffer(counts.ids, np.int64), np.frombuffer(counts.num_output, np.int64)
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


def _failure(position: int, *, is_finite: bool) -> SampleFailure:
    if is_finite:
        return SampleFailure(f"no token may follow at position {position}: all are stop ids before min_tokens")
    return SampleFailure(f"logits of position {position} are not finite numbers")
