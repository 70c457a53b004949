"""Who calls: tenants by their API keys, and the salts that keep their cached pages apart.

Pages are found only under the salt that they were computed under, so that nobody finds, by `cached_tokens` or by time,
what others have asked.
"""

import hashlib
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pageferry.core.errors import PermissionDeniedError, UnauthenticatedError
from pageferry.core.tenants import ANYBODY, Tenant, key_digest, parse_tenants, tenant_of
from pageferry.router.account import Account
from pageferry.router.watched_file import WatchedFile
from pageferry.runtime.logs import log


class Salts:
    """Salts of callers: keyed hashes, so that workers see no credential, and who sees a salt can't try out guesses.

    Nothing else of a request goes into them: whoever wants another's salt needs that one's credential.
    """

    def __init__(self, key: str) -> None:
        """With an empty `key` one is drawn: then no other router, and not this one once restarted, has these salts."""
        self._key = hashlib.blake2b(key.encode()).digest() if key else secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)

    def of(self, authorization: Iterable[str]) -> str:
        """The salt for values of the `authorization` header or metadata that nobody has proved; none share one."""
        credentials = "\n".join(authorization)
        return self._hash(credentials) if credentials else ""

    def of_tenant(self, name: str) -> str:
        """The salt of a tenant who has proved to be it, whichever of its keys was shown."""
        return self._hash(f"\0{name}")  # no credential has such a character

    def _hash(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), digest_size=16, key=self._key).hexdigest()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, under which salt, and what they have used."""

    salt: str
    account: Account

    @property
    def tenant(self) -> Tenant:
        return self.account.tenant

    @property
    def attributes(self) -> dict[str, str]:
        """Of a request's span."""
        return {} if self.tenant is ANYBODY else {"pageferry.tenant": self.tenant.name}

    def check_admin(self, what: str) -> None:
        """Raise PermissionDeniedError for any other tenant."""
        if not self.tenant.admin:
            raise PermissionDeniedError(
                f"tenant {self.tenant.name} may not ask for {what}: it is no admin", reason="NO_ADMIN"
            )


class Callers:
    """Knows callers by what they send; reads the tenants file again when it has changed."""

    def __init__(self, tenants_file: str, salt_key: str, clock: Callable[[], float]) -> None:
        """Without a file, anybody may call and ask for anything. Raises InvalidArgumentError for one that is wrong."""
        self._salts = Salts(salt_key)
        self._clock = clock
        self._anybody = Account(ANYBODY, clock)
        self._accounts: dict[str, Account] = {}
        self._file = None
        if tenants_file:
            self._file = WatchedFile(Path(tenants_file), "security.tenants_file", "BAD_TENANTS", parse_tenants, clock)
            self._take(self._file.read())

    def of(self, authorization: Sequence[str]) -> Caller:
        """The caller with these values of `authorization`. Raises UnauthenticatedError; no error holds any of them."""
        if self._file is None:
            return Caller(self._salts.of(authorization), self._anybody)
        self._file.look(self._take_again, self._refuse)
        if len(authorization) != 1:
            raise UnauthenticatedError("an API key is needed, as one authorization: Bearer KEY", reason="NO_API_KEY")
        scheme, _, key = authorization[0].partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise UnauthenticatedError("authorization must be Bearer KEY", reason="NO_API_KEY")
        tenant = tenant_of(key_digest(key.strip()), (account.tenant for account in self._accounts.values()))
        if tenant is None:
            raise UnauthenticatedError("the API key is not known", reason="UNKNOWN_API_KEY")
        return Caller(self._salts.of_tenant(tenant.name), self._accounts[tenant.name])

    def _take(self, tenants: Iterable[Tenant]) -> None:
        kept, self._accounts = self._accounts, {}
        for tenant in tenants:
            account = kept.get(tenant.name) or Account(tenant, self._clock)
            account.change(tenant)
            self._accounts[tenant.name] = account

    def _take_again(self, tenants: Iterable[Tenant]) -> None:
        self._take(tenants)
        log("tenants_read", tenants=len(self._accounts))

    def _refuse(self, reason: str) -> None:
        log("tenants_refused", level="error", reason=reason, kept_tenants=len(self._accounts))
