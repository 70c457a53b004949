"""Bodies that wait for their rest: what they hold together is bounded, and comes back however a request ends."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from fake_frontend import FakeFrontend
from fake_workers import eventually
from gateway import serving

from pageferry.core.errors import NOTHING_BEGUN, PageferryError, UnavailableError
from pageferry.router.gateway import bodies as bodies_module
from pageferry.router.gateway.bodies import Bodies, Body

MOST = 1000
JSON = {"content-type": "application/json"}


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[PageferryError]:
    monkeypatch.setattr(bodies_module, "MAX_BYTES", MOST)
    return []


async def hold(bodies: Bodies, num_bytes: int, end: Callable[[Body], None], leave: asyncio.Event) -> None:
    async with bodies.receive() as body:
        body.add(b"x" * num_bytes)
        await leave.wait()
        end(body)


def fail(body: Body) -> None:
    raise ValueError


def nothing(body: Body) -> None:
    """The body was too large, say, and its request was answered."""


async def test_whoever_began_first_makes_room_and_all_others_stay(refusals: list[PageferryError]) -> None:
    bodies, leave = Bodies(on_refused=refusals.append), asyncio.Event()
    first, *others = [asyncio.create_task(hold(bodies, 400, Body.whole, leave)) for _ in range(3)]
    with pytest.raises(UnavailableError, match=f"more than {MOST} bytes together") as caught:
        await first
    assert (caught.value.reason, caught.value.retry_after_ms) == ("BODIES_FULL", 1000)
    assert refusals == [caught.value]
    assert bodies.num_bytes == 800
    leave.set()
    await asyncio.gather(*others)
    assert bodies.num_bytes == 0


async def test_room_is_made_by_as_many_as_it_takes_and_by_who_asks_in_the_end(refusals: list[PageferryError]) -> None:
    bodies, leave = Bodies(on_refused=refusals.append), asyncio.Event()
    small = [asyncio.create_task(hold(bodies, 300, Body.whole, leave)) for _ in range(3)]
    await eventually(lambda: bodies.num_bytes == 900)
    with pytest.raises(UnavailableError):
        await hold(bodies, MOST + 1, Body.whole, leave)
    ended = await asyncio.gather(*small, return_exceptions=True)
    assert [type(error) for error in ended] == [UnavailableError] * 3
    assert (bodies.num_bytes, len(refusals)) == (0, 4)


@pytest.mark.parametrize("end", [Body.whole, Body.drop, fail, nothing])
async def test_all_is_given_back_however_it_ends(end: Callable[[Body], None], refusals: list[PageferryError]) -> None:
    bodies, leave = Bodies(on_refused=refusals.append), asyncio.Event()
    holding = asyncio.create_task(hold(bodies, 700, end, leave))
    await eventually(lambda: bodies.num_bytes == 700)
    leave.set()
    await asyncio.gather(holding, return_exceptions=True)
    assert (bodies.num_bytes, refusals) == (0, [])


async def test_who_leaves_and_who_takes_too_long_gives_all_back(
    refusals: list[PageferryError], monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies, never = Bodies(on_refused=refusals.append), asyncio.Event()
    holding = asyncio.create_task(hold(bodies, 700, Body.whole, never))
    await eventually(lambda: bodies.num_bytes == 700)
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    assert bodies.num_bytes == 0
    monkeypatch.setattr(bodies_module, "BODY_S", 0.001)
    with pytest.raises(TimeoutError, match=r"the body took longer than 0\.001 s"):
        await hold(bodies, 700, Body.whole, never)
    assert (bodies.num_bytes, refusals) == (0, [])


async def test_nobody_waits_for_what_has_not_come_once_they_are_closed(refusals: list[PageferryError]) -> None:
    bodies, never = Bodies(on_refused=refusals.append), asyncio.Event()
    coming = [asyncio.create_task(hold(bodies, num_bytes, Body.whole, never)) for num_bytes in (0, 700)]
    await eventually(lambda: bodies.num_bytes == 700)
    bodies.close()
    coming.append(asyncio.create_task(hold(bodies, 5, Body.whole, never)))
    async with asyncio.timeout(60):
        ended = await asyncio.gather(*coming, return_exceptions=True)
    assert [(error.reason, error.nothing_begun) for error in ended] == [("DRAINING", True)] * 3
    assert (bodies.num_bytes, len(refusals)) == (0, 3)


async def test_what_comes_after_it_made_room_is_not_kept_nor_taken_for_all_of_it(
    refusals: list[PageferryError],
) -> None:
    bodies = Bodies(on_refused=refusals.append)
    with pytest.raises(UnavailableError):
        async with bodies.receive() as body:
            body.add(b"x" * (MOST + 1))
            body.add(b"the rest")
            assert bodies.num_bytes == 0
            body.whole()
    assert bodies.num_bytes == 0


async def test_one_that_is_whole_is_in_no_hurry_and_still_counts(refusals: list[PageferryError]) -> None:
    bodies = Bodies(on_refused=refusals.append)
    with pytest.raises(UnavailableError):
        async with bodies.receive() as body:
            body.add(b"x" * MOST)
            assert body.whole() == b"x" * MOST
            assert body.time.when() is None
            async with bodies.receive() as other:
                other.add(b"y")
                assert bodies.num_bytes == 1
            await asyncio.Event().wait()  # for the choice of a worker, say
    assert len(refusals) == 1


async def test_a_slow_sender_is_told_to_come_again_and_others_are_served(refusals: list[PageferryError]) -> None:
    bodies, more = Bodies(on_refused=refusals.append), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"prompt": "' + b"x" * 600
        await more.wait()
        yield b'"}'

    frontend = FakeFrontend()
    async with serving(frontend, bodies=bodies) as url, httpx.AsyncClient(base_url=url, headers=JSON) as client:
        first, second = [asyncio.create_task(client.post("/v1/completions", content=slowly())) for _ in range(2)]
        await eventually(lambda: len(refusals) == 1)
        assert bodies.num_bytes == 612
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        more.set()
        answers = sorted([await first, await second], key=lambda answer: answer.status_code)
        assert [answer.status_code for answer in answers] == [200, 503]
        assert (answers[1].headers["retry-after"], answers[1].headers[NOTHING_BEGUN]) == ("1", "1")
        told = json.loads(answers[1].content)["error"]
        assert (told["code"], told["type"], told["param"]) == ("bodies_full", "server_error", None)
        assert bodies.num_bytes == 0
