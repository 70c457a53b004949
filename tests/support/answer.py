"""What one Generate stream gave, checked as it comes."""

from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from typing import Self

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import FinishReason, Logprobs, Usage


@dataclass
class Choice:
    """One of several answers."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    reason: str = ""
    matched_stop: str = ""
    score: float | None = None


@dataclass
class Answer:
    """What one Generate stream gave: the first answer, and all of them as `choices`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    num_first: int = 0  # tokens that came in one message with the first
    started: pb.Started | None = None
    finished: pb.Finished | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_logprobs: list[Logprobs] | None = None

    async def read(self, events: AsyncIterable[pb.GenerateResponse]) -> Self:
        """Take what comes until the stream ends, which may be by an error."""
        async for event in events:
            self.take(event)
        return self

    def take(self, response: pb.GenerateResponse) -> None:
        assert self.finished is None, "an event after the terminal one"
        match response.WhichOneof("event"):
            case "started":
                assert self.started is None
                self.started = response.started
            case "delta":
                choice = self.choices.setdefault(response.delta.choice, Choice())
                if response.delta.HasField("prompt_logprobs"):
                    assert self.prompt_logprobs is None, "the prompt's log-probabilities came twice"
                    self.prompt_logprobs = list(response.delta.prompt_logprobs.tokens)
                assert not choice.reason, f"more of choice {response.delta.choice} after its end"
                positions = [*range(len(choice.token_ids)), *(token.position for token in response.delta.tokens)]
                assert positions == list(range(len(positions))), f"positions {positions}"
                choice.text += response.delta.text
                choice.token_ids += [token.token_id for token in response.delta.tokens]
                if response.delta.choice:
                    return
                self.num_first = self.num_first or len(response.delta.tokens)
                self.text += response.delta.text
                self.token_ids += [token.token_id for token in response.delta.tokens]
                self.positions = positions
            case "choice_finished":
                end = response.choice_finished
                choice = self.choices[end.choice]
                choice.reason, choice.matched_stop = reason_name(end.reason), end.matched_stop
                choice.score = end.score if end.HasField("score") else None
            case "finished":
                self.finished = response.finished

    @property
    def usage(self) -> Usage:
        assert self.finished is not None
        return self.finished.usage

    @property
    def reason(self) -> str:
        assert self.finished is not None
        return reason_name(self.finished.reason)


def reason_name(reason: FinishReason) -> str:
    return FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
