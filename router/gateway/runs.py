"""The generations of one body: one a prompt, several side by side."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from pageferry.core.errors import InternalError
from pageferry.v1 import inference_pb2 as pb

Events = AsyncGenerator[pb.GenerateResponse, None]
_Item = tuple[int, pb.GenerateResponse | Exception | None]
MAX_SIDE_BY_SIDE = 8  # generations of one body at once


async def all_events(begin: Sequence[Callable[[], Events]]) -> AsyncGenerator[tuple[int, pb.GenerateResponse], None]:
    """Each generation's events with its number; the first error of one ends all.

    The caller closes it (`contextlib.aclosing`): that ends what has begun.
    """
    if len(begin) == 1:
        async with aclosing(_whole(begin[0])) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[_Item] = asyncio.Queue(MAX_SIDE_BY_SIDE)
    lanes = asyncio.Semaphore(MAX_SIDE_BY_SIDE)
    tasks = [asyncio.create_task(_fill(queue, lanes, number, one)) for number, one in enumerate(begin)]
    try:
        num_left = len(tasks)
        while num_left:
            number, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _fill(
    queue: asyncio.Queue[_Item],
    lanes: asyncio.Semaphore,
    number: int,
    begin: Callable[[], Events],
) -> None:
    async with lanes:
        try:
            async with aclosing(_whole(begin)) as events:
                async for event in events:
                    await queue.put((number, event))
            await queue.put((number, None))
        except Exception as error:
            await queue.put((number, error))


async def _whole(begin: Callable[[], Events]) -> Events:
    """Raises InternalError where the generation ends without a finish."""
    is_finished = False
    async with aclosing(begin()) as events:
        async for event in events:
            is_finished = event.HasField("finished")
            yield event
    if not is_finished:
        raise InternalError("the generation ended without a finish", reason="NO_FINISH")
