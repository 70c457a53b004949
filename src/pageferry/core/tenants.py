"""Who may call, with which keys and how much: the tenants file. Keys are known by their digests only."""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from pageferry.core.errors import InvalidArgumentError, invalid, invalid_field

MAX_LIMIT = 2**53  # beyond, floating-point numbers don't count by ones
MAX_KEYS = 2_000  # of all tenants: each call's key is compared with every one
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Tenant:
    """One `[[tenant]]`; a limit of 0 is none."""

    name: str
    key_sha256: tuple[str, ...] = ()  # digests of its keys, as `pageferry key` prints them; none: it may not call
    max_requests: int = 0  # at once, those that wait among them
    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # of prompts and answers
    max_pages: int = 0  # of each pool that its requests at once may come to fill
    min_priority: int = 0  # its requests' `priority` may be no lower: lower goes first
    profiles: tuple[str, ...] = ()  # that its requests may name, the first for those that name none; none: all
    admin: bool = False  # may ask for the status, for metrics over HTTP and for everybody's traces

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise invalid_field("name", "must be 1 to 64 letters, digits, dots, dashes and underscores")
        for digest in self.key_sha256:
            if not _DIGEST.fullmatch(digest):  # it is not repeated: it may be a key itself
                description = "must hold 64 lower-case hexadecimal digits each, see `pageferry key`"
                raise invalid_field("key_sha256", description)
        for name in ("max_requests", "requests_per_minute", "tokens_per_minute", "max_pages"):
            if not 0 <= getattr(self, name) <= MAX_LIMIT:
                raise invalid(name, getattr(self, name), f"must be from 0 to {MAX_LIMIT}; 0 is no limit")
        if not -(2**31) <= self.min_priority < 2**31:
            raise invalid("min_priority", self.min_priority, "must be from -2**31 to 2**31 - 1")


# All callers, where there is no tenants file.
ANYBODY = Tenant("anybody", min_priority=-(2**31), admin=True)


def key_digest(key: str) -> str:
    """What the tenants file has of a key. Without a salt: keys are drawn, and too long to be guessed."""
    return hashlib.sha256(key.encode()).hexdigest()


def tenant_of(digest: str, tenants: Iterable[Tenant]) -> Tenant | None:
    """Whose key has this digest. How long it takes tells nothing of the digests compared with."""
    found = None
    for tenant in tenants:
        for known in tenant.key_sha256:
            if hmac.compare_digest(known, digest):
                found = tenant
    return found


def parse_tenants(text: str, source: str) -> tuple[Tenant, ...]:
    """The tenants of a file's text. Raises InvalidArgumentError naming `source`, the tenant and the field."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of which TOMLDecodeError is one
        raise _bad(source, f"is no TOML that can be read: {error}") from None
    entries = document.pop("tenant", [])
    if document:
        raise _bad(source, f"{min(document)!r} is not known; tenants are [[tenant]]")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _bad(source, "tenant must be a list of tables, [[tenant]]")
    tenants = tuple(_tenant(entry, f"{source}: [[tenant]] {number}") for number, entry in enumerate(entries, 1))
    _check_unique(source, "name", (tenant.name for tenant in tenants))
    digests = [digest for tenant in tenants for digest in tenant.key_sha256]
    _check_unique(source, "key_sha256", digests)
    if len(digests) > MAX_KEYS:
        raise _bad(source, f"has {len(digests)} keys, the limit is {MAX_KEYS}")
    return tenants


def _tenant(entry: Mapping[str, object], where: str) -> Tenant:
    known = {field.name: field for field in fields(Tenant)}
    values: dict[str, object] = {}
    for name, value in entry.items():
        if name not in known:
            raise _bad(where, f"{name!r} is not known, but {', '.join(known)}")
        expected = {"name": str, "key_sha256": tuple, "profiles": tuple, "admin": bool}.get(name, int)
        if expected is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
            value = tuple(value)
        if type(value) is not expected:
            what = {str: "a text", tuple: "a list of texts", bool: "true or false", int: "a whole number"}[expected]
            raise _bad(where, f"{name} must be {what}")
        values[name] = value
    if "name" not in values:
        raise _bad(where, "has no name")
    try:
        return Tenant(**values)  # type: ignore[arg-type]
    except InvalidArgumentError as error:
        raise _bad(where, error.message) from None


def _check_unique(source: str, field: str, values: Iterable[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise _bad(source, f"{field} {value if field == 'name' else value[:8] + '…'} is there twice")
        seen.add(value)


def _bad(source: str, message: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{source}: {message}", reason="BAD_TENANTS")
