"""Draws of tokens by counter-based random numbers: one depends on (seed, position, choice) alone, in every process.

A draw inverts the distribution function of a row's tokens, in the order of their ids, at a uniform number. Everything
here is of several rows at once, and each row's sums run within the row: a row's result has no part of another's.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Numbers = NDArray[np.float64]
Ids = NDArray[np.int64]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BLOCK = 512  # tokens that are summed before the sums are searched: a running sum over all takes ten times as long


def uniform(seed: int, position: int, choice: int) -> float:
    """In [0, 1), with 53 random bits."""
    state = _mix(seed)
    for word in (position, choice):
        state = _mix((state ^ word) & _MASK)
    return (state >> 11) * 2.0**-53


def _mix(state: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    state = (state + _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def block_sums(weights: Floats) -> Numbers:
    """[S, blocks] of each row's weights [S, vocab]."""
    sums: Numbers = np.add.reduceat(weights, np.arange(0, weights.shape[1], _BLOCK), axis=1).astype(np.float64)
    return sums


def draw_from_all(weights: Floats, uniforms: Numbers) -> Ids:
    """A token id for each row of weights [S, vocab] that need not sum to 1."""
    rows, vocab_size = np.arange(len(weights)), weights.shape[1]
    before = np.zeros((len(weights), -(-vocab_size // _BLOCK) + 1))
    np.cumsum(block_sums(weights), axis=1, out=before[:, 1:])
    targets = before[:, -1] * uniforms
    block = _invert(before[:, 1:], targets)
    ids = block[:, None] * _BLOCK + np.arange(_BLOCK)
    inside = weights[rows[:, None], np.minimum(ids, vocab_size - 1)].astype(np.float64)
    inside[ids >= vocab_size] = 0
    return ids[rows, _invert(inside.cumsum(axis=1), targets - before[rows, block])]


def draw_weighted(weights: Numbers, uniforms: Numbers) -> Ids:
    """A column for each row of weights [S, candidates]."""
    cumulative = weights.cumsum(axis=1)
    return _invert(cumulative, cumulative[:, -1] * uniforms)


def _invert(cumulative: Numbers, targets: Numbers) -> Ids:
    """The first column of each row that is above its target.

    Rounding may put the target at the very end: the last column that adds anything then.
    """
    last = (cumulative < cumulative[:, -1:]).sum(axis=1)
    columns: Ids = np.minimum((cumulative <= targets[:, None]).sum(axis=1), last)
    return columns
