"""What an output must match, as the sampler asks for it; `text.grammar` has the one there is."""

from collections.abc import Sequence
from typing import Protocol


class Constraint(Protocol):
    """One output's way through a grammar, made again from the output wherever that is known; for one thread at a time.

    It goes forward only: with tokens that are drawn and stay.
    """

    num_accepted: int  # tokens of the output
    problem: str  # why it can't go on; empty where it can

    def accept(self, token_ids: Sequence[int]) -> None:
        """The output goes on with these."""

    def allowed(self) -> bytes | None:
        """A bit for each token id, the lowest one of each byte first: whether it may come next.

        End-of-sequence ids may where the output matches; nothing else may once it can't go on. None where there is a
        `problem`.
        """
