"""The states of a request at which a fault can strike, told by the frames that are on their way."""

from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any

from pageferry.core.config import RouterConfig
from pageferry.runtime.page_wire import read_request
from pageferry.v1.decode_pb2 import SubscribeResponse
from pageferry.v1.prefill_pb2 import PrefillResponse
from sim.network import Kind, Sight
from sim.nodes import Settings
from sim.world import Request, World

NUM_PROMPT, NUM_TOKENS = 21, 10
_NUM_PAGES = 6  # of the prompt
Seen = Callable[[Sight], bool]


@dataclass(frozen=True)
class State:
    """`watch` makes what tells the moment from frames; None: once the request waits in the router's queue."""

    name: str
    what: str  # in a few words
    watch: Callable[[], Seen] | None
    settings: Settings = field(default_factory=Settings)
    num_tokens: int = NUM_TOKENS
    num_ahead: int = 0  # requests that hold all slots before it comes


def _frame(method: str, kind: Kind, *, to_server: bool, arrived: bool, nth: int = 1) -> Callable[[], Seen]:
    def watch() -> Seen:
        left = nth

        def seen(sight: Sight) -> bool:
            nonlocal left
            frame = sight.frame
            matches = frame.method.endswith(method) and frame.kind is kind and sight.to_server is to_server
            left -= matches and sight.has_arrived is arrived
            return left == 0

        return seen

    return watch


def _pages(number: int) -> Callable[[], Seen]:
    """So many pages have arrived."""

    def watch() -> Seen:
        left = number

        def seen(sight: Sight) -> bool:
            nonlocal left
            if sight.has_arrived and _is_push(sight):
                message = read_request(sight.frame.payload)
                left -= len(message) if isinstance(message, list) else 0
            return left <= 0

        return seen

    return watch


def _has_page(request: Any, index: int) -> bool:
    return isinstance(request, list) and any(frame.header.page_index == index for frame in request)


def _is_push(sight: Sight) -> bool:
    return sight.frame.method.endswith("/Push") and sight.frame.kind is Kind.MESSAGE and sight.to_server


def _committing() -> Seen:
    def seen(sight: Sight) -> bool:
        if sight.has_arrived or not _is_push(sight):
            return False
        message = read_request(sight.frame.payload)
        return not isinstance(message, list) and message.HasField("commit")

    return seen


def _committed() -> Seen:
    """The answer to the commit, which is the last message before the push's good end."""
    return _frame("/Push", Kind.STATUS, to_server=False, arrived=False)()


def _first_token() -> Seen:
    def seen(sight: Sight) -> bool:
        frame = sight.frame
        if not sight.has_arrived or not frame.method.endswith("/Prefill") or frame.kind is not Kind.MESSAGE:
            return False
        return not sight.to_server and PrefillResponse.FromString(frame.payload).HasField("first_token")

    return seen


def _tokens(number: int) -> Callable[[], Seen]:
    """So many have been told to the router."""

    def watch() -> Seen:
        left = number

        def seen(sight: Sight) -> bool:
            nonlocal left
            frame = sight.frame
            if sight.has_arrived and frame.method.endswith("/Subscribe") and frame.kind is Kind.MESSAGE:
                message = SubscribeResponse.FromString(frame.payload)
                left -= sum(len(call.tokens) for call in message.calls)
            return left <= 0

        return seen

    return watch


_LOCAL = Settings(router=RouterConfig(local_prefill_tokens=1000))
_NARROW = replace(Settings(), scheduler=replace(Settings().scheduler, max_num_seqs=1))
QUEUED = State("queued", "it waits in the router's queue", None, _NARROW, num_ahead=2)
OPENED = State(
    "opened", "the decode worker has taken the push", _frame("/Push", Kind.MESSAGE, to_server=False, arrived=False)
)
# Each is a message of a push that something happens to; the fault waits for it from the push's start on.
MESSAGES = {
    replace(OPENED, name="first pages"): lambda request: _has_page(request, 0),
    replace(OPENED, name="last pages"): lambda request: _has_page(request, _NUM_PAGES - 1),
    replace(OPENED, name="commit"): lambda request: not isinstance(request, list) and request.HasField("commit"),
}
STATES = (
    QUEUED,
    State(
        "reserving",
        "the router has called the decode worker",
        _frame("/Decode", Kind.CALL, to_server=True, arrived=False),
    ),
    State("reserved", "it has the ticket", _frame("/Decode", Kind.MESSAGE, to_server=False, arrived=True)),
    State(
        "prefill called", "the prefill worker has the call", _frame("/Prefill", Kind.CALL, to_server=True, arrived=True)
    ),
    OPENED,
    State("first page", "the first pages are there", _pages(1)),
    State("first token", "the router has the first token", _first_token),
    State("committing", "the commit is under way", _committing),
    State("last page", "all pages are there", _pages(_NUM_PAGES)),
    State("committed", "the decode worker has taken the commit", _committed),
    State("decoding", "the router has four tokens of the decode worker's", _tokens(4)),
    State(
        "finishing",
        "the decode worker has told all",
        _frame("/Decode", Kind.STATUS, to_server=False, arrived=False),
    ),
    State(
        "local, reserved",
        "the decode worker is to compute the prompt itself",
        _frame("/Decode", Kind.MESSAGE, to_server=False, arrived=True),
        _LOCAL,
    ),
    State("local, decoding", "the same, after four tokens", _tokens(4), _LOCAL),
    State(
        "one token",
        "the prefill worker has the call, and one token is all that is asked for",
        _frame("/Prefill", Kind.CALL, to_server=True, arrived=True),
        num_tokens=1,
    ),
)


def arm(world: World, request: Request, state: State, strike: Callable[[], None]) -> None:
    """Call `strike` once the state is reached, right after whatever reached it."""
    if state.watch is None:
        _arm_queue(world, request, strike)
        return
    seen = state.watch()

    def observe(sight: Sight) -> None:
        if seen(sight):
            world.network.observers.remove(observe)
            world.loop.call_soon(strike, context=Context())

    world.network.observers.append(observe)


def _arm_queue(world: World, request: Request, strike: Callable[[], None]) -> None:
    def look() -> None:
        if request.answer.started is not None and world.router.frontend.get_status().queued == 1:
            strike()
        else:
            world.loop.call_later(0.001, look)

    world.loop.call_soon(look, context=Context())
