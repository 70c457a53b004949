"""What a system is that takes part: how it is started, what was set and by whose advice."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from peers.environments import Environments
from peers.weights import MODEL, Weights


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is to run, and for which load."""

    environments: Environments
    weights: Weights
    port: int
    cores: int
    streams: int  # requests at once
    max_tokens: int  # of the longest prompt with its answer


@dataclass(frozen=True, slots=True)
class Setting:
    """What differs from a server's defaults, why, and who advises it: a page, or a measurement of ours."""

    setting: str
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class System:
    name: str
    title: str
    command: Callable[[Place], list[str]]
    environment: str = ""  # empty: Pageferry's own
    module: str = ""  # that the environment is for
    packages: tuple[str, ...] = ()  # of that environment, whose versions are told
    variables: Callable[[Place], Mapping[str, str]] = lambda place: {}
    settings: tuple[Setting, ...] = ()
    model: Callable[[Place], str] = lambda place: MODEL  # as requests call it
    client_options: tuple[str, ...] = ()
    grpc_port: Callable[[Place], int] | None = None  # where the client speaks gRPC, not HTTP
    stays: bool = False  # too slow to start for each measurement: stopped by a signal while others run
    ready_s: float = 300.0
    build: Mapping[str, str] = field(default_factory=dict)  # variables for the installation

    def process_environment(self, place: Place) -> dict[str, str]:
        """A peer's has nothing of Pageferry's path."""
        inherited = dict(os.environ)
        if self.environment:
            inherited.pop("PYTHONPATH", None)
        return inherited | {"PYTHONSAFEPATH": "1"} | dict(self.variables(place))
