"""The tenants file, and the credentials that callers show."""

from pathlib import Path
from typing import Any

import pytest
from fuzzing import held_to_contract, mutated, numbers
from hypothesis import given, strategies as st

from pageferry.core.tenants import key_digest, parse_tenants
from pageferry.router.tenant import Callers

DIGEST = "0" * 64
WRITTEN = f"""
[[tenant]]
name = "one"
key_sha256 = ["{key_digest("key")}"]
max_requests = 3
tokens_per_minute = 100
admin = true
[[tenant]]
name = "two"
key_sha256 = ["{DIGEST}"]
min_priority = -5
"""
FIELDS = ["name", "key_sha256", "max_requests", "requests_per_minute", "max_pages", "min_priority", "admin", "none"]
ODD = ['""', '"a b"', f'["{DIGEST}"]', "[1]", "true", "1.0", "0x" + "f" * 5000, "nan", "1979-05-27", "{}", "[[]]", "-1"]
VALUES = st.sampled_from(ODD) | numbers(-(2**65), 2**65).map(str)
LINES = st.builds("{} = {}".format, st.sampled_from(FIELDS), VALUES)
TABLES = st.sampled_from(["[[tenant]]", "[tenant]", "[[tenants]]", "[tenant.x]", ""])
FILES = st.lists(LINES | TABLES, max_size=8).map(lambda lines: "\n".join(["[[tenant]]", 'name = "a"', *lines]).encode())


@given(mutated(st.just(WRITTEN.encode())) | FILES | st.binary(max_size=100))
def test_a_file(data: bytes) -> None:
    with held_to_contract(UnicodeDecodeError):
        parse_tenants(data.decode(), "tenants.toml")


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    path.write_text(WRITTEN, encoding="utf-8")
    return Callers(str(path), "", lambda: 0.0)


HEADERS = st.text(st.characters(max_codepoint=255), max_size=20)
CREDENTIALS = st.sampled_from(["Bearer key", "bearer  key ", "Bearer", "Bearer ", "Basic key", " Bearer key"]) | HEADERS


@given(st.lists(CREDENTIALS | HEADERS.map("Bearer {}".format), max_size=2))
def test_credentials(callers: Any, authorization: list[str]) -> None:
    with held_to_contract():
        caller = callers.of(authorization)
        assert caller.tenant.name == "one"
        assert authorization[0].split() in (["Bearer", "key"], ["bearer", "key"])
