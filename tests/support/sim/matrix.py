"""Each fault at each state of a request: what becomes of the request, and when all that it held is back."""

import asyncio
import math
from dataclasses import dataclass

from pageferry.runtime.page_wire import read_request
from sim.columns import DEADLINE, VICTIMS, Fault, Target
from sim.faults import CHANGES, tamper_once
from sim.states import MESSAGES, NUM_PROMPT, STATES, State, arm
from sim.world import OK, Request, World, simulate

_ENDS_S = 150.0  # longest of a request under any fault
_WHOLE_S = 30.0  # from the fault's end until all is as before
GONE = "gone"


@dataclass(frozen=True)
class Case:
    """One cell. `victim` is a role; of pages, `fault` is the change's name."""

    state: State
    fault: Fault | str
    victim: str

    @property
    def fault_name(self) -> str:
        return self.fault if isinstance(self.fault, str) else self.fault.name

    @property
    def id(self) -> str:
        return f"{self.victim}-{self.fault_name}-{self.state.name}".replace(" ", "_")


@dataclass(frozen=True)
class Outcome:
    """Seconds are from the strike: until the request ended, and until all that could act held nothing any more."""

    words: str
    ended_s: float
    back_s: float

    def __str__(self) -> str:
        ended_s, back_s = math.ceil(self.ended_s - 0.5), math.ceil(self.back_s - 0.5)
        ended = f", {ended_s} s" if ended_s and self.words != GONE else ""
        return f"{self.words}{ended}" + (f" (back {back_s} s)" if back_s > (ended_s if ended else 0) + 1 else "")


def cases() -> list[Case]:
    process = [
        Case(state, fault, victim)
        for victim, faults in VICTIMS.items()
        for fault in faults
        for state in STATES
        if applies(state, victim)
    ]
    pages = [Case(state, change, "pages") for change in CHANGES for state in MESSAGES]
    return process + pages


def applies(state: State, victim: str) -> bool:
    if victim == "prefill":
        return not state.name.startswith("local")
    return victim != "decode" or state.name != "one token"


def victim_of(world: World, request: Request, role: str) -> str:
    """The name of the role's node that the request is at, or where it is at none yet, of the first."""
    if role in ("router", "client"):
        return role
    choices = world.router.frontend._live._requests.get(request.name)
    generation = choices._generations.get(0) if choices is not None else None
    attempt = generation._current if generation is not None else None
    worker = getattr(attempt._grant, role) if attempt is not None else None
    first = world.prefills[0] if role == "prefill" else world.decodes[0]
    return worker.address.partition(":")[0] if worker is not None else first.name


def run_case(case: Case, seed: int = 1) -> Outcome:
    """Raises AssertionError where something doesn't hold that must."""
    deadline_s = None
    if case.fault is DEADLINE:  # which is then, and changes nothing before
        _, deadline_s = _simulated(case, seed, None)
    return _simulated(case, seed, deadline_s)[0]


def _simulated(case: Case, seed: int, deadline_s: float | None) -> tuple[Outcome, float]:
    """And the seconds from the request's start to the strike."""
    played: list[tuple[Outcome, float]] = []

    async def scenario(world: World) -> None:
        played.append(await _play(world, case, deadline_s))

    simulate(scenario, seed, case.state.settings)
    return played[0]


async def _play(world: World, case: Case, deadline_s: float | None) -> tuple[Outcome, float]:
    ahead = [Request(f"ahead{number}", [500 + number] * 9, 30) for number in range(case.state.num_ahead)]
    for other in ahead:
        world.ask(other)
    if ahead:
        await world.until(lambda: all(other.answer.token_ids for other in ahead), 5, "those ahead run")
    request = Request("main", list(range(1, NUM_PROMPT + 1)), case.state.num_tokens, deadline_s)
    struck: list[Target] = []

    def strike() -> None:
        name = victim_of(world, request, case.victim if case.victim != "pages" else "decode")
        target = Target(world, request, name)
        if isinstance(case.fault, str):
            prefill = victim_of(world, request, "prefill")
            wanted = MESSAGES[case.state]
            link = world.network.link(prefill, name)
            tamper_once(link, case.fault, world.rng, lambda frame: wanted(read_request(frame.payload)))
        else:
            case.fault.strike(target)
        struck_at.append(world.loop.time())
        struck.append(target)
        world.say(f"{case.id} strikes {name}")

    struck_at: list[float] = []
    arm(world, request, case.state, strike)
    world.ask(request)
    await world.until(lambda: bool(struck), 10, "the state is reached")
    await world.until_idle(_ENDS_S)
    back_s = world.loop.time() - struck_at[0]
    await world.until(lambda: not world.live_requests(), _ENDS_S, "the requests end")
    outcome = Outcome(_words(world, request), request.ended - struck_at[0], back_s)
    for other in (request, *ahead):
        other.check(world.settings, _allowed(case))
    await _check_recovery(world)
    return outcome, struck_at[0] - request.began


async def _check_recovery(world: World) -> None:
    """All is as before once the fault is over."""
    await world.until(lambda: world.num_pending == 0, _ENDS_S, "the fault is over")
    await asyncio.sleep(0.5)  # until all have heard of it
    await world.until(lambda: world.is_whole, _WHOLE_S, "all workers are ready")
    after = world.ask(Request("after", list(range(100, 115)), 6))
    await world.until(lambda: bool(after.outcome), 20, "the request after it ends")
    after.check(world.settings, (OK,))
    await world.until_as_before(5)


def _allowed(case: Case) -> tuple[str, ...]:
    """What a request may end with: a fault of a worker loses nothing."""
    if case.victim == "router":
        return (OK, "UNAVAILABLE")
    if case.victim == "client":
        return (OK, "UNAVAILABLE", "DEADLINE_EXCEEDED", "cancelled", "")
    return (OK,)


def _words(world: World, request: Request) -> str:
    if request.outcome != OK:
        return request.outcome or GONE
    metrics = world.router.metrics.registry
    found = {
        "other prefill": metrics.get_sample_value("pageferry_prefill_failures_total", {"next": "other_prefill"}),
        "computed on decode": metrics.get_sample_value("pageferry_prefill_failures_total", {"next": "local"}),
        "resumed": metrics.get_sample_value("pageferry_resumes_total", {"outcome": "resumed"}),
        "moved": metrics.get_sample_value("pageferry_resumes_total", {"outcome": "moved"}),
    }
    return ", ".join([OK, *(words for words, count in found.items() if count)])


def report(outcomes: dict[Case, Outcome]) -> str:
    """All of it as Markdown: what the states and faults are, and a table for each victim."""
    faults = {fault.name: fault.what for own in VICTIMS.values() for fault in own}
    parts = ["## States", "", *(f"* **{state.name}**: {state.what}" for state in STATES)]
    parts += ["", "## Faults", "", *(f"* **{name}**: {what}" for name, what in faults.items())]
    for victim in (*VICTIMS, "pages"):
        title = "Messages of a push" if victim == "pages" else victim.capitalize()
        parts += ["", f"## {title}", "", _table(outcomes, victim)]
    return "\n".join(parts) + "\n"


def _table(outcomes: dict[Case, Outcome], victim: str) -> str:
    """A row for each state, a column for each fault."""
    own = {(case.state.name, case.fault_name): outcome for case, outcome in outcomes.items() if case.victim == victim}
    states, faults = (list(dict.fromkeys(key[index] for key in own)) for index in (0, 1))
    rows = [["", *faults], ["---"] * (len(faults) + 1)]
    rows += [[state, *(str(own[state, fault]) for fault in faults)] for state in states]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
