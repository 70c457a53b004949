"""Work that blocks and can't be interrupted, beside an event loop."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from pageferry.runtime.engine_thread import call_on_loop

T = TypeVar("T")


async def in_background(function: Callable[[], T]) -> T:
    """Run a function that can't be interrupted, on a thread that doesn't keep the process from ending."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: object) -> None:
        if not result.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            value = function()
        except BaseException as error:
            call_on_loop(loop, settle, result.set_exception, error)
        else:
            call_on_loop(loop, settle, result.set_result, value)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return await result
