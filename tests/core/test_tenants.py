"""The tenants file: what is read, what is refused and how that is said, and whose key is whose."""

import pytest
from hypothesis import given, strategies as st

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.tenants import MAX_KEYS, Tenant, key_digest, parse_tenants, tenant_of

ONE, TWO = key_digest("one"), key_digest("two")


def test_all_fields_are_read() -> None:
    text = f"""
    [[tenant]]
    name = "acme"
    key_sha256 = ["{ONE}"]
    max_requests = 4
    requests_per_minute = 60
    tokens_per_minute = 100_000
    max_pages = 512
    min_priority = -1
    profiles = ["throughput", "quality"]
    admin = true

    [[tenant]]
    name = "other"
    """
    acme = Tenant("acme", (ONE,), 4, 60, 100_000, 512, -1, ("throughput", "quality"), True)
    assert parse_tenants(text, "file") == (acme, Tenant("other"))
    assert parse_tenants("", "file") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[tenant", "file: is no TOML that can be read"),
        ("a = " + "[" * 100_000, "file: is no TOML that can be read"),
        ("a = 1" + "0" * 5000, "file: is no TOML that can be read"),
        (
            "[[tenant]]\nname = 'a'\nmax_pages = 0x" + "f" * 5000,
            "max_pages is a number of 20000 bits, must be from 0 to",
        ),
        ("[server]\nport = 1", "file: 'server' is not known"),
        ("tenant = 1", "tenant must be a list of tables"),
        ("[tenant]\nname = 'a'", "tenant must be a list of tables"),
        ("[[tenant]]\nkey_sha256 = []", r"file: \[\[tenant\]\] 1: has no name"),
        ("[[tenant]]\nname = 'a/b'", "name must be 1 to 64 letters"),
        ("[[tenant]]\nname = 1", "name must be a text"),
        ("[[tenant]]\nname = 'a'\nkey = 'sesame'", "'key' is not known, but name, key_sha256, max_requests"),
        ("[[tenant]]\nname = 'a'\nkey_sha256 = ['sesame']", "64 lower-case hexadecimal digits each"),
        ("[[tenant]]\nname = 'a'\nkey_sha256 = 'sesame'", "key_sha256 must be a list of texts"),
        ("[[tenant]]\nname = 'a'\nmax_requests = -1", "max_requests is -1, must be from 0 to"),
        ("[[tenant]]\nname = 'a'\nmax_requests = true", "max_requests must be a whole number"),
        ("[[tenant]]\nname = 'a'\ntokens_per_minute = 1.5", "tokens_per_minute must be a whole number"),
        ("[[tenant]]\nname = 'a'\nprofiles = 'quality'", "profiles must be a list of texts"),
        ("[[tenant]]\nname = 'a'\nadmin = 1", "admin must be true or false"),
        ("[[tenant]]\nname = 'a'\nmin_priority = 2147483648", "min_priority is 2147483648"),
        ("[[tenant]]\nname = 'a'\n[[tenant]]\nname = 'a'", "file: name a is there twice"),
        (
            f"[[tenant]]\nname='a'\nkey_sha256=['{ONE}']\n[[tenant]]\nname='b'\nkey_sha256=['{ONE}']",
            f"key_sha256 {ONE[:8]}… is there twice",
        ),
        ("[[tenant]]\nname = 'a'\nkey_sha256 = " + str([f"{i:064x}" for i in range(MAX_KEYS + 1)]), "has 2001 keys"),
    ],
)
def test_what_is_wrong_is_named_without_what_may_be_a_key(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        parse_tenants(text, "file")
    assert "sesame" not in str(caught.value)
    assert caught.value.reason == "BAD_TENANTS"


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_tenants(text, "file")
    except InvalidArgumentError as error:
        assert error.message.startswith("file: ")


def test_a_key_is_its_tenants_and_every_key_of_one_counts() -> None:
    tenants = (Tenant("a", (ONE,)), Tenant("b", (TWO, key_digest("three"))), Tenant("none"))
    owners = [tenant_of(key_digest(key), tenants) for key in ("one", "two", "three", "four", "")]
    assert [owner.name if owner else None for owner in owners] == ["a", "b", "b", None, None]
