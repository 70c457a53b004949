"""Banned sequences: what may not follow an output."""

from hypothesis import given, strategies as st

from pageferry.core.bans import Bans

IDS = st.lists(st.integers(0, 3), max_size=8)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=6), IDS, IDS)
def test_the_last_id_is_banned_where_the_others_have_just_come(
    banned: list[tuple[int, ...]], prompt: list[int], output: list[int]
) -> None:
    expected = {ids[-1] for ids in banned if tuple(output[len(output) - len(ids) + 1 :]) == ids[:-1]}
    expected -= {ids[-1] for ids in banned if len(ids) - 1 > len(output)}
    expected |= {ids[-1] for ids in banned if len(ids) == 1}
    found = Bans(banned).after([*prompt, *output], len(prompt))
    assert set(found) == expected
