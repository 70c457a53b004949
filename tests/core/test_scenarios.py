"""Golden scenarios: prefill_*.txt and decode_*.txt in tests/scenarios, in blocks of commands to a scheduler and,
below ----, what came of them.

`pytest --rewrite` writes the outcome anew; read the difference before committing it. Commands:

    prefill|decode FIELD=VALUE…     a new scheduler; fields of SchedulerConfig, and pages (N,N… of each group),
                                    page_size, groups (as cache_layers, a layer each), format, tails
    add|reserve NAME tokens=N …     like=OTHER begins with the same tokens; max_tokens, priority, deadline; beams=N is
                                    a beam search
    receive NAME                    all pages of a reserved one have come
    step [N]                        that many steps: chunks name[start:end], ! where they sample | pages | out; a beam
                                    has its search's name
    wait SECONDS   expire   abort NAME   wakeup   pool
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from scheduling import Driver, layout, prompt, sequence

from pageferry.core.config import SchedulerConfig
from pageferry.core.decode_scheduler import DecodeScheduler
from pageferry.core.errors import PageferryError
from pageferry.core.plan import Ended, Plan
from pageferry.core.pools import PagePools
from pageferry.core.prefill_scheduler import PrefillScheduler
from pageferry.core.sampling import BeamParams
from pageferry.core.sequence import NO_PAGE, Sequence

FOLDER = Path(__file__).parent.parent / "scenarios"
SCENARIOS = sorted([*FOLDER.glob("prefill_*.txt"), *FOLDER.glob("decode_*.txt")])
SEPARATOR = "----"


class Scenario:
    def __init__(self) -> None:
        self.sequences: dict[str, Sequence] = {}
        self.variants: dict[str, int] = {}
        self.driver: Driver

    def play(self, line: str) -> list[str]:
        words = line.split()
        names = [word for word in words[1:] if "=" not in word]
        options = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        try:
            return list(getattr(self, f"do_{words[0]}")(*names, **options))
        except PageferryError as error:
            return [f"{error.code} {error.message}"]

    def do_prefill(self, **options: str) -> list[str]:
        return self.start(PrefillScheduler, options)

    def do_decode(self, **options: str) -> list[str]:
        return self.start(DecodeScheduler, options)

    def start(self, kind: type[PrefillScheduler] | type[DecodeScheduler], options: dict[str, str]) -> list[str]:
        of = layout(int(options.pop("page_size", "16")), options.pop("groups", "0=full"), options.pop("format", "int8"))
        num_pages = [int(number) for number in options.pop("pages").split(",")]
        pools = PagePools(of, num_pages, int(options.pop("tails", "0")))
        fields = {name: float(value) if "." in value else int(value) for name, value in options.items()}
        scheduler = kind(SchedulerConfig(**fields), pools, of)  # type: ignore[arg-type]
        self.driver = Driver(scheduler, pools, of)
        return []

    def do_add(self, name: str, **options: str) -> list[str]:
        self.driver.add(self.make(name, **options))
        return []

    def do_reserve(self, name: str, **options: str) -> Iterator[str]:
        one = self.make(name, **options)
        assert isinstance(self.driver.scheduler, DecodeScheduler)
        if self.driver.scheduler.reserve(one, self.driver.now):
            held = " + ".join(str(sum(page != NO_PAGE for page in table)) for table in one.tables)
            yield f"{held} pages, {one.num_cached} tokens cached"
        else:
            yield "no room"

    def do_receive(self, name: str) -> list[str]:
        before = self.marks()
        one = self.sequences[name]
        self.driver.receive(one, with_first=one.work.beam is None)
        return [self.news(before)]

    def do_step(self, times: str = "1") -> Iterator[str]:
        for _ in range(int(times)):
            before = self.marks()
            plan = self.driver.step()
            yield "nothing to do" if plan is None else " | ".join([*self.describe(plan), self.news(before)])

    def do_wait(self, seconds: str) -> list[str]:
        self.driver.now += float(seconds)
        return []

    def do_expire(self) -> Iterator[str]:
        for ended in self.driver.scheduler.expire(self.driver.now):
            self.driver.end(ended)
            yield self.ending(ended)

    def do_abort(self, name: str) -> list[str]:
        self.driver.scheduler.abort(self.sequences[name])
        return []

    def do_wakeup(self) -> list[str]:
        seconds = self.driver.scheduler.next_wakeup(self.driver.now)
        return ["never" if seconds is None else f"in {seconds:.3f} s"]

    def do_pool(self) -> list[str]:
        names = ("free", "cached", "reserved", "resident")
        return [", ".join(f"{getattr(pool, f'num_{name}')} {name}" for name in names) for pool in self.driver.pools.all]

    def make(self, name: str, *, tokens: str, like: str | None = None, **options: str) -> Sequence:
        self.variants[name] = 1 + max(self.variants.values(), default=-1) if like is None else self.variants[like]
        one = sequence(
            prompt(int(tokens), self.variants[name]),
            int(options.pop("max_tokens", "1")),
            arrival=self.driver.now,
            priority=int(options.pop("priority", "0")),
            deadline=float(options.pop("deadline")) if "deadline" in options else None,
            beam=BeamParams(int(options.pop("beams"))) if "beams" in options else None,
        )
        assert not options, options
        self.sequences[name] = one
        return one

    def name_of(self, one: Sequence) -> str:
        return next(name for name, other in self.sequences.items() if other is one)

    def describe(self, plan: Plan) -> Iterator[str]:
        spans = ((chunk, f"{chunk.start}:{chunk.start + chunk.num_tokens}") for chunk in plan.chunks)
        yield " ".join(f"{self.name_of(chunk.sequence.owner)}[{span}]{'!' * chunk.samples}" for chunk, span in spans)
        pages = [f"{len(plan.fresh)} fresh"]
        pages += [f"{len(plan.copies)} copied"] if plan.copies else []
        pages += [f"preempted {self.name_of(one)}" for one in plan.preempted]
        yield ", ".join(pages)

    def marks(self) -> dict[Sequence, tuple[int, bool]]:
        driver = self.driver
        return {one: (len(driver.outputs.get(one, ())), one in driver.ended) for one in self.sequences.values()}

    def news(self, before: dict[Sequence, tuple[int, bool]]) -> str:
        """The positions emitted and the sequences ended since `before`."""
        out = []
        for one, (num_tokens, has_ended) in self.marks().items():
            out += [f"{self.name_of(one)}@{position}" for position in range(before[one][0], num_tokens)]
            out += [self.ending(self.driver.ended[one])] if has_ended and not before[one][1] else []
        return " ".join(out) or "-"

    def ending(self, ended: Ended) -> str:
        outcome = ended.failure or (ended.reason.value if ended.reason else "handed on")
        return f"{self.name_of(ended.sequence)}:{outcome}"


def replay(text: str) -> str:
    """The text with the outcome of each block's commands as it is now."""
    scenario, blocks = Scenario(), []
    for block in text.strip().split("\n\n"):
        commands = block.split(f"\n{SEPARATOR}\n")[0].splitlines()
        outcome = [line for command in commands if not command.startswith("#") for line in scenario.play(command)]
        blocks.append("\n".join([*commands, SEPARATOR, *outcome] if outcome else commands))
    return "\n\n".join(blocks) + "\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    outcome = replay(text)
    if request.config.getoption("--rewrite"):
        path.write_text(outcome)
    else:
        assert outcome == text


def test_there_are_scenarios_of_both_schedulers() -> None:
    assert {path.stem.split("_")[0] for path in SCENARIOS} == {"prefill", "decode"}
