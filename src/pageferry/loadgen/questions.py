"""The requests of a run: when, how long, and with which prompt; the same ones for the same seed."""

import itertools
from collections.abc import Iterator
from random import Random

from pageferry.loadgen.arrivals import arrivals, read_trace
from pageferry.loadgen.load import DEFAULT_REQUESTS, Load
from pageferry.loadgen.prompts import PromptMaker
from pageferry.loadgen.target import Question


class Questions:
    """Those of one measurement; no prompt comes twice, in whatever run. Reads the trace of --replay."""

    def __init__(self, load: Load, prompts: PromptMaker) -> None:
        self._load = load
        self._prompts = prompts
        self._random = Random(load.seed)
        self._traced = [] if load.replay is None else read_trace(load.replay, load.speed or 1.0)

    @property
    def shared_tokens(self) -> int:
        """The most that a prompt has in common with others."""
        return self._prompts.shared_tokens

    def endless(self) -> Iterator[Question]:
        """Without a time, each to be sent when there is room."""
        while True:
            yield self._drawn(None)

    def of_run(self) -> tuple[Iterator[Question], int | None]:
        """Those of the load's one run, and their number where it is known beforehand."""
        load = self._load
        if load.mode == "replay":
            return self._of_trace()
        requests = DEFAULT_REQUESTS if load.requests is None and load.duration_s is None else load.requests
        if load.rate is None:
            return itertools.islice(self.endless(), requests), requests
        times = self._times(load.rate)
        if (duration_s := load.duration_s) is not None:
            times = itertools.takewhile(lambda at_s: at_s < duration_s, times)
        return (self._drawn(at_s) for at_s in itertools.islice(times, requests)), requests

    def at_rate(self, rate: float, requests: int) -> Iterator[Question]:
        """Of one trial, at so many requests a second."""
        return (self._drawn(at_s) for at_s in itertools.islice(self._times(rate), requests))

    def _times(self, rate: float) -> Iterator[float]:
        return arrivals(self._load.arrivals or "poisson", rate, self._load.seed)

    def _of_trace(self) -> tuple[Iterator[Question], int]:
        traced, duration_s = self._traced[: self._load.requests], self._load.duration_s
        if duration_s is not None:
            traced = [request for request in traced if request.at_s < duration_s]
        made = (self._question(request.input_tokens, request.output_tokens, request.at_s) for request in traced)
        return made, len(traced)

    def _drawn(self, at_s: float | None) -> Question:
        load = self._load
        return self._question(load.input_tokens.draw(self._random), load.output_tokens.draw(self._random), at_s)

    def _question(self, input_tokens: int, output_tokens: int, at_s: float | None) -> Question:
        seed = self._random.getrandbits(31) if self._load.temperature else None
        return Question(self._prompts.make(input_tokens), input_tokens, output_tokens, at_s, seed)
