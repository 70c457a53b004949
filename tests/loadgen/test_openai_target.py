import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import fake_openai
import pytest
from fake_openai import DONE, chat_event, event, usage

from pageferry.core.errors import FailedPreconditionError, NotFoundError, UnavailableError
from pageferry.loadgen.openai_target import OpenAiTarget
from pageferry.loadgen.target import Answer, Question, RequestFailedError

QUESTION = Question("Once upon", 7, 3)
WHOLE = (event("a"), event("b"), event("c", finish="length"), usage(7, 3, 4), DONE)


@asynccontextmanager
async def target(url: str, **options: Any) -> AsyncIterator[OpenAiTarget]:
    given = {"chat": False, "model": "", "api_key": "", "temperature": 0.0, "extra_body": {}} | options
    made = OpenAiTarget(url, **given)
    try:
        yield made
    finally:
        await made.close()


async def asked(url: str, question: Question = QUESTION, **options: Any) -> Answer:
    async with target(url, **options) as made:
        answer = Answer(perf_counter())
        ended_s = await made.ask(question, answer)
        assert ended_s >= answer.last_s
        return answer


async def test_what_is_sent() -> None:
    async with fake_openai.serving(*WHOLE) as (url, server), target(url, api_key="key", extra_body={"n": 1}) as made:
        assert await made.prepare() == []
        assert made.info.model == "fake" and made.info.address == url
        await made.ask(QUESTION, Answer(0.0))
        await made.ask(Question("Twice", 7, 5, seed=9), Answer(0.0))
    _, first, second = server.bodies
    assert first == {
        "model": "fake", "prompt": "Once upon", "max_tokens": 3, "min_tokens": 3, "ignore_eos": True, "n": 1,
        "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert (second["max_tokens"], second["min_tokens"], second["seed"]) == (5, 5, 9)
    assert server.headers[1]["Authorization"] == "Bearer key"
    assert server.headers[1]["Accept-Encoding"] == "identity"  # a compressed stream comes in lumps
    assert server.num_connections == 1


async def test_each_request_may_have_a_new_connection() -> None:
    async with fake_openai.serving(*WHOLE) as (url, server), target(url, keep_connections=False) as made:
        await made.ask(QUESTION, Answer(0.0))
        await made.ask(QUESTION, Answer(0.0))
    assert server.num_connections == 2


async def test_a_chat_is_one_message() -> None:
    opening = chat_event({"role": "assistant", "content": ""})
    script = (opening, chat_event({"content": "a"}), chat_event({"content": "b"}), chat_event({}, finish="stop"), DONE)
    async with fake_openai.serving(*script) as (url, server):
        answer = await asked(url, chat=True)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "Once upon"}]
    assert "prompt" not in server.bodies[0]
    assert answer.num_pieces == 2 and answer.output_tokens is None  # neither opening nor finish is a piece


async def test_counts_are_those_of_usage() -> None:
    async with fake_openai.serving(*WHOLE) as (url, _):
        answer = await asked(url)
    assert (answer.input_tokens, answer.output_tokens, answer.cached_tokens) == (7, 3, 4)
    assert answer.num_pieces == 3 and len(answer.gaps_ms) == 2
    assert answer.ttft_ms is not None and answer.ttft_ms > 0


class WatchedAnswer(Answer):
    """Tells of each piece as it is taken."""

    def __init__(self) -> None:
        super().__init__(perf_counter())
        self.taken = asyncio.Event()

    def take_piece(self, now_s: float) -> None:
        super().take_piece(now_s)
        self.taken.set()


async def test_times_are_of_arrivals() -> None:
    gate, answer = asyncio.Event(), WatchedAnswer()
    script = (event("a"), gate, event("b"), event("", finish="stop"), DONE)
    async with fake_openai.serving(*script) as (url, _), target(url) as made:
        task = asyncio.create_task(made.ask(QUESTION, answer))
        await asyncio.wait_for(answer.taken.wait(), 60)
        came_s = perf_counter()
        gate.set()
        await task
    assert answer.num_pieces == 2 and answer.last_s >= came_s
    assert answer.gaps_ms[0] > 0


@pytest.mark.parametrize(
    "script",
    [
        (b"".join(WHOLE),),  # all in one piece
        tuple(bytes([byte]) for byte in b"".join(WHOLE)),  # each byte alone
        tuple(part.replace(b"\n", b"\r\n") for part in WHOLE),
        (b": ping\n\n", *WHOLE),
    ],
    ids=["whole", "bytes", "crlf", "comment"],
)
async def test_events_are_found_however_they_are_cut(script: tuple[bytes, ...]) -> None:
    async with fake_openai.serving(*script) as (url, _):
        answer = await asked(url)
    assert answer.num_pieces == 3 and answer.output_tokens == 3


async def test_pieces_without_text_count_a_bare_finish_does_not() -> None:
    async with fake_openai.serving(event("a"), event(""), event("", finish="length"), DONE) as (url, _):
        assert (await asked(url)).num_pieces == 2
    async with fake_openai.serving(event("", finish="length"), usage(7, 3), DONE) as (url, _):
        answer = await asked(url)  # special tokens only: the finish is all that came
    assert answer.num_pieces == 1 and answer.ttft_ms is not None


@pytest.mark.parametrize("last", [(event("b", finish="stop"),), (event("b"), DONE)], ids=["finish", "done"])
async def test_either_terminal_event_is_enough(last: tuple[bytes, ...]) -> None:
    async with fake_openai.serving(event("a"), *last) as (url, _):
        assert (await asked(url)).num_pieces == 2


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ((event("a"),), "the stream ended without a terminal event"),
        ((), "the stream ended without a terminal event"),
        ((event("a"), None), "Response payload is not completed|ransfer|reset|isconnected"),
        ((event("a"), event(error={"message": "no pages"})), "error event: no pages"),
        ((b"data: {half\n\n",), "no completion chunk"),
        ((b"data: [1]\n\n",), "no completion chunk"),
        ((b'data: {"choices": [null]}\n\n',), "no completion chunk"),
    ],
)
async def test_broken_streams_are_failures(script: tuple[bytes, ...], problem: str) -> None:
    async with fake_openai.serving(*script) as (url, _):
        with pytest.raises(RequestFailedError, match=problem):
            await asked(url)


async def test_a_status_is_a_failure_with_its_message() -> None:
    async with fake_openai.serving(status=503) as (url, _):
        with pytest.raises(RequestFailedError, match=r"^HTTP 503: out of order$"):
            await asked(url)


async def test_refused_fields_are_left_out_and_noted() -> None:
    refused = {"min_tokens", "ignore_eos"}
    async with fake_openai.serving(*WHOLE, refused=refused) as (url, server), target(url) as made:
        notes = await made.prepare()
        await made.ask(QUESTION, Answer(0.0))
    assert len(notes) == 2 and all("refuses" in note for note in notes)
    assert server.bodies[-1].keys() == {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}


async def test_a_field_that_is_needed_and_refused() -> None:
    async with fake_openai.serving(refused={"max_tokens"}) as (url, _), target(url) as made:
        with pytest.raises(FailedPreconditionError, match="answers HTTP 400: Unrecognized argument: max_tokens"):
            await made.prepare()


async def test_a_server_that_is_out_of_order() -> None:
    async with fake_openai.serving(status=500) as (url, _), target(url) as made:
        with pytest.raises(FailedPreconditionError, match="completions answers HTTP 500: out of order"):
            await made.prepare()


async def test_a_wrong_path() -> None:
    async with fake_openai.serving(*WHOLE) as (url, _), target(url.removesuffix("/v1")) as made:
        with pytest.raises(NotFoundError, match=r"HTTP 404.*does the URL end in /v1"):
            await made.prepare()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "http://no-such-host.invalid/v1"])
async def test_nobody_listens(url: str) -> None:
    async with target(url) as made:
        with pytest.raises(UnavailableError, match=r"no server answers at http://.*/v1: "):
            await made.prepare()


async def test_it_says_nothing_of_its_load() -> None:
    async with target("http://127.0.0.1:1/v1") as made:
        assert await made.server_load() is None
