"""Which callers share a prefix cache: pages are found only under the salt that they were computed under."""

import hashlib
import secrets
from collections.abc import Iterable


class Salts:
    """Salts from callers' credentials, so that nobody finds, by `cached_tokens` or by time, what others have asked.

    The salt is a keyed hash, and workers never see a credential. Callers without one share the empty salt. Nothing else
    of a request goes into it: whoever wants another's salt needs that one's credential.
    """

    def __init__(self, key: str) -> None:
        """With an empty `key` one is drawn: then no other router, and not this one once restarted, has these salts."""
        self._key = hashlib.blake2b(key.encode()).digest() if key else secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)

    def of(self, authorization: Iterable[str]) -> str:
        """The salt for a request with these values of the `authorization` header or metadata."""
        credentials = "\n".join(authorization)
        if not credentials:
            return ""
        return hashlib.blake2b(credentials.encode(), digest_size=16, key=self._key).hexdigest()
