"""Which workers can work together: kept up to date change by change, so that each costs little among hundreds."""

from collections.abc import Iterable
from itertools import count

from pageferry.core.errors import FailedPreconditionError
from pageferry.core.layout import CacheLayout
from pageferry.router.workers import Role, Worker
from pageferry.v1.worker_pb2 import Snapshot


class Fits:
    """Sets `misfit` of each worker, by itself and by the page layouts of the other role's workers.

    A worker fits if pages can be shipped between it and a connected one of the other role; where none is connected, it
    fits too. Of several addresses that lead to one process, as those of two IP families may, the first is used.
    """

    def __init__(self) -> None:
        self._count = count()
        self._numbers: dict[Worker, int] = {}
        self._snapshots: dict[Worker, Snapshot | None] = {}  # None: it is not connected
        # Those that are connected, and what they should be.
        self._by_process: dict[tuple[Role, bytes], dict[Worker, None]] = {}
        self._by_layout: dict[Role, dict[CacheLayout, dict[Worker, None]]] = {role: {} for role in Role}
        self._places: dict[Worker, tuple[tuple[Role, bytes], CacheLayout]] = {}

    def add(self, worker: Worker) -> None:
        """Of those of one process, the one that was added first is used."""
        self._numbers[worker] = next(self._count)

    def remove(self, worker: Worker) -> list[Worker]:
        """As `look`, of a worker that is looked at no more."""
        affected = self._take_out(worker)
        del self._numbers[worker]
        self._snapshots.pop(worker, None)
        return self._judge(affected)

    def look(self, worker: Worker) -> list[Worker]:
        """The worker may have come, gone, or become another one; returns those that are refused from now on."""
        snapshot = worker.view.snapshot if worker.is_connected else None
        if snapshot is self._snapshots.get(worker):
            return []
        self._snapshots[worker] = snapshot
        return self._judge([*self._take_out(worker), *self._put_in(worker), worker])

    def _put_in(self, worker: Worker) -> Iterable[Worker]:
        """Returns whom it may concern, as does `_take_out`."""
        layout = worker.view.layout
        if not worker.is_connected or worker.own_misfit() or layout is None:
            return []
        process = (worker.role, worker.view.incarnation)
        self._places[worker] = process, layout
        twins = self._by_process.setdefault(process, {})
        twins[worker] = None
        alike = self._by_layout[worker.role].setdefault(layout, {})
        alike[worker] = None
        return [*twins, *(self._others(worker.role) if len(alike) == 1 else ())]

    def _take_out(self, worker: Worker) -> Iterable[Worker]:
        if worker not in self._places:
            return []
        process, layout = self._places.pop(worker)
        twins, layouts = self._by_process[process], self._by_layout[worker.role]
        was_named = worker is self._named(worker.role)
        del twins[worker], layouts[layout][worker]
        if not twins:
            del self._by_process[process]
        if layouts[layout]:
            return [*twins, *(other for other in self._others(worker.role) if was_named and other.misfit)]
        del layouts[layout]
        return [*twins, *self._others(worker.role)]

    def _others(self, role: Role) -> Iterable[Worker]:
        """Those of the other role."""
        return [worker for worker in self._places if worker.role is not role]

    def _named(self, role: Role) -> Worker:
        """The one that stands for all of its role in what is wrong with the other role's."""
        return next(iter(next(iter(self._by_layout[role].values()))))

    def _judge(self, workers: Iterable[Worker]) -> list[Worker]:
        refused = []
        for worker in dict.fromkeys(workers):
            before, worker.misfit = worker.misfit, self._misfit(worker)
            if worker.misfit and worker.misfit != before:
                refused.append(worker)
        return refused

    def _misfit(self, worker: Worker) -> str:
        if worker not in self._places:
            return worker.own_misfit()
        process, ours = self._places[worker]
        first = min(self._by_process[process], key=self._numbers.__getitem__)
        if first is not worker:
            return f"it is the process that {first.address} leads to"
        ((role, layouts),) = (item for item in self._by_layout.items() if item[0] is not worker.role)
        if not layouts or any(_fits(worker.role, ours, layout) for layout in layouts):
            return ""
        other = self._named(role)
        _, theirs = self._places[other]
        names = {"ours": f"{worker.role.value} {worker.address}", "theirs": f"{other.role.value} {other.address}"}
        try:
            ours.check_equal(theirs, **names)
        except FailedPreconditionError as error:
            return error.message
        return ""


def _fits(role: Role, ours: CacheLayout, theirs: CacheLayout) -> bool:
    """Whether the prefill worker's pages can be shipped to the decode worker's."""
    return ours.ships_to(theirs) if role is Role.PREFILL else theirs.ships_to(ours)
