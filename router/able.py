"""Which workers could take a request, now or later, and why none can."""

from pageferry.core.errors import FailedPreconditionError, PageferryError, UnavailableError
from pageferry.router.ask import Ask
from pageferry.router.candidates import PrefillState
from pageferry.router.fleet import Fleet
from pageferry.router.states import capacity_tokens, may_hold, prefill_state
from pageferry.router.workers import Role, Worker

RETRY_AFTER_MS = 1000  # once no worker is there


class AbleWorkers:
    """Those of a fleet, by what a request asks for; whether they have room is the policy's question."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def prefills(self, ask: Ask) -> list[Worker]:
        return [worker for worker in self._fleet.ready(Role.PREFILL) if ask.may_use(worker)]

    def _able_decodes(self, ask: Ask) -> list[Worker]:
        return [
            worker
            for worker in self._fleet.of(Role.DECODE)
            if worker.is_hopeful
            and ask.may_go_to(worker)
            and ask.has_model_of(worker)
            and (worker.view.layout is None or ask.demand.accepts(worker.view.layout))
        ]

    def decodes(self, ask: Ask) -> list[Worker]:
        able = [worker for worker in self._able_decodes(ask) if worker.is_ready]
        return [worker for worker in able if may_hold(worker, ask.demand.num_stored)]

    def prefill_states(self, ask: Ask) -> list[PrefillState]:
        priority = ask.demand.priority
        return [prefill_state(worker, ask.cached_tokens(worker), priority) for worker in self.prefills(ask)]

    def why_hopeless(self, ask: Ask) -> PageferryError | None:
        """Why it waits in vain; None where it doesn't."""
        demand = ask.demand
        if demand.is_one_token and not demand.local_only:
            alone = [w for w in self.prefills(ask) if w.view.layout is not None and demand.accepts(w.view.layout)]
            if (capacity_tokens(alone) or 0) >= demand.num_tokens:
                return None
        if lacking := self._why_no_format(ask):
            return FailedPreconditionError(lacking, reason="NO_PAGE_FORMAT")
        reason = self._fleet.why_hopeless() or self._why_no_decode(ask)
        return UnavailableError(reason, reason="NO_WORKER", retry_after_ms=RETRY_AFTER_MS) if reason else None

    def _why_no_format(self, ask: Ask) -> str:
        """Why no decode worker, ready or not, could keep its pages; empty where one could, or none was seen."""
        layouts = [worker.view.layout for worker in self._fleet.of(Role.DECODE)]
        if not layouts or any(layout is None or ask.demand.accepts(layout) for layout in layouts):
            return ""
        wanted = ", ".join(map(str, ask.demand.page_formats))
        there = ", ".join(sorted({str(layout.format) for layout in layouts if layout is not None}))
        return f"profile {ask.profile.name} wants pages in one of {wanted}; decode workers have {there}"

    def _why_no_decode(self, ask: Ask) -> str:
        """Why no decode worker that is there will do, as where the largest has gone since the request was admitted.

        It would otherwise wait at the head of the queue for good, and all others behind it.
        """
        if not (able := self._able_decodes(ask)):
            if ask.only is not None:
                return "none of the decode workers that it may go to is ready with pages in a format of its profile"
            if ask.fingerprint:
                return "no decode worker has the model that the answer began with"
            return f"no decode worker is ready that has pages in a format of profile {ask.profile.name}"
        if any(may_hold(worker, ask.demand.num_stored) for worker in able):
            return ""
        most = f"the largest decode worker's pages hold {capacity_tokens(able)} tokens"
        return f"{most}, the request needs {ask.demand.num_stored}"
