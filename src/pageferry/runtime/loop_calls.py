"""From other threads to the event loop."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVarTuple

Arguments = TypeVarTuple("Arguments")


def call_on_loop(
    loop: asyncio.AbstractEventLoop, callback: Callable[[*Arguments], object], *arguments: *Arguments
) -> None:
    """Run the callback on the loop, soon; once the loop is closed, nobody needs it any more and nothing happens."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)
