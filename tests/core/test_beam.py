"""Beam searches on a decode worker: which pages they take, and that all go back, however they end."""

import math
from collections.abc import Iterable

import pytest
from chain_model import golden_beams
from scheduling import Driver, decode, layout, prompt, receive, reserve, sequence, stepped

from pageferry.core.beam import BeamSearch, check_beam
from pageferry.core.errors import InvalidArgumentError
from pageferry.core.sampling import BeamParams, EarlyStopping, Grammar, GrammarKind, SamplingParams, StopParams
from pageferry.core.sequence import FinishReason, Sequence

KINDS = {
    "full": ("0=full", "int8"),
    "selective": ("0=window:7,sinks:3;1=full", "int8"),
    "tails": ("0=full", "int8:channel"),
}
STOPS = range(0, 64, 9)


def beams(
    num_tokens: int, max_tokens: int = 8, width: int = 4, *, stops: Iterable[int] = STOPS, **options: float
) -> Sequence:
    params = BeamParams(width, early_stopping=EarlyStopping.NEVER)
    return sequence(prompt(num_tokens), max_tokens, beam=params, stop_token_ids=stops, **options)  # type: ignore[arg-type]


def check_hypotheses(driver: Driver, root: Sequence) -> None:
    assert driver.ended[root].hypotheses == golden_beams(root.work)
    driver.check_idle()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 16, 19])
def test_a_search_gives_what_it_gives_without_a_scheduler(kind: tuple[str, str], num_tokens: int) -> None:
    of = layout(4, *kind)
    driver = decode((64,) * len(of.groups), of)
    root = beams(num_tokens)
    driver.add(root)
    driver.run()
    check_hypotheses(driver, root)
    assert driver.ended[root].reason is driver.ended[root].hypotheses[0].reason
    assert root not in driver.outputs, "a token of a search that is not over was told"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("num_tokens", [3, 4, 19])
def test_a_search_goes_on_from_received_pages(kind: tuple[str, str], num_tokens: int) -> None:
    of = layout(4, *kind)
    driver = decode((64,) * len(of.groups), of)
    root = beams(num_tokens)
    assert reserve(driver, root)
    driver.receive(root, with_first=False)
    driver.run()
    check_hypotheses(driver, root)


def test_four_beams_of_a_long_prompt_take_hardly_more_pages_than_one_sequence() -> None:
    driver, single = decode(256), decode(256)
    most = []
    for one, root in ((driver, beams(1600, 20, stops=())), (single, sequence(prompt(1600), 20))):
        one.add(root)
        counts = []
        while one.step() is not None:
            counts.append(one.pools.num_resident)
        most.append(max(counts))
    assert most[0] < 1.3 * most[1], most
    assert most[0] - most[1] == 3, "each beam has an open page of its own, and nothing else"


def test_open_pages_are_copied_once_and_the_last_holder_writes_to_its_own() -> None:
    driver = decode(64, layout(4))
    driver.add(beams(6, stops=()))
    driver.step()
    plan = driver.step()
    assert plan is not None
    assert len(plan.chunks) == 4
    assert len({source for source, _ in plan.copies}) == 1
    assert len({target for _, target in plan.copies}) == 3


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("num_steps", range(1, 9))
def test_pages_go_back_when_a_search_is_aborted(kind: tuple[str, str], num_steps: int) -> None:
    of = layout(4, *kind)
    driver = decode((64,) * len(of.groups), of)
    root = beams(6, stops=())
    driver.add(root)
    for _ in range(num_steps):
        driver.step()
    driver.scheduler.abort(root)
    driver.check_idle()


@pytest.mark.parametrize("num_steps", range(5))
def test_pages_go_back_when_a_search_is_aborted_in_a_step(num_steps: int) -> None:
    driver = decode(64, layout(4))
    root = beams(6, stops=())
    driver.add(root)
    for _ in range(num_steps):
        driver.step()
    plan = driver.scheduler.schedule(0.0)
    assert plan is not None
    result = driver.model.run(plan)
    driver.scheduler.abort(root)
    driver.record(driver.scheduler.apply(plan, result, 0.0))
    driver.pools.check_integrity()
    driver.check_idle()


def test_a_deadline_ends_a_search_whole() -> None:
    driver = decode(64, layout(4))
    root = beams(6, deadline=5.0)
    driver.add(root)
    driver.step()
    driver.step()
    (ended,) = driver.scheduler.expire(5.0)
    assert (ended.sequence, ended.failure) == (root, "deadline")
    driver.check_idle()


def test_a_beam_that_cannot_go_on_ends_the_search() -> None:
    driver = decode(64, layout(4))
    root = beams(6)
    driver.add(root)
    driver.step()
    driver.model.failing.add(root)
    driver.run()
    assert driver.ended[root].failure == "logits are not numbers"
    driver.check_idle()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("num_steps", range(2, 8))
def test_a_preempted_search_goes_on_with_its_beams(kind: tuple[str, str], num_steps: int) -> None:
    of = layout(4, *kind)
    driver = decode((64,) * len(of.groups), of, max_num_seqs=5, prefix_cache=False)
    root = beams(6, 10, arrival=0.0, priority=1, stops=())
    driver.add(root)
    for _ in range(num_steps):
        driver.step()
    urgent = sequence(prompt(5, 1), 2)
    other = sequence(prompt(5, 2), 2)
    driver.add(urgent, other)
    driver.run()
    assert root.num_preemptions == 1
    driver.check_golden(urgent)
    driver.check_golden(other)
    check_hypotheses(driver, root)


def test_searches_that_catch_up_after_preemption_do_not_wait_for_one_another() -> None:
    """Beams of two searches lack several pages each, and the third one has taken the last."""
    driver = decode(27, layout(4), max_num_seqs=20, local_chunk_tokens=64, headroom_pages=0, prefix_cache=False)
    params = BeamParams(2, early_stopping=EarlyStopping.NEVER)
    searches = [
        sequence(prompt(num_tokens, variant), max_tokens, priority=1, arrival=number, beam=params)
        for number, (num_tokens, variant, max_tokens) in enumerate([(6, 4, 26), (2, 8, 36), (48, 4, 19)])
    ]
    driver.add(*searches[:2])
    for _ in range(24):
        driver.step()
    driver.add(sequence(prompt(92, 4), 2, arrival=2.0))
    driver.step()
    driver.add(searches[2])
    driver.run()
    assert max(one.num_preemptions for one in searches) > 0
    for one in searches:
        check_hypotheses(driver, one)


def test_a_search_takes_a_slot_for_each_beam() -> None:
    driver = decode(64, layout(4), max_num_seqs=5)
    root, first, second = beams(6), sequence(prompt(5, 1), 12), sequence(prompt(5, 2), 12)
    driver.add(root)
    driver.step()
    driver.add(first)
    driver.add(second)
    driver.step()
    assert driver.scheduler.num_running == 5
    assert {one.owner for one in stepped(driver.plans[-1])} == {root, first}
    driver.run()
    assert {root, first, second} == set(driver.ended)


def test_reservations_count_beams_too() -> None:
    driver = decode(64, layout(4), max_num_seqs=5)
    receive(driver, sequence(prompt(5, 1), 4), sequence(prompt(5, 2), 4))
    assert not reserve(driver, beams(6))


def test_a_width_above_the_slots_is_refused() -> None:
    driver = decode(64, layout(4), max_num_seqs=3)
    with pytest.raises(InvalidArgumentError, match=r"^beam\.width is 4, must be at most max_num_seqs, 3$"):
        driver.add(beams(6))


def test_a_search_that_never_fits_is_refused_with_both_numbers() -> None:
    # One full page of the prompt, and of each beam an open one and two more.
    fitting = decode(13, layout(4))
    fitting.add(beams(6, 11))
    with pytest.raises(InvalidArgumentError, match="needs 17 pages, for 17 tokens in each of 4 beams; the pool has 16"):
        decode(16, layout(4)).add(beams(6, 12))


def test_more_open_pages_than_there_are_tails_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^beam\.width is 4, must be at most 3, the open pages"):
        decode(64, layout(4, page_format="int8:channel"), num_tails=3).add(beams(6))


def test_what_a_search_cannot_be_asked_for_is_refused() -> None:
    check_beam(SamplingParams(), StopParams(4))
    wrong = {
        "logprobs": (SamplingParams(num_logprobs=0), StopParams(4)),
        "prompt_logprobs": (SamplingParams(num_prompt_logprobs=1), StopParams(4)),
        "grammar": (SamplingParams(grammar=Grammar(GrammarKind.REGEX, "a+")), StopParams(4)),
        "stop.max_repeats": (SamplingParams(), StopParams(4, max_repeats=3)),
    }
    for field, (sampling, stop) in wrong.items():
        with pytest.raises(InvalidArgumentError, match=f"^{field} is .* must not be set with beam"):
            check_beam(sampling, stop)
    with pytest.raises(InvalidArgumentError, match=r"^output_ids is .*1 tokens"):
        check_beam(SamplingParams(), StopParams(4), 1)


def test_hypotheses_are_ranked_by_their_penalised_scores() -> None:
    search = BeamSearch(BeamParams(2, 1.0, EarlyStopping.FIRST), StopParams(3, stop_token_ids=frozenset({9})))
    search.advance([[(9, -0.5), (1, -1.0), (2, -1.5)]])
    assert [beam.token_ids for beam in search.running] == [(1,), (2,)]
    search.advance([[(9, -0.2), (3, -0.3), (4, -3.0)], [(9, -0.1), (5, -0.4), (6, -3.0)]])
    assert search.is_over
    found = [(one.token_ids, round(one.score, 6), one.reason) for one in search.hypotheses]
    assert found == [((9,), -0.5, FinishReason.STOP), ((1, 9), -0.6, FinishReason.STOP)]


@pytest.mark.parametrize("penalty", [-32.0, 32.0])
def test_the_greatest_length_penalties_give_numbers(penalty: float) -> None:
    params = BeamParams(1, penalty)
    with pytest.raises(InvalidArgumentError, match=r"^beam\.length_penalty is -?33"):
        BeamParams(1, penalty + penalty / 32)
    search = BeamSearch(params, StopParams(2**31 - 1))
    assert math.isfinite(search._score(-1e9, 2**31 - 1))
