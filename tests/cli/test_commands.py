"""Commands against a router in this process; each runs in a thread, as `main` has an event loop of its own."""

import argparse
import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path

import fake_frontend as fake
import fake_inference
import pytest
from fake_trace import TRACE_ID, example

from pageferry.cli import chat, status
from pageferry.cli.__main__ import _message, build_parser, main
from pageferry.cli.arguments import API_KEY_VARIABLE
from pageferry.cli.trace import show
from pageferry.client import SyncClient
from pageferry.core.config import Config
from pageferry.core.errors import NotFoundError, UnauthenticatedError, UnavailableError
from pageferry.core.formats import PageFormat
from pageferry.core.groups import CacheGroup
from pageferry.core.layout import CacheLayout
from pageferry.core.read_config import load_config
from pageferry.core.tenants import key_digest, parse_tenants, tenant_of
from pageferry.runtime.convert import layout_to_proto
from pageferry.v1 import inference_pb2 as pb

DOWN = "127.0.0.1:1"


async def run(*argv: str) -> int:
    return await asyncio.to_thread(main, argv)


async def test_generate_prints_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_inference.serving() as (address, service):
        options = ("--max-tokens", "8", "--temperature", "0", "--seed", "7", "--stop", "a", "--stop", "b")
        assert await run("generate", "Say hello", "--system", "Be brief", "--address", address, *options) == 0
    assert capsys.readouterr().out == "Hello\n"
    (request,) = service.frontend.requests
    chat_messages = [(message.role, message.content) for message in request.chat.messages]
    assert chat_messages == [("system", "Be brief"), ("user", "Say hello")]
    assert request.stop.max_tokens == 8 and list(request.stop_strings) == ["a", "b"]
    assert request.sampling.HasField("temperature") and request.sampling.temperature == 0
    assert request.sampling.seed == 7 and not request.sampling.HasField("top_p")


async def test_generate_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_inference.serving() as (address, service):
        assert await run("generate", "Once", "--raw", "--json", "--trace", "--address", address) == 0
    assert service.frontend.requests[0].prompt == "Once"
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "text": "Hello",
        "token_ids": [10, 11],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 4},
        "trace_id": fake.TRACE_ID,
        "timings_ms": {"queue": 1, "prefill": 20, "transfer_tail": 3, "ttft": 25, "total": 60},
        "pages": {"format": "int8", "shipped": 3, "cached": 1, "bytes": 4096},
    }
    assert "kv.push" in err and "3 pages shipped, 1 cached; 4.1 kB as int8; 75% of the transfer hidden" in err


def several() -> tuple[fake.Step, ...]:
    deltas = [fake.delta(text, fake.token(0, 10, -0.5, [(10, -0.5)])) for text in ("Ahoy", "Hello")]
    ends = [pb.ChoiceFinished(choice=choice, reason=1, score=-0.5 - choice) for choice in range(2)]
    for choice, delta in enumerate(deltas):
        delta.delta.choice = choice
    return (fake.started(), *deltas, *(pb.GenerateResponse(choice_finished=end) for end in ends), fake.finished())


async def test_no_number_of_answers_is_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_inference.serving() as (address, _):
        assert await run("generate", "a", "--address", address) == 0
        plain = capsys.readouterr().out
        assert await run("generate", "a", "--n", "0", "--address", address) == 0
    assert capsys.readouterr().out == plain


async def test_several_answers_are_printed_one_after_the_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    options = ("--n", "2", "--best-of", "3", "--priority", "-2", "--profile", "quality", "--bad-word", "no")
    async with fake_inference.serving(*several()) as (address, service):
        assert await run("generate", "a", *options, "--json-schema", str(schema), "--address", address) == 0
        assert capsys.readouterr().out == "[1] stop, score -0.5000\nAhoy\n\n[2] stop, score -1.5000\nHello\n"
        options = ("--n", "2", "--beams", "4", "--json", "--logprobs", "1", "--raw", "--echo", "--choice", "x")
        assert await run("generate", "a", *options, "--address", address) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [answer["text"] for answer in printed["choices"]] == ["Ahoy", "Hello"]
    assert (printed["text"], printed["score"]) == ("Ahoy", -0.5)
    assert printed["logprobs"] == [{"logprob": -0.5, "top": [[10, -0.5]]}]
    best, beams = service.frontend.requests
    assert (best.n, best.best_of, best.priority, best.profile, list(best.bad_words)) == (2, 3, -2, "quality", ["no"])
    assert best.sampling.grammar.json_schema == '{"type": "object"}'
    assert (beams.beam.width, beams.sampling.logprobs, beams.echo) == (4, 1, True)
    assert list(beams.sampling.grammar.choices.texts) == ["x"]


def test_a_schema_that_cannot_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["generate", "a", "--json-schema", str(tmp_path / "none"), "--address", DOWN]) == 1
    assert "--json-schema is " in (said := capsys.readouterr().err) and "No such file" in said


async def test_a_prompt_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a file"))
    async with fake_inference.serving() as (address, service):
        assert await run("generate", "-", "--raw", "--address", address) == 0
    assert service.frontend.requests[0].prompt == "from a file"


def test_an_expired_certificate_is_not_taken_for_one_of_another_authority() -> None:
    said = "failed to connect to all addresses; last error: CERTIFICATE_VERIFY_FAILED: certificate has expired: OK"
    arguments = build_parser().parse_args(["status", "--address", DOWN])
    message = _message(UnavailableError(said), arguments)
    assert message == f"no router answers at {DOWN}: its certificate is past its last day, or a clock is wrong"


async def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    error = UnavailableError("the decode worker is gone", reason="WORKER_GONE")
    async with fake_inference.serving(*fake.HELLO[:2], error) as (address, _):
        assert await run("generate", "a", "--address", address) == 1
    assert capsys.readouterr() == ("Hel\n", "error: the decode worker is gone\n")


@pytest.mark.parametrize("command", [("generate", "a"), ("status",), ("trace",), ("chat",)])
@pytest.mark.parametrize("address", [DOWN, "no-such-host.invalid:1"])
def test_nobody_listens(command: tuple[str, ...], address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--address", address]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: no router answers at {address}; start one with `pageferry up`")


async def test_a_router_that_quotes_an_unreached_worker_does_answer(capsys: pytest.CaptureFixture[str]) -> None:
    message = "no decode worker is ready: 127.0.0.1:7000 is down (failed to connect to all addresses)"
    async with fake_inference.serving(UnavailableError(message, reason="NO_WORKER")) as (address, _):
        assert await run("generate", "a", "--address", address) == 1
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_value_its_field_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "a", "--top-k", "-1", "--address", DOWN]) == 1
    assert capsys.readouterr().err == "error: top_k is -1, must be a whole number from 0 to 2**32 - 1\n"


def test_an_empty_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "", "--address", DOWN]) == 1
    assert capsys.readouterr().err == "error: TEXT is '', must not be empty\n"


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("fly",),
        ("generate",),
        ("generate", "a", "--max-tokens", "many"),
        ("generate", "a", "--max", "5"),
        ("generate", "a", "--raw", "--chat"),
        ("generate", "a", "--raw", "--system", "b"),
        ("generate", "a", "--echo"),
        ("generate", "a", "--logprobs", "2"),
        ("generate", "a", "--best-of", "2", "--beams", "2"),
        ("generate", "a", "--regex", "x", "--choice", "x"),
        ("up", "--port", "x"),
        ("up", "--prot", "1"),
    ],
)
def test_wrong_usage_exits_with_2(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    command = f"pageferry {argv[0]}" if argv and argv[0] != "fly" else "pageferry"
    assert capsys.readouterr().err.startswith(f"usage: {command} [-h]")


def test_every_command_has_help() -> None:
    (commands,) = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    names = {"up", "generate", "chat", "status", "trace", "drain", "bench", "models", "key", "demo"}
    assert set(commands.choices) == names
    assert all("--help" in parser.format_help() for parser in commands.choices.values())


async def test_trace(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_inference.serving() as (address, _):
        assert await run("trace", "--address", address) == 0
        shown = capsys.readouterr().out
        assert await run("trace", "r-1", "--json", "--address", address) == 0
    assert shown.startswith(f"trace {TRACE_ID.hex()}: 11 spans, 120 ms\npageferry.request ")
    document = json.loads(capsys.readouterr().out)
    assert document["trace_id"] == TRACE_ID.hex() and len(document["spans"]) == 11
    assert "not all spans" not in shown


def test_a_trace_that_lacks_spans_says_so() -> None:
    data, out = example(), io.StringIO()
    del data.resource_spans[1:]
    show(data, out)
    assert out.getvalue().splitlines()[-1].startswith("not all spans have come")


async def test_a_trace_that_is_not_there_is_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pageferry.cli.trace.LATE_SPANS_S", 0.0)
    async with fake_inference.serving() as (address, _):
        assert await run("trace", "unknown", "--address", address) == 1
    assert capsys.readouterr().err == "error: trace unknown is not kept\n"


async def test_a_trace_that_went_to_a_collector_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pageferry.cli.trace.LATE_SPANS_S", 3600.0)
    async with fake_inference.serving() as (address, service):
        service.trace_error = NotFoundError("traces go to a collector", reason="NO_TRACE_STORE")
        async with asyncio.timeout(60):
            assert await run("trace", "--address", address) == 1
    assert capsys.readouterr().err == "error: traces go to a collector\n"


async def test_who_asks_for_a_trace_that_went_to_a_collector_is_told_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_inference.serving() as (address, service):
        service.trace_error = NotFoundError("traces go to a collector", reason="NO_TRACE_STORE")
        assert await run("generate", "--trace", "--address", address, "Hello") == 1
        assert capsys.readouterr().err == (
            "error: traces go to a collector; look there for 0af7651916cd43dd8448eb211c80319c\n"
        )


async def test_status(capsys: pytest.CaptureFixture[str]) -> None:
    async with fake_inference.serving() as (address, _):
        assert await run("status", "--address", address) == 0
        head, _, headings, row, _, _, name, pages, _, reason = capsys.readouterr().out.splitlines()
        assert await run("status", "--json", "--address", address) == 0
    assert head == "router: 0 running, 3 queued"
    assert headings.split()[:3] == ["WORKER", "ADDRESS", "STATE"]
    assert row.split() == ["decode", "127.0.0.1:7000", "down", "0", "0", "0", "512"]
    assert (name, pages.split()) == ("decode 127.0.0.1:7000", ["all", "64", "60", "0", "0", "0"])
    assert reason == "decode 127.0.0.1:7000: it does not answer"
    document = json.loads(capsys.readouterr().out)
    assert document["queued"] == 3 and document["workers"][0]["load"]["pages_free"] == 60


def test_status_shows_each_pool_in_80_columns() -> None:
    groups = (CacheGroup(tuple(range(15)), window=256, sinks=4), CacheGroup(tuple(range(15, 30))))
    layout = CacheLayout("f" * 32, PageFormat.parse("k=int8:channel,v=int4"), 16, 3, 64, groups)
    load = pb.WorkerLoad(pages_total=6460, pages_free=5434, prefill_tokens=37)
    load.pools.add(group=0, pages_total=1360, pages_free=841, pages_cached=511, pages_resident=8, pages_promised=18)
    load.pools.add(group=1, pages_total=5036, pages_free=4525, pages_cached=510, pages_reserved=1)
    load.pools.add(pages_total=64, pages_free=63, pages_resident=1)
    worker = pb.WorkerStatus(role="prefill", address="127.0.0.1:44143", state="ready", load=load)
    worker.layout.CopyFrom(layout_to_proto(layout))
    other = pb.WorkerStatus(role="decode", address="127.0.0.1:9", state="ready", load=pb.WorkerLoad(pages_total=7))
    lines = status.table(pb.GetStatusResponse(workers=[worker, other], running=1, draining=True))
    assert lines == [
        "router: 1 running, 0 queued, draining",
        "",
        "WORKER   ADDRESS          STATE  RUNNING  WAITING  TICKETS  TOKENS",
        "prefill  127.0.0.1:44143  ready        0        0        0      37",
        "decode   127.0.0.1:9      ready        0        0        0       0",
        "",
        "PAGES    TOTAL  FREE  CACHED  RESERVED  RESIDENT  LAYERS",
        "prefill 127.0.0.1:44143: k=int8:channel,v=int4, 16 tokens a page",
        "  0       1360   841     511         0         8  0-14=window:256,sinks:4 (18 promised)",
        "  1       5036  4525     510         1         0  15-29=full",
        "  tails     64    63       0         0         1",
        "decode 127.0.0.1:9",
        "  all        7     0       0         0         0",
    ]


def test_status_shows_profiles_and_what_is_in_effect_for_them() -> None:
    profiles = [
        pb.ProfileStatus(name="interactive", in_effect="interactive", running=2),
        pb.ProfileStatus(name="throughput", in_effect="night shift", queued=17, running=32),
    ]
    assert status.table(pb.GetStatusResponse(profiles=profiles))[-4:] == [
        "",
        "PROFILE      IN EFFECT    QUEUED  RUNNING",
        "interactive  interactive       0        2",
        "throughput   night shift      17       32",
    ]


def typing(*lines: str) -> Iterator[str]:
    yield from lines
    raise EOFError


async def test_chat_keeps_the_conversation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    typed = typing("one", "  ", "two", "/new", "three")
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    async with fake_inference.serving() as (address, service):
        assert await run("chat", "--system", "Be brief", "--address", address) == 0
    asked = [[message.content for message in request.chat.messages] for request in service.frontend.requests]
    assert asked == [["Be brief", "one"], ["Be brief", "one", "Hello", "two"], ["Be brief", "three"]]
    assert capsys.readouterr().out.startswith("tiny. ")


async def test_ctrl_c_at_the_prompt_keeps_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["one", KeyboardInterrupt(), "two", EOFError()])

    def read(prompt: str) -> str:
        if isinstance(line := next(typed), BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)
    async with fake_inference.serving() as (address, service):
        assert await run("chat", "--address", address) == 0
    assert [len(request.chat.messages) for request in service.frontend.requests] == [1, 3]


async def test_chat_goes_on_after_an_error(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    typed = typing("one", "two")
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    async with fake_inference.serving(fake.started(), UnavailableError("no worker", reason="NO_WORKER")) as (
        address,
        service,
    ):
        assert await run("chat", "--address", address) == 0
    assert [len(request.chat.messages) for request in service.frontend.requests] == [1, 1]
    assert capsys.readouterr().err == "error: no worker\n" * 2


async def test_an_error_has_a_line_of_its_own_in_a_chat(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = typing("one")
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    error = UnavailableError("the decode worker is gone", reason="WORKER_GONE")
    async with fake_inference.serving(*fake.HELLO[:2], error) as (address, _):
        assert await run("chat", "--address", address) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[1:] == ["Hel", ""] and err == "error: the decode worker is gone\n"


async def test_ctrl_c_ends_an_answer_and_keeps_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = typing("one", "two")
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    num_printed = 0

    def interrupting(*texts: str, **options: object) -> None:
        nonlocal num_printed
        num_printed += texts == ("lo",)
        if texts == ("lo",) and num_printed == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(chat, "print", interrupting, raising=False)

    def talk(address: str) -> int:
        with SyncClient(address) as client:
            return chat.converse(client, [], {})

    async with fake_inference.serving(*fake.HELLO[:3], fake.finished()) as (address, service):
        assert await asyncio.to_thread(talk, address) == 0
    asked = [[message.content for message in request.chat.messages] for request in service.frontend.requests]
    assert asked == [["one"], ["one", "Hello", "two"]]


def test_a_key_and_its_digest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key"]) == main(["key"]) == 0
    key, line, another, _ = capsys.readouterr().out.splitlines()
    assert key != another and len(key) > 40
    (tenant,) = parse_tenants(f'[[tenant]]\nname = "acme"\n{line}\n', "file")
    assert tenant_of(key_digest(key), [tenant]) is tenant


@pytest.mark.parametrize("command", [("generate", "a"), ("status", "--once"), ("trace",)])
@pytest.mark.parametrize("given", [False, True])
async def test_the_api_key_is_the_option_s_or_the_environment_s(
    command: tuple[str, ...], given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "from-environment")
    async with fake_inference.serving() as (address, service):
        options = ("--api-key", "from-option") if given else ()
        assert await run(*command, "--address", address, *options) == 0
    assert service.metadata["authorization"] == ("Bearer from-option" if given else "Bearer from-environment")


def test_the_api_key_s_variable_is_no_setting() -> None:
    assert load_config(None, {API_KEY_VARIABLE: "secret"}, {}) == Config()


async def test_who_is_not_known_is_told_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    error = UnauthenticatedError("an API key is needed", reason="NO_API_KEY")
    async with fake_inference.serving(error) as (address, _):
        assert await run("generate", "a", "--address", address) == 1
    assert capsys.readouterr().err == f"error: an API key is needed; give --api-key, or set {API_KEY_VARIABLE}\n"
