import hashlib

import pytest
from hypothesis import given, strategies as st

from pageferry.core.prefix import page_hashes

KEY = bytes(range(16))


def hashes(
    token_ids: list[int], *, page_size: int = 4, salt: str = "", known: list[bytes] | None = None
) -> list[bytes]:
    return page_hashes(token_ids, page_size, salt=salt, layout_key=KEY, known=known or ())


def test_the_hash_is_what_other_processes_compute() -> None:
    tokens = b"\x01\0\0\0\x02\0\0\0\x03\0\0\0\xff\xff\xff\xff"
    expected = hashlib.blake2b(bytes(16) + tokens + KEY + b"tenant", digest_size=16).digest()
    assert hashes([1, 2, 3, 2**32 - 1], salt="tenant") == [expected]
    second = hashlib.blake2b(expected + tokens + KEY + b"tenant", digest_size=16).digest()
    assert hashes([1, 2, 3, 2**32 - 1] * 2, salt="tenant") == [expected, second]


@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(0, 0), (3, 0), (4, 1), (5, 1), (8, 2)])
def test_only_full_pages_have_a_hash(num_tokens: int, num_hashes: int) -> None:
    assert len(hashes(list(range(num_tokens)))) == num_hashes


def test_equal_pages_after_unequal_ones_differ() -> None:
    first, second = hashes([1, 2, 3, 4, 5, 6, 7, 8]), hashes([9, 2, 3, 4, 5, 6, 7, 8])
    assert len({*first, *second}) == 4


@pytest.mark.field(
    "vllm-project/vllm#3264",
    "vllm-project/vllm#30931",
    "vllm-project/vllm#42125",
    "ggml-org/llama.cpp#26207",
    "vllm-project/vllm#16016",
)
def test_another_salt_or_layout_shares_nothing() -> None:
    token_ids = list(range(16))
    kinds = [hashes(token_ids), hashes(token_ids, salt="t1"), hashes(token_ids, salt="t2")]
    kinds.append(page_hashes(token_ids, 4, salt="", layout_key=bytes(16)))
    assert len({page_hash for kind in kinds for page_hash in kind}) == 16


@pytest.mark.field("PrimeIntellect-ai/prime-rl#1863", "JustVugg/colibri#1576")
def test_prompts_share_only_the_pages_whose_ids_are_equal() -> None:
    one, two = [1, 2, 3, 4, 5, 198, 198, 9], [1, 2, 3, 4, 5, 271, 9, 10]
    assert hashes(one)[0] == hashes(two)[0]
    assert hashes(one)[1] != hashes(two)[1]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 40), st.integers(1, 7))
def test_known_hashes_change_nothing(token_ids: list[int], num_first: int, page_size: int) -> None:
    known = hashes(token_ids[:num_first], page_size=page_size)
    whole = hashes(token_ids, page_size=page_size)
    assert hashes(token_ids, page_size=page_size, known=known) == whole
    assert hashes(token_ids[:num_first], page_size=page_size, known=whole) == known
