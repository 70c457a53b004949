"""How often tokens have come, for penalties."""

from array import array
from collections.abc import Sequence


class TokenCounts:
    """The different tokens of a growing list, each with its number in the output; a token costs the same at any length.

    `ids` are in the order in which they came first, and `num_output` are their counts; both are 64-bit, for numpy.
    """

    __slots__ = ("_index_of", "_num_counted", "ids", "num_output")

    def __init__(self) -> None:
        self.ids = array("q")
        self.num_output = array("q")
        self._index_of: dict[int, int] = {}
        self._num_counted = 0

    def count(self, token_ids: Sequence[int], num_prompt: int) -> None:
        """Count what has been appended to the list since the last call; its output begins at `num_prompt`."""
        for position in range(self._num_counted, len(token_ids)):
            index = self._index_of.setdefault(token_ids[position], len(self.ids))
            if index == len(self.ids):
                self.ids.append(token_ids[position])
                self.num_output.append(0)
            self.num_output[index] += position >= num_prompt
        self._num_counted = len(token_ids)
