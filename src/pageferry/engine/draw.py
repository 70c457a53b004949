"""Counter-based random numbers: a draw depends on (seed, position, choice) alone, in every process."""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


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
