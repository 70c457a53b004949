"""Whether the packaged model still does what it is asked with quantised pages: forms of answers, and long answers."""

import json
import re

import pytest
from cluster import Stub, connected, generate, greedy, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

EXAMPLES = {"apple": "red", "sky": "blue", "grass": "green"}
ASKED = {
    "snow": "white", "coal": "black", "lemon": "yellow", "orange": "orange", "plum": "purple", "brick": "red",
    "leaf": "green", "sea": "blue", "milk": "white", "rose": "pink", "mouse": "grey", "sand": "yellow", "tar": "black",
    "tomato": "red", "wood": "brown", "gold": "yellow", "silver": "grey", "moss": "green", "sun": "yellow",
    "chocolate": "brown",
}  # fmt: skip
STORY = "The old ferry left the harbour at dawn. This is what happened on board, told by its captain:"
# By format, how many fewer of 20 answers than over bf16 pages may be well formed, and how far from theirs the share of
# repeated runs may be. Measured: 19 and 0.981 over bf16, 19 and 0.976 over int8; small models repeat themselves.
LIMITS = {"int8": (1, 0.1)}


def line_of(name: str, colour: str) -> str:
    return f"{name}, {colour} -> " + json.dumps({"name": name, "colour": colour})


async def num_well_formed(stub: Stub) -> int:
    """Of 20 lines that begin like their examples, those that go on as JSON of the same form and content."""
    num_good = 0
    head = "\n".join(line_of(*item) for item in EXAMPLES.items())
    for item in ASKED.items():
        wanted, _, rest = line_of(*item).partition(" ->")
        request = greedy(f"{head}\n{wanted} ->", 40)
        request.stop_strings.append("\n")
        num_good += re.fullmatch(re.escape(rest), (await generate(stub, request)).text.rstrip()) is not None
    return num_good


async def repetition(stub: Stub) -> float:
    """Share of a long answer's runs of four tokens that have come before in it."""
    ids = (await generate(stub, greedy(STORY, 2000), timeout_s=800)).token_ids
    runs = list(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
    return 1 - len(set(runs)) / len(runs)


async def quality(page_format: str) -> tuple[int, float]:
    options = ("--prefill", "0", "--decode", "1", "--model", "smollm2", "--pages", page_format)
    with running(*options, ready_s=180) as cluster:
        async with connected(cluster) as stub:
            found = await num_well_formed(stub), await repetition(stub)
            print(page_format, *found)
            return found


async def test_answers_keep_their_form_and_long_ones_do_not_fall_apart() -> None:
    exact_form, exact_repetition = await quality("bf16")
    assert exact_form >= 15
    for page_format, (fewer, difference) in LIMITS.items():
        form, repeated = await quality(page_format)
        assert form >= exact_form - fewer, page_format
        assert abs(repeated - exact_repetition) <= difference, page_format
