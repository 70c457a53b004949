"""What happens in a chaos run and when: a list of events that a seed gives, a file keeps and a replay follows.

A script file has one JSON object a line: first what is run, then the events in the order of their times. Whatever a
run draws by chance is drawn here, so that a part of a script means the same as it did in the whole.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

ROLES = ("router", "prefill", "decode")
MANNERS = ("read", "slow", "cancel")  # how a client reads: to the end, with pauses, or some events and no more
KINDS_OF_ASK = ("plain", "several", "best", "beam", "grammar", "prompt")  # see `chaos.asks`
PROFILES = ("", "throughput", "quality")
PATIENCE_S = 60.0  # of a client that sets no tight deadline; it never waits so long where all goes well
NUM_PROMPTS = 36
_MAX_TOKENS = (1, 2, 8, 24, 64, 160)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a client."""

    at_s: float
    prompt: int  # which of the run's prompts
    max_tokens: int
    router: int = 0
    manner: str = "read"
    num_events: int = 0  # that a client reads before it cancels
    timeout_s: float = PATIENCE_S
    seed: int | None = None  # None: greedy; else drawn at temperature 1
    priority: int = 0
    wants: str = "plain"  # one of KINDS_OF_ASK
    profile: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something goes wrong with `who`, such as "decode1", and is set right `for_s` later.

    "pages1" is the way by which prefill workers reach the second decode worker.
    """

    at_s: float
    kind: str  # one of KINDS
    who: str
    for_s: float = 0.0


Event = TypeVar("Event", Ask, Fault)


@dataclass(frozen=True, slots=True)
class Kind:
    """How often a fault is drawn, for how long it lasts, and whom it can befall."""

    weight: int
    for_s: tuple[float, float]
    roles: tuple[str, ...]
    restarts: bool = False  # ends the process
    on_links: bool = False  # befalls the last of a role, which is reached over links


KINDS = {
    "kill": Kind(6, (0.2, 4.0), ROLES, restarts=True),
    "drain": Kind(3, (0.2, 2.0), ROLES, restarts=True),
    "pause": Kind(5, (0.2, 4.0), ROLES),
    "freeze": Kind(1, (8.0, 16.0), ("prefill", "decode")),  # as a pause, beyond every patience of its peers
    "cut": Kind(3, (0.2, 3.0), (*ROLES, "pages"), on_links=True),
    "black_hole": Kind(2, (1.0, 10.0), (*ROLES, "pages"), on_links=True),
    "delay": Kind(3, (2.0, 8.0), (*ROLES, "pages"), on_links=True),
    "garble": Kind(
        4, (1.0, 5.0), ("pages",), on_links=True
    ),  # frames are dropped, doubled, swapped, cut short, flipped
}


@dataclass(frozen=True, slots=True)
class Script:
    """A run: who takes part, how long, and what happens."""

    seed: int
    seconds: float
    sizes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROLES, 2))
    asks: tuple[Ask, ...] = ()
    faults: tuple[Fault, ...] = ()

    def between(self, start_s: float, end_s: float) -> "Script":
        """That part alone, its beginning at 0."""

        def part(events: Iterable[Event]) -> tuple[Event, ...]:
            kept = (event for event in events if start_s <= event.at_s < end_s)
            return tuple(replace(event, at_s=round(event.at_s - start_s, 3)) for event in kept)

        return replace(self, seconds=round(end_s - start_s, 3), asks=part(self.asks), faults=part(self.faults))

    def dump(self) -> str:
        head = {"seed": self.seed, "seconds": self.seconds, "sizes": self.sizes}
        events = sorted((*self.asks, *self.faults), key=lambda event: event.at_s)
        return "\n".join(json.dumps(line) for line in (head, *map(_brief, events))) + "\n"

    @classmethod
    def load(cls, path: Path) -> "Script":
        """Read a file that `dump` wrote; ValueError naming the line that is wrong."""
        asks, faults = [], []
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 2):
            try:
                event = json.loads(line)
                asks.append(Ask(**event)) if "prompt" in event else faults.append(_fault(**event))
            except (TypeError, ValueError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
        return cls(**json.loads(head), asks=tuple(asks), faults=tuple(faults))


def _brief(event: Ask | Fault) -> dict[str, object]:
    """The fields that are not as they would be anyway."""
    plain = asdict(Ask(event.at_s, -1, 0)) if isinstance(event, Ask) else {}
    return {name: value for name, value in asdict(event).items() if name == "at_s" or plain.get(name, ...) != value}


def _fault(**fields: object) -> Fault:
    fault = Fault(**fields)  # type: ignore[arg-type]
    if fault.who.rstrip("0123456789") not in KINDS[fault.kind].roles:
        raise ValueError(f"{fault.kind} can't befall {fault.who}")
    return fault


def process_of(who: str) -> str:
    """Whom a fault of `who` disturbs."""
    return who.replace("pages", "decode")


def draw_script(
    seed: int,
    seconds: float,
    *,
    per_second: float,
    kinds: Sequence[str] = tuple(KINDS),
    sizes: Mapping[str, int] = MappingProxyType(dict.fromkeys(ROLES, 2)),
) -> Script:
    """The script of a seed. Faults end some time before the end, which requests in flight then reach in peace."""
    draws, features = random.Random(seed), random.Random(f"features of {seed}")
    asks = []
    at_s = draws.expovariate(per_second)
    while at_s < seconds:
        asks.append(_draw_ask(draws, features, round(at_s, 3), sizes["router"]))
        at_s += draws.expovariate(per_second)
    return Script(seed, seconds, dict(sizes), tuple(asks), tuple(_draw_faults(draws, seconds, kinds, sizes)))


def _draw_ask(draws: random.Random, features: random.Random, at_s: float, num_routers: int) -> Ask:
    manner = draws.choices(MANNERS, (72, 6, 22))[0]
    return Ask(
        at_s,
        prompt=draws.randrange(NUM_PROMPTS),
        max_tokens=draws.choices(_MAX_TOKENS, (1, 1, 3, 4, 3, 1))[0],
        router=draws.randrange(num_routers),
        manner=manner,
        num_events=draws.randrange(12) if manner == "cancel" else 0,
        timeout_s=round(draws.uniform(0.01, 0.6), 3) if draws.random() < 0.08 else PATIENCE_S,
        seed=draws.randrange(1000) if draws.random() < 0.15 else None,
        priority=draws.choice((0, 0, 0, -1, 1)),
        wants=features.choices(KINDS_OF_ASK, (70, 6, 4, 6, 8, 6))[0],
        profile=features.choices(PROFILES, (80, 15, 5))[0],
    )


def _draw_faults(
    draws: random.Random, seconds: float, kinds: Sequence[str], sizes: Mapping[str, int]
) -> Iterable[Fault]:
    """One after the other, some at once, but never two at one process, which each leaves time to recover.

    In the second half only the last process of each role is ended any more, so that the others live long enough to
    show whether they grow.
    """
    free_at_s: dict[str, float] = {}
    at_s = draws.uniform(1.0, 4.0)
    while at_s < seconds - 6.0:
        name = draws.choices(kinds, [KINDS[kind].weight for kind in kinds])[0]
        kind = KINDS[name]
        spares_first = kind.on_links or (kind.restarts and at_s > seconds / 2 and seconds > 120)
        lasts = {role: sizes["decode" if role == "pages" else role] - 1 for role in kind.roles}
        names = [f"{role}{n}" for role, last in lasts.items() for n in range(last if spares_first else 0, last + 1)]
        names = [who for who in names if free_at_s.get(process_of(who), 0.0) <= at_s]
        if names:
            who = draws.choice(names)
            for_s = round(min(draws.uniform(*kind.for_s), seconds - at_s - 4.0), 3)
            free_at_s[process_of(who)] = at_s + for_s + draws.uniform(5.0, 14.0)
            yield Fault(round(at_s, 3), name, who, for_s)
        at_s += draws.choice((draws.uniform(0.1, 1.0), draws.uniform(3.0, 10.0), draws.uniform(3.0, 10.0)))
