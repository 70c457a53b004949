"""A complete answer, of several that are told one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import FINISH_REASON_UNSPECIFIED, FinishReason


@dataclass(slots=True)
class Answer:
    """A complete answer; `score` is None where answers are not compared."""

    deltas: list[pb.Delta] = field(default_factory=list)
    reason: FinishReason = FINISH_REASON_UNSPECIFIED
    matched_stop: str = ""
    score: float | None = None

    def events(self, choice: int) -> Iterator[pb.GenerateResponse]:
        """All of it, as the answer of that number."""
        for delta in self.deltas:
            delta.choice = choice
            yield pb.GenerateResponse(delta=delta)
        yield self.end(choice)

    def end(self, choice: int) -> pb.GenerateResponse:
        end = pb.ChoiceFinished(choice=choice, reason=self.reason, matched_stop=self.matched_stop, score=self.score)
        return pb.GenerateResponse(choice_finished=end)
