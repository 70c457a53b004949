"""A frontend whose generations are scripts: events and errors, in order, and gates that a test opens."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from opentelemetry.context import Context

from pageferry.v1 import inference_pb2 as pb, types_pb2 as types

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
Step = pb.GenerateResponse | Exception | asyncio.Event
Script = Sequence[Step] | Callable[[pb.GenerateRequest], Sequence[Step]]


def started(request_id: str = "r-1", prompt_tokens: int = 5) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        started=pb.Started(
            request_id=request_id,
            trace_id=TRACE_ID,
            model="tiny",
            prompt_tokens=prompt_tokens,
            traceparent=TRACEPARENT,
        )
    )


def delta(text: str, *tokens: types.GeneratedToken, choice: int = 0) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.Delta(text=text, tokens=tokens, choice=choice))


def choice_finished(choice: int, reason: types.FinishReason = types.FINISH_REASON_STOP, **fields: Any):
    return pb.GenerateResponse(choice_finished=pb.ChoiceFinished(choice=choice, reason=reason, **fields))


def token(position: int, token_id: int, logprob: float | None = None, top: Sequence[tuple[int, float]] = ()):
    generated = types.GeneratedToken(position=position, token_id=token_id)
    if logprob is not None:
        generated.logprobs.sampled.token_id = token_id
        generated.logprobs.sampled.logprob = logprob
        for top_id, top_logprob in top:
            generated.logprobs.top.add(token_id=top_id, logprob=top_logprob)
    return generated


def finished(reason: types.FinishReason = types.FINISH_REASON_STOP, matched_stop: str = "") -> pb.GenerateResponse:
    return pb.GenerateResponse(
        finished=pb.Finished(
            reason=reason,
            matched_stop=matched_stop,
            usage=types.Usage(prompt_tokens=5, completion_tokens=2, cached_tokens=4),
            timings=pb.Timings(
                queue_ms=1, prefill_ms=20, prefill_queue_ms=2, transfer_tail_ms=3, ttft_ms=25, total_ms=60
            ),
            pages=pb.HandoffStats(page_format="int8", shipped=3, cached=1, bytes=4096, hidden=0.75),
        )
    )


HELLO: tuple[Step, ...] = (started(), delta("Hel", token(0, 10)), delta("lo", token(1, 11)), finished())


class FakeFrontend:
    """Plays `script`, or what it gives for a request, and keeps what it was asked and how each generation went out."""

    def __init__(self, script: Script = HELLO) -> None:
        self.script = script
        self.ready = True
        self.clock = time.monotonic
        self.deadlines: list[float | None] = []
        self.requests: list[pb.GenerateRequest] = []
        self.parents: list[Context | None] = []
        self.authorizations: list[list[str]] = []
        self.num_closed = 0
        self.called, self.waiting, self.closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def generate(
        self,
        request: pb.GenerateRequest,
        *,
        deadline: float | None,
        parent: Context | None,
        authorization: Sequence[str] = (),
        protocol: object = None,
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.deadlines.append(deadline)
        self.authorizations.append([*authorization])
        self.parents.append(parent)
        self.called.set()
        try:
            for step in self.script(request) if callable(self.script) else self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    self.waiting.set()
                    await step.wait()
                else:
                    yield step
        finally:
            self.num_closed += 1
            self.closed.set()

    def check_caller(self, authorization: Sequence[str]) -> None:
        """Anybody may call."""

    def check_admin(self, authorization: Sequence[str], what: str) -> None:
        """Anybody may ask."""

    def list_models(self, authorization: Sequence[str] = ()) -> pb.ListModelsResponse:
        model = pb.Model(name="tiny", max_model_tokens=256, vocab_size=1000, ready=True)
        return pb.ListModelsResponse(models=[model])

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of no character from id 100 on."""
        return bytes([0xE2, token_id]) if token_id >= 100 else f"<{token_id}>".encode()
