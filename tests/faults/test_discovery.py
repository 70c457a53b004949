"""Workers that come and go behind names under load, in virtual time: every request ends well, and nothing is left."""

import asyncio
import re

import pytest
from sim.workers import WorkerNode
from sim.world import OK, Request, World, simulate

NUM_REQUESTS = 80
EVERY_S = 0.35
SOON_S = 4.0  # two lookups


def leaves(world: World, node: WorkerNode) -> None:
    world.behind[node.name[0]].discard(node.name)


def own_tasks(world: World) -> list[str]:
    """The router's, whichever workers they are for."""
    return sorted(re.sub("[0-9]", "", name) for name in world.router.task_names())


async def takes_work(world: World, node: WorkerNode) -> None:
    """It is found, and requests come to it."""
    await world.until(lambda: world.router.knows(node), SOON_S, f"{node.name} is known")
    await world.until(
        lambda: any("Watch" not in call.method for call in node.live_calls()), SOON_S, f"{node.name} has work"
    )


def is_known(world: World, node: WorkerNode) -> bool:
    return any(worker.address == node.address for worker in world.router.fleet.workers)


async def load(world: World) -> None:
    for number in range(NUM_REQUESTS):
        prompt = [1 + (number * 7 + index) % 60 for index in range(3 + number % 17)]
        world.ask(Request(f"r{number}", prompt, 8 + number % 40, deadline_s=60))
        await asyncio.sleep(EVERY_S)
    await asyncio.gather(*(request.task for request in world.requests if request.task is not None))


async def come_and_go(world: World) -> None:
    tasks = own_tasks(world)
    requests = asyncio.create_task(load(world))
    (first, second), (prefill, _) = list(world.decodes), list(world.prefills)
    await asyncio.sleep(1)
    await takes_work(world, third := world.join("d3"))
    leaves(world, first)  # as a cluster does before the signal
    first.drain()
    await world.until(lambda: not is_known(world, first), 60, "the one that drained is forgotten")
    second.kill()
    leaves(world, second)
    await world.until(lambda: not is_known(world, second), SOON_S + 2, "the one that died is forgotten")
    world.lookups_fail = True
    fourth = world.join("d4")
    await asyncio.sleep(3 * SOON_S)
    assert not is_known(world, fourth) and world.router.knows(third)
    world.lookups_fail = False
    await takes_work(world, fourth)
    prefill.kill()
    leaves(world, prefill)
    await takes_work(world, world.join("p3"))
    await requests
    await world.until_idle(60)
    await world.until(lambda: own_tasks(world) == tasks, 5, f"no more tasks run than {tasks}")


@pytest.mark.parametrize("seed", range(2))
def test_workers_come_and_go_and_no_request_is_hurt(seed: int) -> None:
    world = simulate(come_and_go, seed, named=True)
    assert len(world.requests) == NUM_REQUESTS
    for request in world.requests:
        request.check(world.settings, {OK})


async def flap(world: World) -> None:
    """Each lookup leaves out another one of three decode workers."""
    requests = asyncio.create_task(load(world))
    names = sorted(world.behind["d"])
    number = 0
    while not requests.done():
        world.behind["d"] = set(names) - {names[number % 3]}
        number += 1
        await asyncio.sleep(2.0)
    await requests
    world.behind["d"] = set(names)
    await world.until(lambda: world.is_whole, 10, "all are known again")
    await world.until_idle(60)


def test_answers_that_leave_out_one_after_the_other_hurt_no_request() -> None:
    world = simulate(flap, named=True, decode=3)
    for request in world.requests:
        request.check(world.settings, {OK})
