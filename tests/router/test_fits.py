"""Which workers fit together: as if all were looked at anew, at a cost that does not grow with them."""

import random
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import grpc
import pytest
from fake_engine import LAYOUT

from pageferry.core.formats import PageFormat
from pageferry.core.layout import CacheLayout
from pageferry.router.fits import Fits
from pageferry.router.fleet import Fleet
from pageferry.router.workers import Role, Worker, WorkerState
from pageferry.runtime.convert import layout_to_proto
from pageferry.v1.inference_pb2 import WorkerLoad
from pageferry.v1.worker_pb2 import WORKER_ROLE_DECODE, WORKER_ROLE_PREFILL, Snapshot, WatchResponse

MODEL = "tiny"
ROLES = {Role.PREFILL: WORKER_ROLE_PREFILL, Role.DECODE: WORKER_ROLE_DECODE}


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        yield channel


def connect(worker: Worker, incarnation: bytes, layout: CacheLayout = LAYOUT, model: str = MODEL) -> None:
    load = WorkerLoad(pools=[{} for _ in layout.groups])
    snapshot = Snapshot(role=ROLES[worker.role], model=model, layout=layout_to_proto(layout), load=load)
    worker.view.start_over()
    worker.view.apply(WatchResponse(sequence=1, incarnation=incarnation, snapshot=snapshot))
    worker._set_link(WorkerState.READY, "")


def misfits(workers: Sequence[Worker]) -> list[str]:
    """What is wrong with each, found by looking at all of them; of layouts, that they differ."""
    connected = [worker for worker in workers if worker.is_connected and not worker.own_misfit()]
    first: dict[tuple[Role, bytes], Worker] = {}
    for worker in connected:
        first.setdefault((worker.role, worker.view.incarnation), worker)
    found = []
    for worker in workers:
        twin = first.get((worker.role, worker.view.incarnation), worker)
        partners = [other for other in connected if other.role is not worker.role]
        pairs = [(worker, other) if worker.role is Role.PREFILL else (other, worker) for other in partners]
        layouts = [(sender.view.layout, receiver.view.layout) for sender, receiver in pairs]
        ships = [
            sender.ships_to(receiver) for sender, receiver in layouts if sender is not None and receiver is not None
        ]
        if worker not in connected:
            found.append(worker.own_misfit())
        elif twin is not worker:
            found.append(f"it is the process that {twin.address} leads to")
        else:
            found.append("" if not ships or any(ships) else "layout")
    return found


def of_layout(misfit: str) -> str:
    return "layout" if "page_size" in misfit or "format" in misfit else misfit


async def test_any_order_of_changes_gives_what_looking_at_all_would(channel: grpc.aio.Channel) -> None:
    layouts = [LAYOUT, replace(LAYOUT, page_size=32), replace(LAYOUT, format=PageFormat.parse("bf16"))]
    for seed in range(40):
        draw = random.Random(seed)
        workers = [Worker(draw.choice(list(Role)), f"w{number}:1", channel, MODEL) for number in range(6)]
        fits = Fits()
        for worker in workers:
            fits.add(worker)
        for _ in range(40):
            worker = draw.choice(workers)
            before = [one.misfit for one in workers]
            match draw.randrange(6):
                case 0:
                    worker._set_link(draw.choice([WorkerState.DOWN, WorkerState.STALE]), "gone")
                case 1:
                    workers.remove(worker)
                    refused = fits.remove(worker)
                    before = [one.misfit for one in workers]
                    worker = Worker(draw.choice(list(Role)), f"{worker.address}0", channel, MODEL)
                    workers.append(worker)
                    before.append("")
                    fits.add(worker)
                case 2:
                    connect(worker, bytes([draw.randrange(3)]) * 16, model="other")
                case _:  # of two, each address may lead to the same process
                    connect(worker, bytes([draw.randrange(4)]) * 16, draw.choice(layouts))
            refused = fits.look(worker)
            assert [of_layout(one.misfit) for one in workers] == misfits(workers), seed
            changed = [one for one, misfit in zip(workers, before, strict=True) if one.misfit not in ("", misfit)]
            assert set(refused) == set(changed), seed
            named = {address for one in workers for address in re.findall(r"w\d+:10*", one.misfit)}
            assert named <= {one.address for one in workers if one.is_connected}, seed


@pytest.mark.parametrize("num_workers", [20, 200])
async def test_what_a_change_costs_does_not_grow_with_the_number_of_workers(
    num_workers: int, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_looks = 0
    own_misfit, ships_to = Worker.own_misfit, CacheLayout.ships_to

    def count_own(worker: Worker) -> str:
        nonlocal num_looks
        num_looks += 1
        return own_misfit(worker)

    def count_ships(ours: CacheLayout, theirs: CacheLayout) -> bool:
        nonlocal num_looks
        num_looks += 1
        return ships_to(ours, theirs)

    monkeypatch.setattr(Worker, "own_misfit", count_own)
    monkeypatch.setattr(CacheLayout, "ships_to", count_ships)
    addresses = [f"10.0.0.{number}:1" for number in range(num_workers // 2)]
    fleet = Fleet(addresses, addresses, lambda *_: channel, model=MODEL)
    for number, worker in enumerate(fleet.workers):  # all start at once
        connect(worker, number.to_bytes(16, "big"))
        fleet._look(worker)
    assert fleet.is_ready
    assert num_looks <= 4 * num_workers
    num_looks = 0
    for worker in fleet.workers:  # each tells its load
        worker.view.apply(WatchResponse(sequence=2, incarnation=worker.view.incarnation, load=worker.view.load))
        fleet._look(worker)
    assert num_looks == 0
