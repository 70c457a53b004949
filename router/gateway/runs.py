"""The generations of one body: one a prompt, several side by side."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

from pageferry.core.errors import InternalError
from pageferry.router.merged import merged
from pageferry.v1 import inference_pb2 as pb

Events = AsyncGenerator[pb.GenerateResponse, None]
MAX_SIDE_BY_SIDE = 8  # generations of one body at once


def all_events(begin: Sequence[Callable[[], Events]]) -> AsyncGenerator[tuple[int, pb.GenerateResponse], None]:
    """Each generation's events with its number, as `merged` has it."""
    whole = [partial(_whole, one) for one in begin]
    return merged(whole, at_once=MAX_SIDE_BY_SIDE, max_unread=MAX_SIDE_BY_SIDE)


async def _whole(begin: Callable[[], Events]) -> Events:
    """Raises InternalError where the generation ends without a finish."""
    is_finished = False
    async with aclosing(begin()) as events:
        async for event in events:
            is_finished = event.HasField("finished")
            yield event
    if not is_finished:
        raise InternalError("the generation ended without a finish", reason="NO_FINISH")
