"""Each request's trace: whole where no fault took a part of it, and no span twice in any case."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import grpc
from cluster import Stub
from traces import DECODE_RPC, PREFILL_RPC, SPLIT_SPANS, Span, counts, orphans, spans_of

from chaos.clients import Ended
from chaos.trouble import Trouble
from pageferry.v1 import inference_pb2 as pb

REQUEST_SPAN = ("pageferry.request", "SERVER")
FIRST_LOOK_S, NEXT_LOOK_S, PATIENCE_S = 1.0, 0.7, 10.0
_OF_SPLIT = {
    "pushed": lambda name: True,
    "local": lambda name: name != PREFILL_RPC and not name.startswith(("prefill.", "kv.")),
    "prefill_only": lambda name: name != DECODE_RPC and not name.startswith(("decode.", "kv.")),
}


class TraceCheck:
    """Looks each ended request's trace up in the routers' stores."""

    def __init__(
        self, stubs: Sequence[Stub], names: Mapping[str, str], trouble: Trouble, complain: Callable[[str], None]
    ) -> None:
        """`names` are those of the workers, by the address that routers call them at."""
        self.outcomes: Counter[str] = Counter()
        self._stubs = stubs
        self._names = names
        self._trouble = trouble
        self._complain = complain

    async def check(self, request: Ended) -> None:
        """Until the trace is as it should be, a fault excuses it, or patience is over, which is complained of."""
        if not request.trace_id:
            self.outcomes["none"] += 1
            return
        end = time.monotonic() + PATIENCE_S
        await asyncio.sleep(FIRST_LOOK_S)
        while True:
            spans = await self._fetch(request)
            doubled = [span for span, number in Counter(span.span_id for span in spans).items() if number > 1]
            problems = judge(spans, request.outcome)
            troubled = self._trouble.between(request.began - 1, time.monotonic())
            excused = not troubled.isdisjoint(self._involved(spans, request))
            if doubled or (problems and not excused and time.monotonic() > end):
                names = [f"{span.name} {span.kind} of {span.service}" for span in spans if span.span_id in doubled]
                self._complain(f"trace {request.trace_id} of {request}: twice {names}; {problems}")
            elif problems and not excused:
                await asyncio.sleep(NEXT_LOOK_S)
                continue
            self.outcomes["wrong" if doubled else "excused" if problems else "whole"] += 1
            return

    async def _fetch(self, request: Ended) -> list[Span]:
        """Workers send their spans to the first router, another router has its own."""
        found: list[Span] = []
        for router in sorted({0, request.router}):
            try:
                wanted = pb.GetTraceRequest(id=request.trace_id)
                found += spans_of((await self._stubs[router].GetTrace(wanted, timeout=5)).traces_data)
            except grpc.aio.AioRpcError:
                pass  # what is not there is missed, unless there is an excuse
        return found

    def _involved(self, spans: Sequence[Span], request: Ended) -> set[str]:
        """Whose trouble is an excuse: where no route is known, anyone's."""
        routes = [span.attributes for span in spans if span.name == "route"]
        workers = {
            self._names[attributes[key]]
            for attributes in routes
            for key in ("pageferry.route.prefill", "pageferry.route.decode")
            if key in attributes
        }
        return {"router0", f"router{request.router}"} | (workers or set(self._names.values()))


def judge(spans: list[Span], outcome: str) -> list[str]:
    """What is missing in a trace that nothing has disturbed."""
    found = counts(spans)
    problems = [f"{found[REQUEST_SPAN]} request spans"] if found[REQUEST_SPAN] != 1 else []
    problems += [f"orphan {name}" for name in orphans(spans)]
    if outcome == "OK":
        sources = [span.attributes["pageferry.route.source"] for span in spans if span.name == "route"]
        wanted = _OF_SPLIT[sources[-1]] if sources else _OF_SPLIT["pushed"]
        problems += [f"no {name} {kind}" for name, kind in SPLIT_SPANS - found if wanted(name)]
    return problems
