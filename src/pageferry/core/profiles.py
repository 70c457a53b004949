"""Profiles: how requests of a kind are served; a file of them, and those that are there without one."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from pageferry.core.errors import FieldViolation, InvalidArgumentError, invalid, shown
from pageferry.core.formats import PageFormat
from pageferry.core.profile_switch import SwitchRule
from pageferry.core.settings import Setting, convert

MAX_PROFILES = 64  # each is a value of metrics' labels
_MIN_PRIORITY, _MAX_PRIORITY = -(2**31), 2**31 - 1
_MAX_COUNT = 2**31
_MAX_MS = 86_400_000.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Profile:
    """One `[profiles.NAME]`; a limit or an objective of 0 is none."""

    name: str
    priority: int = 0  # added to a request's own: lower goes first
    min_priority: int = _MIN_PRIORITY  # what comes out is no lower
    max_running: int = 0  # of its requests at once on workers, from one router
    batch_window_ms: float = 0.0  # its requests wait so long for others of it, and go together
    batch_size: int = 0  # or until there are so many
    speculation: bool = True  # whether decode workers may speculate
    page_formats: tuple[str, ...] = ()  # decode workers with others take none of its requests; none: any will do
    ttft_slo_ms: float = 0.0  # objective: arrival to first token
    token_slo_ms: float = 0.0  # between tokens, the mean of a request
    reserved_seqs: int = 0  # slots of decode workers, in all, that profiles of a higher `priority` leave free for it
    switches: tuple[SwitchRule, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise invalid("name", self.name, "must be 1 to 64 letters, digits, dots, dashes and underscores")
        for name, low, high in (
            ("priority", _MIN_PRIORITY, _MAX_PRIORITY),
            ("min_priority", _MIN_PRIORITY, _MAX_PRIORITY),
            ("max_running", 0, _MAX_COUNT),
            ("batch_window_ms", 0, _MAX_MS),
            ("batch_size", 0, _MAX_COUNT),
            ("ttft_slo_ms", 0, _MAX_MS),
            ("token_slo_ms", 0, _MAX_MS),
            ("reserved_seqs", 0, _MAX_COUNT),
        ):
            if not low <= getattr(self, name) <= high:
                raise invalid(name, getattr(self, name), f"must be from {low} to {high}")
        for text in self.page_formats:
            PageFormat.parse(text)

    def priority_of(self, own: int) -> int:
        """What a request goes by that has this priority of its own."""
        return min(max(self.priority + own, self.min_priority, _MIN_PRIORITY), _MAX_PRIORITY)

    @property
    def formats(self) -> tuple[PageFormat, ...]:
        return tuple(PageFormat.parse(text) for text in self.page_formats)


def is_accepted(page_format: PageFormat, accepted: tuple[PageFormat, ...]) -> bool:
    """Whether the format is one of these, or keeps keys as one of them and values as another; none accepts any."""
    if not accepted or page_format in accepted:
        return True
    return all(PageFormat(side, side) in accepted for side in (page_format.k, page_format.v))


INTERACTIVE = Profile("interactive")
THROUGHPUT = Profile("throughput", priority=100, min_priority=1, batch_window_ms=20, batch_size=8, speculation=False)
QUALITY = Profile("quality", speculation=False, page_formats=("fp32", "bf16", "fp16"))


@dataclass(frozen=True, slots=True)
class ProfileSet:
    """All profiles by name. `default` is that of requests that name none."""

    default: str = INTERACTIVE.name
    profiles: Mapping[str, Profile] = field(
        default_factory=lambda: {profile.name: profile for profile in (INTERACTIVE, THROUGHPUT, QUALITY)}
    )


def parse_profiles(text: str, source: str) -> ProfileSet:
    """The profiles of a file's text, and those built in. Raises InvalidArgumentError naming `source` and the field."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of which TOMLDecodeError is one
        raise _bad(source, f"is no TOML that can be read: {error}") from None
    default, tables = document.pop("default", ProfileSet().default), document.pop("profiles", {})
    if document:
        raise _bad(source, f"{min(document)!r} is not known; profiles are [profiles.NAME], beside them may be default")
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise _bad(source, "profiles must be tables, [profiles.NAME]")
    known = dict(ProfileSet().profiles)
    for name, table in tables.items():
        known[name] = _profile(name, table, known, f"{source}: [profiles.{name}]")
    if len(known) > MAX_PROFILES:
        raise _bad(source, f"there are {len(known)} profiles, the limit is {MAX_PROFILES}")
    for profile in known.values():
        for rule in profile.switches:
            _check_known("use", rule.use, known, f"{source}: [[profiles.{profile.name}.switch]]")
    _check_known("default", default, known, source)
    return ProfileSet(default, known)


def _profile(name: str, table: Mapping[str, object], known: Mapping[str, Profile], where: str) -> Profile:
    """What the table leaves out is as in the profile `base`, or as built in under its name."""
    table = dict(table)
    base, rules = table.pop("base", name), table.pop("switch", None)
    if base != name:
        _check_known("base", base, known, where)
    values = _values(table, Profile, where, left_out=("name", "switches"))
    if rules is not None:
        if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
            raise _bad(where, f"switch must be a list of tables, [[profiles.{name}.switch]]")
        values["switches"] = tuple(_rule(rule, f"{where} switch {number}") for number, rule in enumerate(rules, 1))
    try:
        start = known.get(str(base), INTERACTIVE)
        return replace(start, **{"name": name, **values})  # type: ignore[arg-type]
    except InvalidArgumentError as error:
        raise _bad(where, error.message) from None


def _rule(table: Mapping[str, object], where: str) -> SwitchRule:
    values = _values(table, SwitchRule, where)
    try:
        return SwitchRule(**values)  # type: ignore[arg-type]
    except InvalidArgumentError as error:
        raise _bad(where, error.message) from None


def _values(
    table: Mapping[str, object], kind: type[Profile | SwitchRule], where: str, left_out: tuple[str, ...] = ()
) -> dict[str, object]:
    defaults = {one.name: one.default for one in fields(kind) if one.name not in left_out}
    unknown = table.keys() - defaults.keys()
    if unknown:
        raise _bad(where, f"{min(unknown)!r} is not known, but {', '.join(defaults)}")
    try:
        return {name: convert(name, Setting(value, where), defaults[name]) for name, value in table.items()}
    except InvalidArgumentError as error:
        raise InvalidArgumentError(error.message, reason="BAD_PROFILES", violations=error.violations) from None


def _check_known(field: str, name: object, known: Mapping[str, Profile], where: str) -> None:
    if not isinstance(name, str) or name not in known:
        raise _bad(where, f"{field} is {shown(name)}, must be one of {', '.join(known)}")


def _bad(source: str, message: str) -> InvalidArgumentError:
    violations = (FieldViolation("router.profiles_file", message),)
    return InvalidArgumentError(f"{source}: {message}", reason="BAD_PROFILES", violations=violations)
