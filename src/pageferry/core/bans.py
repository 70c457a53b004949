"""Which tokens would complete a banned sequence."""

from collections.abc import Iterable, Sequence as ListLike


class Bans:
    """Banned sequences of token ids, by the token before their last one, so that few are looked at for a token."""

    __slots__ = ("_behind", "always")

    def __init__(self, banned: Iterable[tuple[int, ...]]) -> None:
        self.always: list[int] = []  # those that are banned by themselves
        self._behind: dict[int, list[tuple[int, ...]]] = {}
        for sequence in banned:
            if len(sequence) == 1:
                self.always.append(sequence[0])
            else:
                self._behind.setdefault(sequence[-2], []).append(sequence)

    def after(self, token_ids: ListLike[int], num_prompt: int) -> list[int]:
        """The ids that may not follow; `token_ids` are a prompt, which counts for nothing, and the output behind it."""
        found = list(self.always)
        num_output = len(token_ids) - num_prompt
        if num_output > 0:
            for sequence in self._behind.get(token_ids[-1], ()):
                num_before = len(sequence) - 1
                if num_before <= num_output and tuple(token_ids[-num_before:]) == sequence[:-1]:
                    found.append(sequence[-1])
        return found
