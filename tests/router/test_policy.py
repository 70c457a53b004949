"""Which workers a request goes to."""

from dataclasses import replace

import pytest
from fake_workers import LAYOUT
from hypothesis import given, strategies as st

from pageferry.core.formats import PageFormat
from pageferry.core.groups import CacheGroup
from pageferry.router.candidates import DecodeState, Demand, PrefillState
from pageferry.router.policy import Route, Settings, Source, choose

OTHER_LAYOUT = replace(LAYOUT, page_size=32)
SETTINGS = Settings(local_prefill_tokens=32, headroom_pages=1)
P = PrefillState("p1", LAYOUT, num_waiting=0, queued_tokens=0, tokens_per_s=1000, chunk_tokens=256, cached_tokens=0)
D = DecodeState(
    "d1",
    LAYOUT,
    num_active=0,
    max_num_seqs=8,
    available_pages=(100,),
    chunk_tokens=128,
    queued_tokens=0,
    tokens_per_s=0,
    cached_tokens=0,
)
BUSY = replace(P, queued_tokens=3000, num_waiting=2, num_running=4)
PROMPT = Demand(400, 100)


def places(route: Route | None) -> tuple[str | None, str | None] | None:
    return None if route is None else (route.prefill, route.decode)


def test_prefill_goes_where_the_first_token_is_predicted_first() -> None:
    busy = replace(P, address="p2", queued_tokens=300)
    cached = replace(P, address="p3", queued_tokens=300, cached_tokens=384)
    slow = replace(P, address="p4", tokens_per_s=100)
    assert places(choose(PROMPT, [busy, slow, P], [D], SETTINGS)) == ("p1", "d1")
    assert places(choose(PROMPT, [busy, slow, cached, P], [D], SETTINGS)) == ("p3", "d1")


def test_decode_goes_where_pages_and_slots_are() -> None:
    full = replace(D, address="d2", available_pages=(25,))
    loaded = replace(D, address="d3", num_active=3)
    assert places(choose(PROMPT, [P], [full, loaded, D], SETTINGS)) == ("p1", "d1")
    assert places(choose(PROMPT, [P], [full, loaded], SETTINGS)) == ("p1", "d3")
    assert choose(PROMPT, [P], [full], SETTINGS) is None  # 25 pages and one of headroom
    assert choose(PROMPT, [P], [replace(D, num_active=8)], SETTINGS) is None


def test_a_further_answer_goes_where_the_prompt_is_while_there_is_room() -> None:
    further = replace(PROMPT, near="d2")
    loaded = replace(D, address="d2", num_active=7)
    assert places(choose(further, [P], [D, loaded], SETTINGS)) == ("p1", "d2")
    assert places(choose(further, [P], [D, replace(loaded, num_active=8)], SETTINGS)) == ("p1", "d1")


WINDOWED = replace(
    LAYOUT,
    format=PageFormat.parse("int8:channel"),
    groups=(CacheGroup((0,), window=64, sinks=4), CacheGroup((1,))),
)


def test_each_pool_must_have_room_and_the_scarcest_counts() -> None:
    decode = replace(D, layout=WINDOWED, available_pages=(100, 100, 8))
    # Sinks: 1 page. The window with a chunk of 128 touches ⌈(63 + 127) / 16⌉ + 1 pages. Full: 25 and one of headroom.
    assert decode.needed_pages(PROMPT, headroom_pages=1) == (14, 26, 1)
    assert replace(decode, cached_tokens=320).needed_pages(PROMPT, headroom_pages=1) == (14, 6, 1)
    assert decode.needed_pages(Demand(40, 1), headroom_pages=1) == (3, 3, 1), "no headroom for what can't grow"
    assert decode.needed_pages(Demand(40, 500), headroom_pages=1) == (14, 4, 1), "what it can come to hold"
    assert decode.has_room(PROMPT, headroom_pages=1)
    for available in ((13, 100, 8), (100, 25, 8), (100, 100, 0)):
        assert not replace(decode, available_pages=available).has_room(PROMPT, headroom_pages=1)
    assert decode.scarcest_pages(PROMPT, headroom_pages=1) == (26, 100)
    assert replace(decode, available_pages=(20, 100, 8)).scarcest_pages(PROMPT, headroom_pages=1) == (14, 20)
    few_tails = replace(decode, address="d2", available_pages=(100, 100, 2))
    assert places(choose(PROMPT, [replace(P, layout=WINDOWED)], [few_tails, decode], SETTINGS)) == ("p1", "d1")


def test_a_cached_prefix_attracts_but_load_outweighs_a_short_one() -> None:
    long_cached = replace(D, address="d2", num_active=1, cached_tokens=320)
    short_cached = replace(D, address="d3", num_active=3, cached_tokens=16)
    assert places(choose(PROMPT, [P], [D, long_cached], SETTINGS)) == ("p1", "d2")
    assert places(choose(PROMPT, [P], [D, short_cached], SETTINGS)) == ("p1", "d1")


@pytest.mark.parametrize(
    ("demand", "prefills", "decode", "reason"),
    [
        (Demand(32, 100), [P], D, "32 uncached tokens are at most 32"),
        (PROMPT, [P], replace(D, cached_tokens=384), "16 uncached tokens are at most 32"),
        (PROMPT, [], D, "no prefill worker is usable"),
        (PROMPT, [replace(P, layout=OTHER_LAYOUT)], D, "no prefill worker is usable"),
        (replace(PROMPT, local_only=True), [P], D, "prefill workers have failed"),
        (PROMPT, [BUSY], replace(D, tokens_per_s=1000), "predicted to be faster"),
    ],
)
def test_the_decode_worker_alone(
    demand: Demand, prefills: list[PrefillState], decode: DecodeState, reason: str
) -> None:
    route = choose(demand, prefills, [decode], SETTINGS)
    assert route is not None
    assert (route.source, route.prefill) == (Source.LOCAL, None)
    assert route.attributes["pageferry.route.reason"] == reason


def test_a_decode_worker_that_is_faster_but_shall_not_compute() -> None:
    slow, fast = replace(P, tokens_per_s=10), replace(D, tokens_per_s=1000)
    assert places(choose(PROMPT, [slow], [fast], SETTINGS)) == (None, "d1")
    assert places(choose(PROMPT, [slow], [fast], replace(SETTINGS, local_advantage=1e9))) == ("p1", "d1")


@pytest.mark.parametrize(
    ("prefill", "decode", "fits"),
    [
        ("int8", "int8", True),
        ("bf16", "int8", True),
        ("fp32", "k=int8,v=int4:asym", True),
        ("fp16", "bf16", True),
        ("int8", "bf16", False),
        ("int8", "int4", False),
        ("int8", "int8:asym", False),
        ("k=bf16,v=int8", "int8", False),
    ],
)
def test_pages_go_where_they_are_equal_or_can_be_converted(prefill: str, decode: str, fits: bool) -> None:
    sender = replace(P, layout=replace(LAYOUT, format=PageFormat.parse(prefill)))
    receiver = replace(D, layout=replace(LAYOUT, format=PageFormat.parse(decode)))
    route = choose(PROMPT, [sender], [receiver], SETTINGS)
    assert route is not None and (route.source is Source.PUSHED) == fits


def test_little_is_not_enough_to_compute_prompts_beside_streams() -> None:
    faster = replace(D, tokens_per_s=1500)
    route = choose(PROMPT, [P], [faster], SETTINGS)
    assert route is not None and route.source is Source.PUSHED
    assert route.attributes["pageferry.route.alternative"] == "local"
    assert route.attributes["pageferry.route.alternative_ttft_ms"] == pytest.approx(400 / 1500 * 1000)


def test_streams_are_not_stalled_for_longer_than_one_prompt_would_wait() -> None:
    fast = replace(D, tokens_per_s=4000)
    sources = [choose(PROMPT, [BUSY], [replace(fast, num_active=n)], SETTINGS) for n in range(8)]
    assert [route is not None and route.source is Source.LOCAL for route in sources] == [True] * 8
    assert BUSY.ttft_s(PROMPT) == pytest.approx((256 + 6 * 400 + 400) / 1000)
    slow = replace(fast, tokens_per_s=1000)
    routes = [choose(PROMPT, [replace(BUSY, num_waiting=0)], [replace(slow, num_active=n)], SETTINGS) for n in range(8)]
    assert [route is not None and route.source is Source.LOCAL for route in routes] == [True] * 4 + [False] * 4


def test_a_short_prompt_need_not_wait_for_a_long_one() -> None:
    behind_a_long_one = replace(P, num_running=1, queued_tokens=1500)
    assert behind_a_long_one.ttft_s(Demand(100, 10)) == pytest.approx((256 + 100 + 100) / 1000)
    assert behind_a_long_one.ttft_s(Demand(2000, 10)) == pytest.approx((1500 + 2000) / 1000)


def test_a_prefill_worker_of_unknown_speed_is_given_work() -> None:
    route = choose(PROMPT, [replace(P, tokens_per_s=0)], [replace(D, tokens_per_s=5000)], SETTINGS)
    assert route is not None and route.source is Source.PUSHED


def test_one_token_goes_to_a_prefill_worker_alone() -> None:
    one = replace(PROMPT, num_left=1)
    route = choose(one, [P], [], SETTINGS)
    assert route is not None and (route.source, places(route)) == (Source.PREFILL_ONLY, ("p1", None))
    assert places(choose(one, [], [D], SETTINGS)) == (None, "d1")
    assert choose(one, [replace(P, refuses=True)], [D], SETTINGS) is None


def test_a_prefill_worker_gets_one_more_than_it_runs() -> None:
    waiting = replace(P, num_waiting=1, queued_tokens=300)
    assert choose(PROMPT, [waiting], [D], SETTINGS) is None
    assert places(choose(Demand(100, 100), [waiting], [D], SETTINGS)) == ("p1", "d1")  # two steps compute it all
    long_running = replace(P, num_waiting=0, queued_tokens=30_000)
    assert places(choose(Demand(64, 100), [long_running], [D], SETTINGS)) == ("p1", "d1")  # and goes first there
    assert choose(PROMPT, [replace(P, refuses=True)], [D], SETTINGS) is None


def test_less_urgent_prompts_are_waited_for_by_a_chunk_at_most() -> None:
    full = replace(P, num_running=4, behind_tokens=10_000)
    assert full.ttft_s(Demand(100, 10)) == pytest.approx((256 + 100) / 1000)
    assert replace(full, behind_tokens=50).ttft_s(Demand(100, 10)) == pytest.approx((50 + 100) / 1000)
    assert places(choose(PROMPT, [full], [D], SETTINGS)) == ("p1", "d1")


def test_pages_are_of_a_format_that_is_wanted() -> None:
    fp32 = replace(LAYOUT, format=PageFormat.parse("fp32"))
    exact, quick = replace(P, layout=fp32), replace(P, address="p2", tokens_per_s=9000)
    kept = replace(D, layout=fp32, address="d2", num_active=7)
    wanted = replace(PROMPT, page_formats=(PageFormat.parse("fp32"), PageFormat.parse("bf16")))
    assert places(choose(wanted, [exact, quick], [D, kept], SETTINGS)) == ("p1", "d2")
    assert choose(wanted, [exact], [D], SETTINGS) is None
    assert places(choose(replace(wanted, num_left=1), [exact, quick], [], SETTINGS)) == ("p1", None)


LAYOUTS = st.sampled_from([LAYOUT, OTHER_LAYOUT, replace(LAYOUT, format=PageFormat.parse("fp32"))])
COUNTS = st.integers(0, 40)
PREFILLS = st.lists(
    st.builds(
        PrefillState,
        st.sampled_from(["p1", "p2", "p3"]),
        LAYOUTS,
        num_waiting=st.integers(0, 2),
        queued_tokens=st.integers(0, 2000),
        tokens_per_s=st.sampled_from([0.0, 100.0, 5000.0]),
        chunk_tokens=st.just(256),
        cached_tokens=st.sampled_from([0, 32]),
        refuses=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda p: p.address,
)
DECODES = st.lists(
    st.builds(
        DecodeState,
        st.sampled_from(["d1", "d2", "d3"]),
        LAYOUTS,
        num_active=st.integers(0, 8),
        max_num_seqs=st.just(8),
        chunk_tokens=st.just(128),
        available_pages=st.tuples(st.integers(-5, 60)),
        queued_tokens=st.integers(0, 2000),
        tokens_per_s=st.sampled_from([0.0, 100.0, 5000.0]),
        cached_tokens=st.sampled_from([0, 32]),
    ),
    max_size=3,
    unique_by=lambda d: d.address,
)
DEMANDS = st.builds(Demand, st.integers(33, 600), st.integers(1, 3), local_only=st.booleans())


@given(DEMANDS, PREFILLS, DECODES)
def test_a_route_is_always_one_that_the_workers_can_take(
    demand: Demand, prefills: list[PrefillState], decodes: list[DecodeState]
) -> None:
    route = choose(demand, prefills, decodes, SETTINGS)
    if route is None:
        return
    prefill = next((p for p in prefills if p.address == route.prefill), None)
    decode = next((d for d in decodes if d.address == route.decode), None)
    assert (prefill is None) == (route.source is Source.LOCAL)
    assert (decode is None) == (route.source is Source.PREFILL_ONLY)
    if prefill is not None:
        assert prefill.has_little_queued(demand) and not prefill.refuses and not demand.local_only
    if decode is not None:
        assert decode.has_room(demand, SETTINGS.headroom_pages)
    if prefill is not None and decode is not None:
        assert prefill.layout.ships_to(decode.layout)
    assert choose(demand, prefills[::-1], decodes[::-1], SETTINGS) == route  # the order of workers is no matter


@given(DEMANDS, DECODES)
def test_a_decode_worker_with_room_is_never_left_waiting_where_it_is_alone(
    demand: Demand, decodes: list[DecodeState]
) -> None:
    has_room = any(decode.has_room(demand, SETTINGS.headroom_pages) for decode in decodes)
    assert (choose(demand, [], decodes, SETTINGS) is not None) == has_room


def test_an_untried_prefill_worker_goes_before_a_fast_one_while_it_is_idle() -> None:
    fast, untried = replace(P, tokens_per_s=5000), replace(P, address="untried:1", tokens_per_s=0)
    for busy, expected in ((untried, "untried:1"), (replace(untried, num_running=1), P.address)):
        route = choose(PROMPT, [fast, busy], [D], SETTINGS)
        assert route is not None
        assert route.prefill == expected


FULL = replace(D, num_active=D.max_num_seqs)


@pytest.mark.field("vllm-project/vllm#45561", "vllm-project/vllm#40004", "vllm-project/vllm#54530")
@pytest.mark.parametrize(
    ("priority", "least_priority", "goes"),
    [(0, 5, True), (-1, 0, True), (5, 5, False), (6, 5, False), (0, None, False)],
)
def test_urgent_work_goes_to_a_full_worker_where_something_less_urgent_runs(
    priority: int, least_priority: int | None, goes: bool
) -> None:
    full = replace(FULL, least_priority=least_priority)
    route = choose(replace(PROMPT, priority=priority), [], [full], SETTINGS)
    assert (route is not None) == goes


def test_a_place_of_less_urgent_work_is_taken_only_where_none_is_free() -> None:
    full = replace(FULL, address="d0", least_priority=9)
    free = replace(D, address="d1", num_active=D.max_num_seqs - 1)
    route = choose(PROMPT, [], [full, free], SETTINGS)
    assert route is not None
    assert route.decode == "d1"
