"""Several streams read as one, side by side."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

_T = TypeVar("_T")
_Begin = Callable[[], AsyncGenerator[_T, None]]
_Found = tuple[int, _T] | Exception | None  # None: a stream has ended


async def merged(begin: Sequence[_Begin[_T]], *, at_once: int, max_unread: int) -> AsyncGenerator[tuple[int, _T], None]:
    """What each of the streams brings, with its number; the first error of one ends all.

    So many run at once, and are held back where so much is unread. The caller closes it (`contextlib.aclosing`): that
    ends what has begun.
    """
    if len(begin) == 1:
        async with aclosing(begin[0]()) as items:
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[_Found[_T]] = asyncio.Queue(max_unread)
    lanes = asyncio.Semaphore(at_once)
    tasks = [asyncio.create_task(_fill(queue, lanes, number, one)) for number, one in enumerate(begin)]
    num_left = len(tasks)
    try:
        while num_left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                num_left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _fill(queue: "asyncio.Queue[_Found[_T]]", lanes: asyncio.Semaphore, number: int, begin: _Begin[_T]) -> None:
    async with lanes:
        try:
            async with aclosing(begin()) as items:
                async for item in items:
                    await queue.put((number, item))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)
