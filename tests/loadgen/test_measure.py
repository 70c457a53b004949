import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_target import FakeTarget, failing, full_answer

from pageferry.core.errors import UnavailableError
from pageferry.loadgen.lengths import parse_lengths
from pageferry.loadgen.load import Load
from pageferry.loadgen.measure import Measurement
from pageferry.loadgen.observe import Processes
from pageferry.loadgen.prompts import PromptMaker, tokenizer_of
from pageferry.loadgen.questions import Questions
from pageferry.loadgen.result import BenchResult, Slo
from pageferry.loadgen.target import Answer, Question, ServerLoad


class Progress:
    def __init__(self) -> None:
        self.begun: list[tuple[str, int | None]] = []
        self.num_failed = self.num_ended = 0

    def begin(self, what: str, total: int | None) -> None:
        self.begun.append((what, total))

    def advance(self, failed: bool) -> None:
        self.num_ended += 1
        self.num_failed += failed


@pytest.fixture
def made(tiny_model: Path):
    def make(target: FakeTarget, **options: Any) -> tuple[Measurement, Progress]:
        load = Load(parse_lengths("--input-tokens", "16"), parse_lengths("--output-tokens", "4"), **options)
        questions = Questions(load, PromptMaker(tokenizer_of(str(tiny_model)), seed=load.seed, chat=False))
        progress = Progress()
        return Measurement(target, load, questions, progress, Processes([]), "a label", "the command"), progress

    return make


async def test_a_run_and_its_result(made) -> None:
    target = FakeTarget()
    target.notes = ["the target refuses min_tokens"]
    measurement, progress = made(target, requests=10, concurrency=2, warmup=3, slo=Slo(150.0, None, None))
    result = await measurement.run()
    assert len(target.asked) == 13 and result.summary.requests == result.summary.completed == 10
    assert progress.begun == [("warming up", 3), ("preparing", None), ("measuring", 10)] and progress.num_ended == 13
    assert (result.label, result.command, result.target) == ("a label", "the command", target.info)
    assert result.notes == ("the target refuses min_tokens",)
    assert result.load["requests"] == 10 and result.summary.send_lag_ms is None
    assert result.summary.goodput is not None and result.summary.goodput.share == 1.0
    assert (result.summary.ttft_ms.p50, result.summary.tpot_ms.p50) == (100.0, 10.0)
    starts = [record.start_s for record in result.requests]
    assert starts == sorted(starts) and not measurement.interrupted
    assert BenchResult.from_json(result.to_json()) == result


async def test_failures_are_in_the_result(made) -> None:
    measurement, progress = made(FakeTarget(failing("HTTP 503: busy")), requests=4)
    result = await measurement.run()
    assert result.summary.errors == {"HTTP 503: busy": 4} and result.summary.completed == 0
    assert result.notes[0] == "1 of 1 warm-up requests failed: HTTP 503: busy" and progress.num_failed == 5


async def test_an_open_loop_says_how_late_it_was(made) -> None:
    measurement, _ = made(FakeTarget(), rate=500.0, requests=20, warmup=0)
    lag = (await measurement.run()).summary.send_lag_ms
    assert lag is not None and lag.count == 20


async def test_notes_of_lengths_and_caches(made) -> None:
    def fill(question: Question, answer: Answer) -> None:
        full_answer(question, answer)
        answer.output_tokens, answer.input_tokens, answer.cached_tokens = 3, 15, 12

    measurement, _ = made(FakeTarget(fill), requests=5, prefix_tokens=8)
    notes = (await measurement.run()).notes
    assert "5 of 5 prompts have another length than asked for" in notes
    assert "5 of 5 outputs have another length than asked for" in notes
    assert any(note.startswith("60 tokens of prompts were cached") for note in notes)


async def test_a_target_that_is_not_there(made) -> None:
    class Missing(FakeTarget):
        async def prepare(self) -> list[str]:
            raise UnavailableError("nobody answers")

    target = Missing()
    with pytest.raises(UnavailableError, match="nobody answers"):
        await made(target, requests=1)[0].run()
    assert target.asked == []


async def test_ctrl_c_gives_a_result(made) -> None:
    target = FakeTarget(gate=asyncio.Event())
    measurement, _ = made(target, requests=10, concurrency=2, warmup=0)
    task = asyncio.create_task(measurement.run())
    await target.until_in_flight(2)
    task.cancel()
    result = await task
    assert measurement.interrupted and result.summary.requests == 0
    assert result.notes[0] == "interrupted, with 2 requests in flight that are not counted"


async def test_ctrl_c_while_warming_up_measures_nothing(made) -> None:
    target = FakeTarget(gate=asyncio.Event())
    task = asyncio.create_task(made(target, requests=10)[0].run())
    await target.until_in_flight(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def limited(capacity: float):
    """Answers that keep a limit of 150 ms only where requests come at most so many a second, evenly."""
    last_s: list[float] = [0.0]

    def fill(question: Question, answer: Answer) -> None:
        full_answer(question, answer)
        if question.at_s:
            answer.ttft_ms = 100.0 if question.at_s - last_s[0] >= 0.999 / capacity else 200.0
        last_s[0] = question.at_s or 0.0

    return fill


@pytest.mark.parametrize(("capacity", "lowest"), [(700.0, 700 / 1.1), (150.0, None), (5000.0, 1600.0)])
async def test_the_highest_rate_that_keeps_the_limits(made, capacity: float, lowest: float | None) -> None:
    target = FakeTarget(limited(capacity))
    target.load = ServerLoad(0, 0, (0,), 0, 64)
    options = {"find_goodput": True, "slo": Slo(150.0, None, None), "rate_range": (200.0, 1600.0), "warmup": 0}
    measurement, progress = made(target, requests=8, duration_s=0.005, arrivals="constant", **options)
    result = await measurement.run()
    search = result.goodput_search
    assert search is not None
    if lowest is None:
        assert search.rate is None and any("not even 200 requests/s" in note for note in result.notes)
        assert len(search.trials) == 1 and search.trials[0].share < 1
    else:
        assert search.rate is not None and lowest <= search.rate <= capacity
        assert result.summary.completed == 8 and result.summary.goodput is not None
        assert result.summary.goodput.share == 1.0  # the figures are of the best trial
        assert any("raise --rate-range" in note for note in result.notes) == (search.rate == 1600.0)
    assert ("200 requests/s", 8) in progress.begun


async def test_a_search_that_is_interrupted(made) -> None:
    target = FakeTarget(gate=asyncio.Event())
    options = {"find_goodput": True, "slo": Slo(150.0, None, None), "warmup": 0, "arrivals": "constant"}
    measurement, _ = made(target, requests=8, duration_s=0.005, **options)
    task = asyncio.create_task(measurement.run())
    await target.until_in_flight(1)
    task.cancel()
    result = await task
    assert measurement.interrupted and result.goodput_search is not None and result.goodput_search.trials == ()
    assert "interrupted: the search for the highest rate is not over" in result.notes


async def test_ctrl_c_between_trials(made) -> None:
    target, asked = FakeTarget(), asyncio.Event()
    target.load = ServerLoad(running=1, waiting=0, batch_sizes=(1,), pages_used=1, pages_total=64)

    async def server_load() -> ServerLoad | None:
        asked.set()
        return target.load

    target.server_load = server_load
    options = {"find_goodput": True, "slo": Slo(150.0, None, None), "warmup": 0, "arrivals": "constant"}
    measurement, _ = made(target, requests=2, duration_s=0.005, rate_range=(200.0, 1600.0), **options)
    task = asyncio.create_task(measurement.run())
    await asyncio.wait_for(asked.wait(), 60)  # the server never rests, so that the search waits
    task.cancel()
    result = await task
    assert measurement.interrupted
    assert "interrupted: the search for the highest rate is not over" in result.notes
