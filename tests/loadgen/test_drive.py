import asyncio
from collections.abc import Iterator

import pytest
from fake_target import FakeTarget, failing

from pageferry.core.errors import InvalidArgumentError
from pageferry.loadgen.drive import Driver
from pageferry.loadgen.result import Record
from pageferry.loadgen.target import Answer, Question


def questions(count: int, at_s: float | None = None) -> Iterator[Question]:
    return (Question(f"prompt {index}", 16, 4, at_s) for index in range(count))


def driver(target: FakeTarget, timeout_s: float = 60.0, stops_after: int | None = None) -> Driver:
    seen: list[Record] = []

    def on_record(record: Record) -> bool:
        seen.append(record)
        return stops_after is not None and len(seen) >= stops_after

    return Driver(target, timeout_s, on_record)


async def test_a_closed_loop_keeps_its_number_in_flight() -> None:
    target = FakeTarget()
    driven = await driver(target).closed(questions(20), 4, None)
    assert target.most_in_flight == 4 and len(target.asked) == 20
    assert len(driven.records) == 20 and driven.send_lags_ms == []
    record = driven.records[0]
    assert (record.ttft_ms, record.gaps_ms, record.input_tokens, record.output_tokens) == (100.0, (10.0,) * 3, 16, 4)
    assert record.error is None and record.start_s >= 0 and record.e2e_ms > 0


async def test_a_closed_loop_begins_none_after_its_time() -> None:
    driven = await driver(FakeTarget()).closed(questions(10), 2, 0.0)
    assert driven.records == []


async def test_an_open_loop_sends_whatever_is_in_flight() -> None:
    gate = asyncio.Event()
    target = FakeTarget(gate=gate)
    task = asyncio.create_task(driver(target).open(questions(30, at_s=0.0), None))
    await target.until_in_flight(30)
    gate.set()
    driven = await task
    assert len(driven.records) == len(driven.send_lags_ms) == 30


async def test_an_open_loop_waits_until_a_request_is_due() -> None:
    driven = await driver(FakeTarget()).open(questions(1, at_s=0.05), None)
    assert driven.records[0].start_s >= 0.045  # a timer's tick early is on time
    assert driven.send_lags_ms[0] >= 0


async def test_a_cap_lets_requests_wait_and_says_how_late_they_are() -> None:
    gate = asyncio.Event()
    target = FakeTarget(gate=gate)
    task = asyncio.create_task(driver(target).open(questions(3, at_s=0.0), 2))
    await target.until_in_flight(2)
    await asyncio.sleep(0.02)
    assert len(target.asked) == 2
    gate.set()
    driven = await task
    assert target.most_in_flight == 2 and len(driven.records) == 3
    first_ms, _, last_ms = driven.send_lags_ms
    assert last_ms - first_ms >= 15


async def test_a_failure_keeps_what_had_come() -> None:
    def fill(question: Question, answer: Answer) -> None:
        answer.take_piece(answer.last_s + 0.5)
        answer.take_piece(answer.last_s + 0.25)
        failing("HTTP 500: broken")(question, answer)

    driven = await driver(FakeTarget(fill)).closed(questions(2), 1, None)
    record = driven.records[0]
    assert record.error == "HTTP 500: broken"
    assert record.ttft_ms == pytest.approx(500) and record.gaps_ms == (pytest.approx(250),)
    assert (record.input_tokens, record.output_tokens) == (16, 2)


async def test_a_timeout_is_a_failure() -> None:
    driven = await driver(FakeTarget(gate=asyncio.Event()), timeout_s=0.01).closed(questions(1), 1, None)
    (record,) = driven.records
    assert record.error == "no end within 0.01 s" and record.ttft_ms is None and record.e2e_ms >= 10


async def test_other_lengths_than_asked_for_are_counted() -> None:
    def fill(question: Question, answer: Answer) -> None:
        answer.input_tokens, answer.output_tokens = 17, 4 if question.prompt == "prompt 0" else 3

    driven = await driver(FakeTarget(fill)).closed(questions(3), 1, None)
    assert (driven.num_other_inputs, driven.num_other_outputs) == (3, 2)


async def test_ctrl_c_gives_what_was_measured() -> None:
    gate = asyncio.Event()

    def fill(question: Question, answer: Answer) -> None:
        gate.clear()  # the first one passes, and shuts the gate behind it

    target, ended = FakeTarget(fill, gate), asyncio.Event()
    task = asyncio.create_task(Driver(target, 60.0, lambda _: bool(ended.set())).closed(questions(9), 3, None))
    await target.until_in_flight(3)
    gate.set()
    await asyncio.wait_for(ended.wait(), 60)
    task.cancel()
    driven = await task
    assert driven.interrupted and len(driven.records) >= 1
    assert driven.num_dropped == len(target.asked) - len(driven.records) > 0
    assert target.in_flight == 0


async def test_a_record_can_break_the_run_off() -> None:
    target = FakeTarget()
    driven = await driver(target, stops_after=5).closed(questions(1000), 2, None)
    assert 5 <= len(driven.records) <= 7 and not driven.interrupted
    assert target.in_flight == 0


async def test_a_question_that_cannot_be_made_is_the_error() -> None:
    def made() -> Iterator[Question]:
        yield from questions(2)
        raise InvalidArgumentError("too short")

    with pytest.raises(InvalidArgumentError, match="too short"):
        await driver(FakeTarget()).closed(made(), 1, None)
