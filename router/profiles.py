"""The profiles of this router: which there are, whom they are for, and which one is in effect for which."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pageferry.core.errors import FieldViolation, PermissionDeniedError, invalid
from pageferry.core.profile_switch import Reading, Switch, in_effect
from pageferry.core.profiles import INTERACTIVE, Profile, ProfileSet, parse_profiles
from pageferry.core.tenants import ANYBODY, Tenant
from pageferry.router.metrics import RouterMetrics
from pageferry.router.watched_file import WatchedFile
from pageferry.runtime.logs import log

MAX_NAME_CHARACTERS = 64  # of one that is not known, in the message that says so


@dataclass(frozen=True, slots=True)
class Chosen:
    """A request's profile: as it was asked for, and what was in effect for that when it came."""

    name: str
    profile: Profile

    @property
    def attributes(self) -> dict[str, str]:
        """Of the request's span."""
        return {"pageferry.profile": self.name, "pageferry.profile.in_effect": self.profile.name}


DEFAULT = Chosen(INTERACTIVE.name, INTERACTIVE)


class Profiles:
    """Reads the profiles file again when it has changed, and switches by its rules whenever it is told the load."""

    def __init__(
        self,
        profiles_file: str = "",
        metrics: RouterMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`wall_clock` has the time of day. Raises InvalidArgumentError for a file that is wrong."""
        self._metrics = metrics
        self._clock, self._wall_clock = clock, wall_clock
        self._file = None
        self._set = ProfileSet()
        self._switches: dict[str, list[Switch]] = {}
        self._effective: dict[str, Profile] = {}  # by the name that is asked for
        if profiles_file:
            self._file = WatchedFile(Path(profiles_file), "router.profiles_file", "BAD_PROFILES", parse_profiles, clock)
        self._use(ProfileSet() if self._file is None else self._file.read())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._set.profiles)

    def choose(self, name: str, tenant: Tenant = ANYBODY) -> Chosen:
        """The profile of a request that comes now; an empty name is the tenant's first one, or the default.

        Raises InvalidArgumentError for a name that is not known, PermissionDeniedError for one of others.
        """
        allowed = [one for one in tenant.profiles if one in self._set.profiles]
        if not name:
            name = self._set.default if self._set.default in allowed or not allowed else allowed[0]
        if name not in self._set.profiles:
            raise invalid("profile", name[:MAX_NAME_CHARACTERS], f"must be one of {', '.join(self.names)}")
        if tenant.profiles and name not in allowed:
            description = f"is {name!r}, tenant {tenant.name} may name {', '.join(allowed) or 'none that is there'}"
            violations = (FieldViolation("profile", description),)
            raise PermissionDeniedError(f"profile {description}", reason="PROFILE_DENIED", violations=violations)
        return Chosen(name, self._effective[name])

    def now(self, chosen: Chosen) -> Profile:
        """What is in effect for the profile now; where it isn't there any more, what was when the request came."""
        return self._effective.get(chosen.name, chosen.profile)

    def in_effect(self) -> dict[str, Profile]:
        """By the name that is asked for."""
        return dict(self._effective)

    def look(self, queued: int, busy: Callable[[], float]) -> None:
        """Take the file over if it has changed, and switch if rules want to."""
        if self._file is not None:
            self._file.look(self._use_again, self._refuse)
        if not any(self._switches.values()):
            return
        reading = Reading(queued, busy(), self._wall_clock(), self._clock())
        for name, switches in self._switches.items():
            for switch in switches:
                switch.look(reading)
            effective = self._set.profiles[in_effect(name, switches)]
            if effective != self._effective[name]:
                log("profile_switched", profile=name, before=self._effective[name].name, in_effect=effective.name)
                self._effective[name] = effective
                if self._metrics is not None:
                    self._metrics.count_profile_switch(name, effective.name)
                    self._tell_metrics()

    def _use_again(self, profiles: ProfileSet) -> None:
        self._use(profiles)
        log("profiles_read", profiles=self.names)

    def _refuse(self, reason: str) -> None:
        log("profiles_refused", level="error", reason=reason, kept_profiles=self.names)

    def _use(self, profiles: ProfileSet) -> None:
        """Rules that are as before stay on or off as they are."""
        known = {(name, switch.rule): switch for name, switches in self._switches.items() for switch in switches}
        self._set = profiles
        self._switches = {
            name: [known.get((name, rule)) or Switch(rule) for rule in profile.switches]
            for name, profile in profiles.profiles.items()
        }
        self._effective = {
            name: profiles.profiles[in_effect(name, switches)] for name, switches in self._switches.items()
        }
        self._tell_metrics()

    def _tell_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.set_profiles({name: profile.name for name, profile in self._effective.items()})
