from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st

from pageferry.router.gateway.strict_json import Json
from pageferry.router.gateway.tool_calls import ToolCallReader

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
BARE = '<tool_call>{"name": "g"}</tool_call>'


def read(parts: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = ToolCallReader(lambda: "0")
    text, calls = "", list[Json]()
    for more, found in (*map(reader.push, parts), reader.finish()):
        text += more
        calls += found
    return text, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


F, G = ("f", '{"a": 1}'), ("g", "{}")


@pytest.mark.parametrize(
    ("whole", "text", "calls"),
    [
        ("", "", []),
        ("no call, 1 < 2 <tool", "no call, 1 < 2 <tool", []),
        (CALL, "", [F]),
        (f"{CALL}\n{BARE}\n", "", [F, G]),
        (f"a{CALL}b", "ab", [F]),
        (CALL.removesuffix("</tool_call>"), "", [F]),  # the end came first
        ("<tool_call>{oops}</tool_call>!", "<tool_call>{oops}</tool_call>!", []),
        (f"<tool_call>[1]</tool_call>{CALL}", "<tool_call>[1]</tool_call>", [F]),
        ('<tool_call>{"name": "\\ud800"}</tool_call>', '<tool_call>{"name": "\\ud800"}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>',) * 2 + ([],),
        ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, []),
    ],
)
def test_calls_are_parted_from_text(whole: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert read([whole]) == (text, calls)


@given(st.lists(st.integers(1, 8)))
def test_how_a_text_is_cut_makes_no_difference(cuts: list[int]) -> None:
    whole, parts, at = f"a <tool{CALL} b<tool_call>x{BARE}<", list[str](), 0
    for size in cuts:
        parts.append(whole[at : at + size])
        at += size
    assert read([*parts, whole[at:]]) == read([whole])
