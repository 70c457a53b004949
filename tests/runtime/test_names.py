"""Names as this machine's resolver looks them up."""

import asyncio
import socket
import threading

import pytest

from pageferry.runtime.names import system_resolver


async def test_addresses_are_those_of_the_machines_resolver() -> None:
    assert "127.0.0.1" in await system_resolver()("localhost")
    assert await system_resolver()("127.0.0.7") == {"127.0.0.7"}


@pytest.mark.parametrize("code", [socket.EAI_NONAME, socket.EAI_NODATA])
async def test_a_name_that_has_none_is_no_error(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answer(socket.gaierror(code, "none")))
    assert await system_resolver()("nobody") == frozenset()


async def test_a_resolver_that_can_not_tell_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answer(socket.gaierror(socket.EAI_AGAIN, "try again")))
    with pytest.raises(OSError, match="try again"):
        await system_resolver()("nobody")


def answer(error: Exception) -> object:
    def getaddrinfo(*_: object, **__: object) -> object:
        raise error

    return getaddrinfo


async def test_the_loop_goes_on_while_a_lookup_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        gate.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    lookup = asyncio.create_task(system_resolver()("slow"))  # type: ignore[arg-type]
    try:
        for _ in range(100):
            await asyncio.sleep(0)
        assert not lookup.done()
    finally:
        gate.set()
    assert await lookup == frozenset()
