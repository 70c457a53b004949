"""One try at a request on the workers that it was routed to: their calls, and their tokens as one stream.

Tokens come from the prefill worker (the first) and the decode worker (the same one again, then all others). Whatever
is over, is over at both workers: closing the stream of tokens ends both calls.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

from opentelemetry.trace import Span, use_span

from pageferry.core.errors import InternalError, PageferryError, ResourceExhaustedError
from pageferry.router.ask import Grant
from pageferry.router.feed import FedCall
from pageferry.router.merged_calls import Item, MergedCalls
from pageferry.router.policy import Source
from pageferry.router.progress import Progress
from pageferry.router.serving import Serving
from pageferry.router.timeline import Timeline, TryTimes
from pageferry.router.workers import Role, Worker
from pageferry.v1 import decode_pb2, prefill_pb2, types_pb2 as types

# How long calls whose work is done are given to end by themselves: the last figures come so, and their spans end well.
END_S = 0.2

Tokens = Sequence[types.GeneratedToken]


class Attempt:
    """Use `tokens` once, and close it; `finish` is set when the generation is complete."""

    def __init__(
        self,
        serving: Serving,
        grant: Grant,
        work: types.WorkItem,
        timeline: Timeline,
        span: Span,
        *,
        timeout_s: float | None,
        max_unread_tokens: int,
    ) -> None:
        """`span` is the parent of the calls' spans."""
        self.finish: types.FinishReason = types.FINISH_REASON_UNSPECIFIED
        self.hypotheses: Sequence[types.Hypothesis] = ()  # of a beam search, which gives no tokens before
        self.prompt_logprobs: types.PromptLogprobs | None = None  # with the first token, where asked for
        self._grant = grant
        self._workers = grant.workers
        self._source = grant.route.source
        self._progress = Progress(self._source, self._workers)
        self._work = work
        self._tells_prompt = work.sampling.HasField("prompt_logprobs")
        # The prefill worker is to tell of the prompt, as nobody else can, and has not yet.
        self._awaits_prompt = self._tells_prompt and self._source is Source.PUSHED
        self._times = TryTimes(timeline)
        self._timeout_s = timeout_s
        self._max_unread_tokens = max_unread_tokens
        self._span = span
        self._record = serving.telemetry.record
        self._calls: MergedCalls[Role] = MergedCalls()
        self._awaited: set[Role] = set()  # calls that should still end by themselves, once `finish` is set
        self._clock = serving.clock
        self._began = self._clock()
        self._fed: FedCall | None = None  # the decode call, where its worker's feed is live
        self._early: list[types.GeneratedToken] = []  # that wait for the first token, which tells of the prompt

    async def tokens(self) -> AsyncGenerator[Tokens, None]:
        """Batches as they come; a token may come twice, once from each worker.

        Raises RefusedError, WorkerFailedError, or the PageferryError that ends the request.
        """
        relying = ExitStack()
        for role, worker in self._workers.items():
            relying.enter_context(worker.relied_on(partial(self._calls.fail, role)))
        try:
            if self._source is Source.PREFILL_ONLY:
                self._call_prefill(None)
            else:
                self._call_decode()
            while not self.finish or self._progress.open & self._awaited:
                item = await self._calls.get(self._progress.patience_s)
                if item is None:
                    self._on_silence()
                elif tokens := self._take(item):
                    yield tokens
            if self._early:
                yield self._take_early()
        finally:
            relying.close()
            if self._fed is not None:
                self._decode.feed.leave(self._fed)
            await self._calls.close()
            self._grant.release()

    @property
    def has_decoded(self) -> bool:
        """Whether the decode worker has drawn a token of its own: the prompt's pages can be found there by then."""
        return self._progress.num_decoded > (self._source is Source.PUSHED)

    def end(self, error: PageferryError) -> None:
        """Make `tokens` raise the error instead of the next message."""
        self._calls.interrupt(error)

    def _call_decode(self) -> None:
        source = decode_pb2.PROMPT_SOURCE_LOCAL if self._source is Source.LOCAL else decode_pb2.PROMPT_SOURCE_PUSHED
        request = decode_pb2.DecodeRequest(work=self._work, source=source)
        self._fed = self._decode.feed.join(self._keep)
        if self._fed is not None:
            request.subscription, request.call = self._fed.subscription, self._fed.number
        self._progress.open.add(Role.DECODE)
        with _under(self._span):
            call = self._decode.decode.Decode(request, timeout=self._timeout_s)
        self._calls.add(Role.DECODE, call, self._fed.own_messages(call) if self._fed is not None else None)

    def _keep(self, events: decode_pb2.CallEvents) -> None:
        """Keep what the feed tells until it is read, up to a limit."""
        num_unread, limit = len(self._calls.put(Role.DECODE, events).tokens), self._max_unread_tokens
        if num_unread > limit:
            message = f"{num_unread} tokens of the answer are unread, max_unread_tokens is {limit}"
            self.end(ResourceExhaustedError(message, reason="SLOW_READER"))

    def _call_prefill(self, target: prefill_pb2.HandoffTarget | None) -> None:
        request = prefill_pb2.PrefillRequest(work=self._work, target=target)
        self._progress.open.add(Role.PREFILL)
        with _under(self._span):
            self._calls.add(Role.PREFILL, self._prefill.prefill.Prefill(request, timeout=self._timeout_s))

    @property
    def _prefill(self) -> Worker:
        return self._workers[Role.PREFILL]

    @property
    def _decode(self) -> Worker:
        return self._workers[Role.DECODE]

    def _take(self, item: Item[Role]) -> Tokens:
        if item.message is None:
            self._progress.on_end(item.name, item.error, is_over=bool(self.finish))
            return self._take_early() if item.name is Role.PREFILL else ()
        if isinstance(item.message, decode_pb2.CallEvents):
            return self._on_feed(item.message)
        match item.message.WhichOneof("event"):
            case "reserved":
                self._on_reserved(item.message.reserved)
            case "tokens":
                return self._on_tokens(item.message.tokens)
            case "completed":
                self._on_completed(item.message.completed)
            case "accepted":
                if self._grant.prefill_work is not None:
                    self._grant.prefill_work.accepted = True
            case "first_token":
                return self._on_first_token(item.message.first_token)
            case "shipped":
                self._progress.is_shipped = True
                shipped = item.message.shipped
                self._times.shipped(shipped)
                self._record.transferred(self._prefill.address, self._decode.address, shipped.pages, shipped.bytes)
        return ()

    def _on_feed(self, events: decode_pb2.CallEvents) -> Tokens:
        tokens = self._on_tokens(events) if events.tokens else ()
        if events.HasField("completed"):
            self._on_completed(events.completed)
        return tokens

    def _on_reserved(self, reserved: decode_pb2.Reserved) -> None:
        self._progress.is_reserved = True
        if self._grant.decode_work is not None:
            self._grant.decode_work.accepted = True
        if self._source is Source.LOCAL:
            return  # it computes already: the wait for this message is no part of the time to first token
        self._times.reserved(reserved, self._decode.view.layout, self._clock() - self._began)
        self._call_prefill(
            prefill_pb2.HandoffTarget(
                ticket=reserved.ticket,
                kv_endpoint=reserved.kv_endpoint,
                cached_tokens=reserved.cached_tokens,
                layout=reserved.layout,
            )
        )

    def _on_tokens(self, message: decode_pb2.Tokens | decode_pb2.CallEvents) -> Tokens:
        self._note_prompt(message)
        if message.HasField("first_steps"):
            self._times.first_steps(message.first_steps, is_local=self._source is Source.LOCAL)
        self._progress.on_tokens(len(message.tokens))
        if self._awaits_prompt:
            self._early += message.tokens
            return () if Role.PREFILL in self._progress.open else self._take_early()
        return message.tokens

    def _take_early(self) -> Tokens:
        if self._early and self._awaits_prompt:
            message = f"prefill worker {self._prefill.address} ended without a word on the prompt"
            raise self._progress.prefill_failed(InternalError(message, reason="NO_PROMPT_LOGPROBS"))
        tokens, self._early = self._early, []
        return tokens

    def _note_prompt(self, message: prefill_pb2.FirstToken | decode_pb2.Tokens | decode_pb2.CallEvents) -> None:
        if self._tells_prompt and message.HasField("prompt_logprobs"):
            self.prompt_logprobs = message.prompt_logprobs

    def _on_first_token(self, first: prefill_pb2.FirstToken) -> Tokens:
        self._progress.has_first_token = True
        self._awaits_prompt = False
        self._note_prompt(first)
        self._times.prefilled(first)
        if first.finish_reason:
            self._finish(first.finish_reason, Role.PREFILL)
        elif self._source is Source.PREFILL_ONLY:
            self._finish(types.FINISH_REASON_LENGTH, Role.PREFILL)
        return self._take_early() or ((first.token,) if first.HasField("token") else ())

    def _on_completed(self, completed: decode_pb2.Completed) -> None:
        self.hypotheses = completed.hypotheses
        self._times.first_steps(completed, is_local=self._source is Source.LOCAL)
        self._finish(completed.reason, Role.PREFILL, Role.DECODE)

    def _finish(self, reason: types.FinishReason, *awaited: Role) -> None:
        self.finish = reason
        self._awaited, self._progress.patience_s = set(awaited), END_S

    def _on_silence(self) -> None:
        """What was waited for did not come in time."""
        if self.finish:
            self._awaited.clear()
        elif self._progress.failure is not None:
            raise self._progress.prefill_failed(self._progress.failure)


def _under(span: Span) -> AbstractContextManager[Span]:
    """What begins inside is its child; how that goes is nothing that it tells of."""
    return use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False)
