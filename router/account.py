"""What one tenant uses of the router, and the refusals where that would be over its limits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Never

from pageferry.core.errors import ResourceExhaustedError
from pageferry.core.load import Smoothed
from pageferry.core.tenants import Tenant
from pageferry.router.pace import retry_ms


class Bucket:
    """So much a minute: a minute's worth can be saved up, and what is taken beyond that is owed."""

    def __init__(self, per_minute: int, now: float) -> None:
        """It is full; 0 a minute is no limit."""
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until the amount, or a full bucket where that is less, is there; 0 where it is."""
        if not self.per_minute:
            return 0.0
        self._level = min(float(self.per_minute), self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return max(0.0, (min(amount, self.per_minute) - self._level) * 60 / self.per_minute)

    def take(self, amount: int) -> None:
        self._level -= amount


class Account:
    """Counts one tenant's use. Refusals are ResourceExhaustedError, and say when to come again."""

    def __init__(self, tenant: Tenant, clock: Callable[[], float]) -> None:
        self.tenant = tenant
        self._clock = clock
        self._requests = Bucket(tenant.requests_per_minute, clock())
        self._tokens = Bucket(tenant.tokens_per_minute, clock())
        self._num_live = 0
        self._num_pages = 0
        self._request_s = Smoothed()

    def change(self, tenant: Tenant) -> None:
        """Hold to these limits from now on."""
        self.tenant = tenant
        if tenant.requests_per_minute != self._requests.per_minute:
            self._requests = Bucket(tenant.requests_per_minute, self._clock())
        if tenant.tokens_per_minute != self._tokens.per_minute:
            self._tokens = Bucket(tenant.tokens_per_minute, self._clock())

    def check_requests(self) -> None:
        """Refuse one more request that is over a limit already."""
        if 0 < self.tenant.max_requests <= self._num_live:
            self._refuse("max_requests", f"{self._num_live} are live", self._next_end_s())
        self._check_rate("requests_per_minute", self._requests, 1)

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Count a request inside the block, before any work is done for it, or refuse it: `live` decides, and counts.

        However many come at once, no more are looked at than may be live.
        """
        self.count_request()
        self._num_live += 1
        try:
            yield
        finally:
            self._num_live -= 1
            self._requests.take(-1)

    def count_request(self) -> None:
        """One that is over at once."""
        self.check_requests()
        self._requests.take(1)

    @contextmanager
    def live(self, num_prompt: int, num_pages: int) -> Iterator[None]:
        """Count a request as live inside the block, or refuse it; its answer's tokens are counted by `spend`."""
        limit, began = self.tenant.max_pages, self._clock()
        if 0 < limit < self._num_pages + num_pages:
            held = f"live requests may come to {self._num_pages} pages, this one to {num_pages}"
            self._refuse("max_pages", held, self._next_end_s())
        self._check_rate("tokens_per_minute", self._tokens, num_prompt)
        self.count_request()
        self.spend(num_prompt)
        self._num_live += 1
        self._num_pages += num_pages
        try:
            yield
        finally:
            self._num_live -= 1
            self._num_pages -= num_pages
            self._request_s.add(self._clock() - began)

    def spend(self, num_tokens: int) -> None:
        self._tokens.take(num_tokens)

    def _check_rate(self, limit: str, bucket: Bucket, amount: int) -> None:
        wait_s = bucket.wait_s(amount, self._clock())
        if wait_s > 0:
            self._refuse(limit, f"used up for the next {wait_s:.1f} s", wait_s)

    def _next_end_s(self) -> float | None:
        """When one of the live requests can be expected to end; None while none has."""
        return self._request_s.value / max(1, self._num_live) or None

    def _refuse(self, limit: str, state: str, wait_s: float | None) -> Never:
        message = f"{limit} of tenant {self.tenant.name} is {getattr(self.tenant, limit)}, {state}"
        raise ResourceExhaustedError(message, reason=f"TENANT_{limit.upper()}", retry_after_ms=retry_ms(wait_s))
