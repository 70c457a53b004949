"""What the simulation has found, each by the seed that showed it."""

from dataclasses import replace

import pytest
from sim.faults import slow
from sim.matrix import Case, cases, run_case, victim_of
from sim.network import Frame, Kind
from sim.states import NUM_PROMPT, OPENED, arm
from sim.world import Request, World, simulate

from pageferry.runtime.page_wire import read_request


def _case(id_: str) -> Case:
    return next(case for case in cases() if case.id == id_)


@pytest.mark.parametrize("seed", [3, 4, 9])
def test_a_damaged_commit_is_never_run_on(seed: int) -> None:
    """A bit of it flips: the decode worker went on after a token that nobody had drawn."""
    assert run_case(_case("pages-a_bit_flipped-commit"), seed).words == "OK, other prefill"


def test_another_first_token_is_never_run_on() -> None:
    """The same, with the prefill worker too far away to be the first to tell."""

    def with_another_token(frame: Frame, to_server: bool) -> list[Frame]:
        if to_server and frame.method.endswith("/Push") and frame.kind is Kind.MESSAGE:
            message = read_request(frame.payload)
            if not isinstance(message, list) and message.HasField("commit"):
                message.commit.first_tokens[0].token.token_id ^= 1
                return [replace(frame, payload=message.SerializeToString())]
        return [frame]

    async def scenario(world: World) -> None:
        request = Request("main", list(range(1, NUM_PROMPT + 1)), 200)

        def strike() -> None:
            prefill, decode = (victim_of(world, request, role) for role in ("prefill", "decode"))
            slow(world, [world.network.link(prefill, "router")], 5.0)
            world.network.link(prefill, decode).tamper = with_another_token

        arm(world, request, OPENED, strike)
        world.ask(request)
        await world.until(lambda: bool(request.outcome), 10)
        assert request.outcome == "OK"
        await world.until_idle(10)

    simulate(scenario)
