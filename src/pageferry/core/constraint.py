"""What an output must match, as the sampler asks for it; `text.grammar` has the one there is."""

from collections.abc import Sequence
from typing import Protocol


class Constraint(Protocol):
    """One output's way through a grammar, made of the output alone; for one thread at a time."""

    problem: str  # why it can't go on; empty where it can

    def follow(self, output_ids: Sequence[int]) -> None:
        """The output is this now. Tokens that it had and has no more, as drafts not accepted, are taken back."""

    def allowed(self) -> bytes | None:
        """A bit for each token id, the lowest one of each byte first: whether it may come next.

        End-of-sequence ids may where the output matches; nothing else may once it can't go on. None where there is a
        `problem`.
        """
