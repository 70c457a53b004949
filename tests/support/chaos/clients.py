"""Clients of a chaos run: each sends one request, reads it as its script says, and judges what came."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from answer import Answer
from cluster import Stub

from chaos.asks import problems, request_of
from chaos.prompts import Golden
from chaos.script import PATIENCE_S, Ask
from chaos.trouble import Trouble
from pageferry.runtime.errors import from_rpc_error
from pageferry.v1 import inference_pb2 as pb

# What a request may end with beside success; UNAVAILABLE only if its router is disturbed, or more than one worker: what
# one alone had begun, another goes on with.
ALLOWED = {"UNAVAILABLE", "RESOURCE_EXHAUSTED"}
_SLOW_READS, _SLOW_S = 12, 0.15


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that is over, as its client saw it; times are seconds of the monotonic clock."""

    router: int
    trace_id: str  # "" where no event came
    outcome: str  # OK, cancelled, or a status
    began: float
    ended: float


class Clients:
    """Sends requests and keeps count; `complain` is told of each wrong that they see."""

    def __init__(
        self, stubs: Sequence[Stub], goldens: Sequence[Golden], trouble: Trouble, complain: Callable[[str], None]
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.num_tokens = 0
        self.slowest_s = 0.0  # of those that succeeded, without slow readers
        self._stubs = stubs
        self._goldens = goldens
        self._trouble = trouble
        self._complain = complain

    async def ask(self, ask: Ask) -> Ended:
        """One request from its beginning to its end, which comes by its timeout at the latest."""
        began, answer = time.monotonic(), Answer()
        request = request_of(ask, self._goldens[ask.prompt])
        call = self._stubs[ask.router].Generate(request, timeout=ask.timeout_s)
        try:
            outcome = await self._read(call, ask, answer)
        except grpc.aio.AioRpcError as error:
            outcome = _status(error)
            self._judge_failure(ask, answer, began, error)
        except AssertionError as error:
            outcome = "wrong"
            self._complain(f"{ask}: {error}")
        finally:
            call.cancel()
        ended = time.monotonic()
        if outcome != "wrong":
            self._judge_tokens(ask, answer, outcome)
        self.outcomes[outcome] += 1
        self.num_tokens += len(answer.token_ids)
        if outcome == "OK" and ask.manner == "read":
            self.slowest_s = max(self.slowest_s, ended - began)
        return Ended(ask.router, answer.started.trace_id if answer.started else "", outcome, began, ended)

    async def _read(
        self, call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]", ask: Ask, answer: Answer
    ) -> str:
        num_read = 0
        while ask.manner != "cancel" or num_read < ask.num_events:
            response = await call.read()
            if response is grpc.aio.EOF:
                code = await call.code()
                if code is not grpc.StatusCode.OK:
                    metadata = await call.initial_metadata(), await call.trailing_metadata()
                    raise grpc.aio.AioRpcError(code, *metadata, await call.details())
                assert answer.finished is not None, "the stream ended well without a terminal event"
                return "OK"
            answer.take(response)
            num_read += 1
            if ask.manner == "slow" and num_read <= _SLOW_READS:
                await asyncio.sleep(_SLOW_S)
        return "cancelled"

    def _judge_failure(self, ask: Ask, answer: Answer, began: float, error: grpc.aio.AioRpcError) -> None:
        status = _status(error)
        is_late = status == "DEADLINE_EXCEEDED" and ask.timeout_s < PATIENCE_S
        troubled = self._trouble.between(began, time.monotonic())
        is_excused = status != "UNAVAILABLE" or f"router{ask.router}" in troubled or len(troubled) > 1
        if not is_late and not (status in ALLOWED and is_excused):
            what = f"{status} after {len(answer.token_ids)} tokens, with {sorted(troubled)} in trouble"
            self._complain(f"{ask}: ended with {what}: {error.details()}")
        elif answer.finished is not None and not is_late:  # a client's own clock may run out behind the last event
            self._complain(f"{ask}: ended with {status} after its terminal event")

    def _judge_tokens(self, ask: Ask, answer: Answer, outcome: str) -> None:
        for problem in problems(ask, self._goldens[ask.prompt], answer, is_whole=outcome == "OK"):
            self._complain(f"{ask}: {problem}")


def _status(error: grpc.aio.AioRpcError) -> str:
    """As the client library names it, which takes a call that a stopping server dropped for one that found none."""
    dropped = error.code() is grpc.StatusCode.CANCELLED
    return from_rpc_error(error).code if dropped else str(error.code().name)
