"""The parts of the chaos run, each on its own: what it finds wrong must be found, and nothing else."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from answer import Answer, Choice
from chaos.asks import problems
from chaos.clients import Clients
from chaos.processes import Life, Sample
from chaos.prompts import Golden
from chaos.script import KINDS, PATIENCE_S, Ask, Fault, Script, draw_script, process_of
from chaos.shrink import fewest, shrink
from chaos.tracing import judge
from chaos.trouble import SETTLE_S, Trouble
from traces import SPLIT_SPANS, Span

from pageferry.v1 import inference_pb2 as pb
from pageferry.v1.types_pb2 import FINISH_REASON_LENGTH, FinishReason, GeneratedToken, Logprobs, Usage

# Scripts.


def test_a_seed_gives_one_script_which_a_file_keeps(tmp_path: Path) -> None:
    script = draw_script(7, 200, per_second=20)
    assert script == draw_script(7, 200, per_second=20)
    assert script != draw_script(8, 200, per_second=20)
    assert 3600 < len(script.asks) < 4400
    assert {fault.kind for fault in script.faults} == set(KINDS)
    path = tmp_path / "script.jsonl"
    path.write_text(script.dump(), encoding="utf-8")
    assert Script.load(path) == script


def test_a_part_of_a_script_starts_at_its_beginning() -> None:
    script = Script(1, 100, asks=(Ask(5, 0, 1), Ask(50.5, 1, 1)), faults=(Fault(51, "kill", "decode0", 2),))
    part = script.between(50, 60)
    assert (part.seconds, part.asks, part.faults) == (10, (Ask(0.5, 1, 1),), (Fault(1, "kill", "decode0", 2),))


@pytest.mark.parametrize(
    "line", ['{"at_s": 1, "kind": "kill", "who": "moon1"}', '{"at_s": 1, "prompt": 2}', '{"at_s": 1, "kind": "x"}', "{"]
)
def test_a_wrong_line_of_a_file_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(Script(1, 10).dump() + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"script\.jsonl, line 2: "):
        Script.load(path)


@pytest.mark.parametrize("seed", range(5))
def test_faults_leave_each_process_time_and_some_alive(seed: int) -> None:
    script = draw_script(seed, 1800, per_second=0.1)
    ends: dict[str, float] = {}
    for fault in script.faults:
        assert fault.at_s > ends.get(process_of(fault.who), 0.0)
        assert fault.at_s + fault.for_s <= script.seconds - 4
        ends[process_of(fault.who)] = fault.at_s + fault.for_s
        assert not (KINDS[fault.kind].on_links and fault.who.endswith("0"))
        assert not (KINDS[fault.kind].restarts and fault.at_s > 900 and fault.who.endswith("0"))


# Shrinking.


async def test_the_fewest_of_what_is_needed_are_kept() -> None:
    tried = []

    async def still(items: Sequence[int]) -> bool:
        tried.append(items)
        return {3, 17} <= set(items)

    assert await fewest(range(40), still) == [3, 17]
    assert len(tried) < 60


@pytest.mark.parametrize("num_replays", [0, 200])
async def test_a_failing_script_is_cut_to_what_fails(num_replays: int) -> None:
    script = replace(draw_script(3, 400, per_second=1), faults=(Fault(350, "kill", "decode0", 1), *_pauses(20)))
    num_played = 0

    async def fails(part: Script) -> bool:
        nonlocal num_played
        num_played += 1
        return any(fault.kind == "kill" for fault in part.faults)

    short = await shrink(script, 360.0, fails, num_replays=num_replays)
    assert num_played <= num_replays
    if not num_replays:
        assert short == script
    else:
        assert [fault.kind for fault in short.faults] == ["kill"]
        assert not short.asks
        assert short.seconds < 30


def _pauses(number: int) -> Iterator[Fault]:
    return (Fault(10.0 * index, "pause", "decode0", 1) for index in range(number))


# Clients.

GOLDEN = Golden((5, 6), (10, 11, 12, 13), num_sure=3)
STARTED = pb.GenerateResponse(started=pb.Started(trace_id="ab"))


def _delta(*tokens: tuple[int, int]) -> pb.GenerateResponse:
    generated = [GeneratedToken(position=position, token_id=token) for position, token in tokens]
    return pb.GenerateResponse(delta=pb.Delta(tokens=generated))


def _finished(num_tokens: int) -> pb.GenerateResponse:
    usage = Usage(completion_tokens=num_tokens)
    return pb.GenerateResponse(finished=pb.Finished(reason=FINISH_REASON_LENGTH, usage=usage))


class _Call:
    """A stream of these events that then ends with a status."""

    def __init__(self, events: Sequence[pb.GenerateResponse], status: grpc.StatusCode) -> None:
        self._events = iter(events)
        self._status = status

    async def read(self) -> object:
        return next(self._events, grpc.aio.EOF)

    async def code(self) -> grpc.StatusCode:
        return self._status

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata()

    trailing_metadata = initial_metadata

    async def details(self) -> str:
        return "why"

    def cancel(self) -> None:
        pass


async def _complaints(
    events: Sequence[pb.GenerateResponse],
    status: str,
    ask: Ask | None = None,
    *,
    troubled: Sequence[str] = ("router0",),
) -> tuple[str, list[str]]:
    stub = SimpleNamespace(Generate=lambda request, timeout: _Call(events, grpc.StatusCode[status]))
    complaints: list[str] = []
    trouble = Trouble()
    for who in troubled:
        trouble.begin(who)
    clients = Clients([stub], [GOLDEN], trouble, complaints.append)  # type: ignore[list-item]
    ended = await clients.ask(ask or Ask(0, 0, 3))
    return ended.outcome, complaints


WHOLE = (STARTED, _delta((0, 10), (1, 11)), _delta((2, 12)), _finished(3))
LATE = Ask(0, 0, 3, timeout_s=0.1)


@pytest.mark.parametrize(
    ("events", "status", "ask"),
    [
        (WHOLE, "OK", Ask(0, 0, 3)),
        (WHOLE[:2], "UNAVAILABLE", Ask(0, 0, 3)),
        (WHOLE[:2], "DEADLINE_EXCEEDED", LATE),
        (WHOLE, "OK", Ask(0, 0, 3, manner="cancel", num_events=2)),
        ((STARTED, _delta((0, 99)), _finished(1)), "OK", Ask(0, 0, 1, seed=4)),
        ((STARTED, _delta((0, 10), (1, 11), (2, 12), (3, 99)), _finished(4)), "OK", Ask(0, 0, 4)),  # not a sure one
    ],
)
async def test_a_good_end_is_not_complained_of(events: Sequence[pb.GenerateResponse], status: str, ask: Ask) -> None:
    outcome, complaints = await _complaints(events, status, ask)
    assert complaints == []
    assert outcome == ("cancelled" if ask.manner == "cancel" else status)


@pytest.mark.parametrize(
    ("events", "status", "clue"),
    [
        (WHOLE[:3], "OK", "without a terminal event"),
        ((*WHOLE, _finished(3)), "OK", "after the terminal one"),
        ((STARTED, _delta((0, 10)), _delta((2, 12))), "OK", "positions [0, 2]"),
        ((STARTED, _delta((0, 10)), _delta((0, 10))), "OK", "positions [0, 0]"),
        ((STARTED, _delta((0, 10), (1, 99), (2, 12)), _finished(3)), "OK", "token 99 at position 1, undisturbed 11"),
        ((STARTED, _delta((0, 99))), "UNAVAILABLE", "token 99 at position 0"),
        ((STARTED, _delta((0, 10)), _finished(1)), "OK", "finished with 1 tokens"),
        (WHOLE, "UNAVAILABLE", "after its terminal event"),
        (WHOLE[:2], "INTERNAL", "ended with INTERNAL after 2 tokens"),
        (WHOLE[:2], "DEADLINE_EXCEEDED", f"timeout_s={PATIENCE_S}"),
    ],
)
async def test_what_is_wrong_is_complained_of(events: Sequence[pb.GenerateResponse], status: str, clue: str) -> None:
    _, complaints = await _complaints(events, status)
    assert len(complaints) == 1, complaints
    assert clue in complaints[0]


@pytest.mark.parametrize(
    ("troubled", "is_wrong"),
    [((), True), (("decode1",), True), (("router1",), True), (("router0",), False), (("decode0", "prefill0"), False)],
)
async def test_unavailable_must_have_trouble_to_blame(troubled: Sequence[str], is_wrong: bool) -> None:
    _, complaints = await _complaints(WHOLE[:2], "UNAVAILABLE", troubled=troubled)
    assert len(complaints) == is_wrong
    for complaint in complaints:
        assert complaint.endswith(f"ended with UNAVAILABLE after 2 tokens, with {list(troubled)} in trouble: why")


REGEX = Ask(0, 0, 30, wants="grammar")
SEVERAL = Ask(0, 0, 3, wants="several")


def _answer(*texts: str, tokens: Sequence[int] = (10, 11, 12), reason: str = "length", num_prompt: int = 0) -> Answer:
    """The same tokens each; of a single one the request has the reason."""
    choices = {index: Choice(text, list(tokens), reason) for index, text in enumerate(texts)}
    finished = pb.Finished(reason=FinishReason.Value(f"FINISH_REASON_{reason.upper()}"))
    return Answer(finished=finished, choices=choices, prompt_logprobs=[Logprobs()] * num_prompt or None)


@pytest.mark.parametrize(
    ("ask", "answer", "clue"),
    [
        (SEVERAL, _answer("", "", ""), ""),
        (SEVERAL, _answer("", ""), "2 answers"),
        (SEVERAL, _answer("", "", "", tokens=(10, 99, 12)), "token 99 at position 1"),
        (SEVERAL, _answer("", "", "", tokens=(10,)), "finished with 1 tokens"),
        (Ask(0, 0, 3, wants="beam"), _answer("", "", tokens=(7, 8, 9)), ""),
        (REGEX, _answer("abcdef", reason="stop"), ""),
        (REGEX, _answer("abc", reason="stop"), "finished with 'abc', stop"),
        (REGEX, _answer("abc"), ""),
        (REGEX, _answer("xyz"), "finished with 'xyz', length"),
        (Ask(0, 0, 3, wants="prompt"), _answer("", num_prompt=1), ""),
        (Ask(0, 0, 3, wants="prompt"), _answer(""), "log-probabilities are 0, of 2 tokens"),
    ],
)
def test_each_kind_of_answer_is_what_was_asked_for(ask: Ask, answer: Answer, clue: str) -> None:
    found = list(problems(ask, GOLDEN, answer, is_whole=True))
    assert bool(found) == bool(clue)
    assert all(clue in problem for problem in found)


# Traces.


def _trace() -> list[Span]:
    """As a request that was handed over leaves it, all below its first span."""
    names = [("pageferry.request", "SERVER"), *(span for span in SPLIT_SPANS if span[0] != "pageferry.request")]
    return [
        Span(name, kind, "x", bytes([n + 1]), bytes([1] if n else []), 0, 1, "0", {"pageferry.route.source": "pushed"})
        for n, (name, kind) in enumerate(names)
    ]


def test_a_whole_trace_is_right() -> None:
    assert judge(_trace(), "OK") == []


@pytest.mark.parametrize("number", range(1, len(SPLIT_SPANS)))
def test_a_span_that_is_missing_is_found(number: int) -> None:
    spans = _trace()
    del spans[number]
    assert judge(spans, "OK")
    assert judge(spans, "UNAVAILABLE") == []


def test_an_orphan_is_found_however_the_request_ended() -> None:
    spans = _trace()
    spans[3] = replace(spans[3], parent_id=b"nobody")
    assert judge(spans, "UNAVAILABLE") == [f"orphan {spans[3].name}"]


def test_trouble_lasts_until_things_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    trouble = Trouble()
    now = 100.0
    monkeypatch.setattr("chaos.trouble.time.monotonic", lambda: now)
    spell = trouble.begin("decode0")
    assert trouble.between(150, 151) == {"decode0"}
    now = 110.0
    trouble.end(spell)
    assert trouble.between(105, 120) == {"decode0"}
    assert trouble.between(110 + SETTLE_S - 1, 120) == {"decode0"}
    assert not trouble.between(111 + SETTLE_S, 120)
    assert not trouble.between(90, 99)


# Processes.


def _life(per_s: float, seconds: float, shared: int = 0) -> Life:
    life = Life("decode-0", 1, 1000.0)
    life.samples = [
        Sample(1000.0 + at, round(2e8 + per_s * at) + shared * (at % 2), shared * (at % 2), 20, 8)
        for at in range(0, int(seconds), 5)
    ]
    return life


def test_a_process_that_grows_is_found_once_it_was_watched() -> None:
    assert _life(0, 600).problem(since=0) == ""
    assert _life(2e3, 600).problem(since=0) == ""
    assert "grew by 27.0 MB" in _life(5e4, 605).problem(since=0)
    assert _life(0, 600, shared=16 << 20).problem(since=0) == ""
    assert _life(5e4, 150).growth(since=0) is None
    assert _life(5e4, 600).growth(since=1500) is None
