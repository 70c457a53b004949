"""Random schedules of requests and faults, from a seed, and the shortest part of one that still fails."""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from fake_engine import GROUPED, LAYOUT

from pageferry.core.config import RouterConfig
from pageferry.runtime.page_wire import read_request
from sim import faults
from sim.nodes import Settings
from sim.world import OK, Request, World, simulate

_ENDS_S, _WHOLE_S = 200.0, 60.0
# All that a client may be told. What went wrong inside (INTERNAL, DATA_LOSS, FAILED_PRECONDITION) is not among it.
ALLOWED = (OK, "UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "cancelled")


@dataclass(frozen=True)
class Event:
    """`what` happens to `who`, a node's name, two that a link joins, or a request's; `value` is a duration or so."""

    at_s: float
    what: str
    who: str
    value: Any = 0.0


@dataclass(frozen=True)
class Script:
    """A deployment and what happens to it; `seed` decides all delays."""

    seed: int
    events: tuple[Event, ...]
    settings: Settings = field(default_factory=Settings)
    prefill: int = 2
    decode: int = 2

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {self.prefill} prefill, {self.decode} decode, {self.settings}"]
        return "\n".join(lines + [f"  {event}" for event in self.events])


def make_script(seed: int) -> Script:
    rng = Random(f"script {seed}")
    prefill, decode = rng.choice(((1, 1), (2, 2), (2, 2), (1, 2), (2, 3)))
    scheduler = replace(Settings().scheduler, max_num_seqs=rng.choice((2, 4)), max_waiting=rng.choice((1, 8)))
    settings = Settings(
        layout=rng.choice((LAYOUT, LAYOUT, GROUPED)),
        num_pages=rng.choice((24, 64)),
        lease_ms=rng.choice((1000, 10_000)),
        scheduler=scheduler,
        router=RouterConfig(
            local_prefill_tokens=rng.choice((0, 0, 8)),
            max_queue=rng.choice((3, 100)),
            resumes=rng.choice((0, 1, 1, 3)),
            prefill_retries=rng.choice((0, 1, 1)),
        ),
    )
    nodes = [f"p{number + 1}" for number in range(prefill)] + [f"d{number + 1}" for number in range(decode)]
    lasts_s = rng.choice((0.1, 0.3, 1.0))
    events = [_request(rng, number, lasts_s) for number in range(rng.randint(2, 10))]
    events += [_fault(rng, nodes, lasts_s) for _ in range(rng.randint(1, 8))]
    events += [
        Event(event.at_s + rng.uniform(0, 0.2), "cancel", event.who)
        for event in events
        if event.what == "ask" and rng.random() < 0.15
    ]
    events.sort(key=lambda event: event.at_s)
    return Script(seed, tuple(events), settings, prefill, decode)


def _request(rng: Random, number: int, lasts_s: float) -> Event:
    shared = rng.choice((0, 0, 8, 12))
    prompt = [*range(shared), *(rng.randrange(1000) for _ in range(rng.randint(1, 40)))]
    fields: dict[str, Any] = {"prompt": prompt, "num_tokens": rng.choice((1, 2, 5, 12, 25))}
    if rng.random() < 0.2:
        fields["deadline_s"] = round(rng.uniform(0.01, 3.0), 3)
    if rng.random() < 0.2:
        fields["read_s"] = rng.choice((0.01, 0.1))
    return Event(round(rng.uniform(0, lasts_s), 4), "ask", f"r{number}", fields)


def _fault(rng: Random, nodes: Sequence[str], lasts_s: float) -> Event:
    at_s = round(rng.uniform(0, 1.3 * lasts_s), 4)
    what = rng.choice((*_NODE_FAULTS, *_LINK_FAULTS, "pages"))
    if what in _NODE_FAULTS:
        own = nodes if what in ("hang", "fill") else (*nodes, "router")
        return Event(at_s, what, rng.choice(own), rng.choice((0.05, 0.5, 2.0, 20.0)))
    if what == "pages":
        prefill = rng.choice([name for name in nodes if name.startswith("p")])
        decode = rng.choice([name for name in nodes if name.startswith("d")])
        return Event(at_s, what, f"{prefill}-{decode}", rng.choice(faults.CHANGES))
    pair = rng.sample((*nodes, "router"), 2)
    return Event(at_s, what, "-".join(pair), rng.choice((0.05, 0.5, 5.0, 60.0)))


def play(script: Script) -> World:
    """Raises AssertionError where something doesn't hold that must."""

    async def scenario(world: World) -> None:
        began = world.loop.time()
        for event in script.events:
            await world.until(lambda at=event.at_s: world.loop.time() >= began + at, 5)
            world.say(f"event {event.what} {event.who} {event.value if event.what != 'ask' else ''}")
            Context().run(_happen, world, event)
        await world.until(lambda: not world.live_requests(), _ENDS_S, "the requests end")
        for request in world.requests:
            request.check(world.settings, ALLOWED)
        await _recover(world)

    return simulate(scenario, script.seed, script.settings, prefill=script.prefill, decode=script.decode)


async def _recover(world: World) -> None:
    await world.until(lambda: world.num_pending == 0, 100, "all faults are over")
    await asyncio.sleep(0.5)  # until all have heard of the last one
    await world.until(lambda: world.is_whole, _WHOLE_S, "all workers are ready")
    await world.until_idle(_WHOLE_S)
    after = world.ask(Request("after", list(range(100, 111)), 6))
    await world.until(lambda: bool(after.outcome), 20, "the request after it ends")
    after.check(world.settings, (OK,))
    await world.until_as_before(5)


def _happen(world: World, event: Event) -> None:
    if event.what == "ask":
        world.ask(Request(event.who, **event.value))
    elif event.what == "cancel":
        for request in world.requests:
            if request.name == event.who and request.task is not None:
                request.task.cancel()
    elif event.what in _LINK_FAULTS:
        _LINK_FAULTS[event.what](world, *event.who.split("-"), event.value)
    elif event.what == "pages":
        link = world.network.link(*event.who.split("-"))
        faults.tamper_once(link, event.value, world.rng, lambda frame: isinstance(read_request(frame.payload), list))
    else:
        _NODE_FAULTS[event.what](world, world.node(event.who), event.value)


_NODE_FAULTS: dict[str, Callable[[World, Any, float], None]] = {
    "kill": faults.kill,
    "drain": faults.drain,
    "pause": lambda world, node, seconds: faults.pause(world, node.process, seconds),
    "hang": faults.hang,
    "fill": faults.fill,
}
_LINK_FAULTS: dict[str, Callable[[World, str, str, float], None]] = {
    "reset": lambda world, one, other, _: faults.reset(c for c in world.network.of(one) if other in c.names),
    "black hole": lambda world, one, other, s: faults.black_hole(world, [world.network.link(one, other)], s),
    "slow": lambda world, one, other, s: faults.slow(world, [world.network.link(one, other)], s),
}


def failure_of(script: Script) -> str:
    """Why it fails; empty where it doesn't."""
    try:
        play(script)
    except AssertionError as error:
        return "\n".join([str(error), *error.__notes__]) if hasattr(error, "__notes__") else str(error)
    return ""


def shrink(script: Script) -> Script:
    """Leave out events for as long as it fails: first many together, then single ones."""
    size = max(1, len(script.events) // 2)
    while size:
        start = 0
        while start < len(script.events):
            shorter = replace(script, events=script.events[:start] + script.events[start + size :])
            if failure_of(shorter):
                script = shorter
            else:
                start += size
        size //= 2
    return script
