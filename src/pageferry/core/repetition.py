"""Whether an output has begun to repeat itself."""

from collections.abc import Sequence as ListLike

from pageferry.core.sampling import MAX_REPEATED_TOKENS


class RepetitionGuard:
    """Told of an output's tokens once each, it knows how often the output ends with the same run of tokens.

    For each length of a run it counts how many tokens at the end equal the one that many before them: a token costs
    at most MAX_REPEATED_TOKENS comparisons, however long the output is.
    """

    __slots__ = ("_equal", "_num_seen")

    def __init__(self) -> None:
        self._equal = [0] * (MAX_REPEATED_TOKENS + 1)  # of each length
        self._num_seen = 0

    def repeats(self, token_ids: ListLike[int], num_prompt: int, most: int) -> bool:
        """Whether the output, `token_ids` behind the prompt, ends with a run that comes `most` times in a row.

        Tokens are only ever appended between calls.
        """
        found = False
        for index in range(num_prompt + self._num_seen, len(token_ids)):
            found = self._take(token_ids, index, num_prompt, most)
        self._num_seen = len(token_ids) - num_prompt
        return found

    def _take(self, token_ids: ListLike[int], index: int, num_prompt: int, most: int) -> bool:
        token_id, equal, found = token_ids[index], self._equal, False
        for length in range(1, min(MAX_REPEATED_TOKENS, index - num_prompt) + 1):
            if token_ids[index - length] == token_id:
                equal[length] += 1
                found |= equal[length] >= length * (most - 1)
            else:
                equal[length] = 0
        return found
