"""What all requests of a router share."""

from collections.abc import Callable
from dataclasses import dataclass

from pageferry.core.config import RouterConfig
from pageferry.router.dispatch import Dispatcher
from pageferry.router.fleet import Fleet
from pageferry.router.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Serving:
    """Times are seconds of `clock`."""

    fleet: Fleet
    dispatcher: Dispatcher
    telemetry: Telemetry
    clock: Callable[[], float]
    config: RouterConfig
