"""Settings: files of TOML, environment variables and options."""

from pathlib import Path
from typing import Any

import pytest
from fuzzing import JSON_VALUES, held_to_contract, mutated
from hypothesis import given, strategies as st

from pageferry.core.config import Config
from pageferry.core.formats import PageFormat
from pageferry.core.groups import parse_groups
from pageferry.core.read_config import load_config
from pageferry.core.settings import parse_overrides

WRITTEN = b"""
[server]
port = 7070
drain_grace_s = 1.5
[engine]
model = "smollm2"
page_format = "k=int8:channel,v=int4:asym"
cache_layers = "0-14=window:256,sinks:4;15-29=full"
[router]
prefill = ["127.0.0.1:1", "[::1]:2"]
"""
ODD = [b"x = " + b"[" * 50_000, b"[engine]\nnum_pages = 0x" + b"f" * 5000, b"[server]\ndrain_grace_s = 1" + b"0" * 400]
ODD += [
    b"[[server]]\n",
    b"server.port.x = 1",
    b"[server]\nport = 1979-05-27",
    b"[router]\nprefill = [[]]",
    b"a.b.c = 1",
]
KEYS = st.sampled_from(list(Config().describe())) | st.sampled_from(["router.none", "none.none", "x", ".", ""])
WORDS = st.sampled_from(
    ["true", "nan", "inf", "-1", "1e400", "1_0", "9" * 5000, "int8", "0-3=full", "a:1", "[::]:0", "spiffe://x/*", "²"]
)
TEXTS = WORDS | st.text(max_size=20)
POLICIES = st.lists(
    st.sampled_from([*"0123456789", ";", "=", ",", "-", ":", "full", "window", "sinks", "99999999999", " ", "²"])
).map("".join)
FORMATS = st.lists(st.sampled_from(["k", "v", "=", ",", ":", "int8", "int4", "fp32", "asym", "channel", "token"]))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("settings") / "fuzzed.toml"


@given(data=mutated(st.just(WRITTEN)) | st.binary(max_size=100) | st.sampled_from(ODD))
def test_a_file(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with held_to_contract():
        load_config(path, {}, {}).describe()


@given(st.dictionaries(KEYS, JSON_VALUES | TEXTS, max_size=3), st.dictionaries(KEYS, TEXTS, max_size=3))
def test_values(overrides: dict[str, Any], environment: dict[str, str]) -> None:
    variables = {"PAGEFERRY_" + key.replace(".", "_").upper(): text for key, text in environment.items()}
    with held_to_contract():
        load_config(None, variables, overrides).describe()


@given(st.lists(st.builds("{}{}{}".format, KEYS, st.sampled_from(["=", "", "=="]), TEXTS), max_size=3))
def test_options(texts: list[str]) -> None:
    with held_to_contract():
        load_config(None, {}, parse_overrides(texts))


@given(POLICIES, st.integers(1, 40), st.none() | st.integers(1, 300))
def test_cache_layers(text: str, num_layers: int, window: int | None) -> None:
    with held_to_contract():
        parse_groups(text, num_layers, window)


@given(FORMATS.map("".join) | TEXTS)
def test_page_formats(text: str) -> None:
    with held_to_contract():
        assert PageFormat.parse(str(PageFormat.parse(text))) == PageFormat.parse(text)
