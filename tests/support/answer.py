"""What one Generate stream gave, checked as it comes."""

from dataclasses import dataclass, field

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import FinishReason, Usage


@dataclass
class Answer:
    """What one Generate stream gave."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    started: pb.Started | None = None
    finished: pb.Finished | None = None

    def take(self, response: pb.GenerateResponse) -> None:
        assert self.finished is None, "an event after the terminal one"
        match response.WhichOneof("event"):
            case "started":
                assert self.started is None
                self.started = response.started
            case "delta":
                self.text += response.delta.text
                self.token_ids += [token.token_id for token in response.delta.tokens]
                self.positions += [token.position for token in response.delta.tokens]
                assert self.positions == list(range(len(self.positions))), f"positions {self.positions}"
            case "finished":
                self.finished = response.finished

    @property
    def usage(self) -> Usage:
        assert self.finished is not None
        return self.finished.usage

    @property
    def reason(self) -> str:
        assert self.finished is not None
        return FinishReason.Name(self.finished.reason).removeprefix("FINISH_REASON_").lower()
