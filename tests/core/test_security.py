"""Settings of certificates, and lists of who may call."""

import pytest

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.security import SecurityConfig, is_allowed

FILES = {"cert_file": "c.pem", "key_file": "k.pem"}
ROUTER = "spiffe://example.org/router"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cert_file": "c.pem"}, "key_file is '', must be set where cert_file is"),
        ({"key_file": "k.pem"}, "key_file is 'k.pem', must be set where cert_file is"),
        ({"ca_file": "ca.pem"}, "ca_file is 'ca.pem', must be empty without a cert_file"),
        ({**FILES, "allowed_peers": (ROUTER,)}, "allowed_peers .* must be empty without a ca_file"),
        ({**FILES, "ca_file": "ca.pem", "allowed_peers": ("router",)}, "must be spiffe://TRUST-DOMAIN/PATH"),
        ({**FILES, "ca_file": "ca.pem", "allowed_clients": ("spiffe://*/x",)}, r"with a \* at its end at most"),
        (
            {**FILES, "ca_file": "ca.pem", "allowed_clients": (ROUTER,), "client_certs": False},
            "allowed_clients .* must be empty where client_certs is off",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        SecurityConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spiffe_ids", "allowed", "expected"),
    [
        ((ROUTER,), (), True),
        ((), (), True),
        ((), (ROUTER,), False),
        ((ROUTER,), (ROUTER,), True),
        (("spiffe://example.org/other", ROUTER), (ROUTER,), True),
        ((ROUTER,), ("spiffe://example.org/",), False),
        ((ROUTER,), ("spiffe://example.org/*",), True),
        ((ROUTER + "/2",), (ROUTER,), False),
        (("spiffe://example.orgs/router",), ("spiffe://example.org/*",), False),
    ],
)
def test_a_list_allows_what_it_names(spiffe_ids: tuple[str, ...], allowed: tuple[str, ...], expected: bool) -> None:
    assert is_allowed(spiffe_ids, allowed) is expected
