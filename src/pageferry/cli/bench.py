"""`pageferry bench`: put load on a server and measure it from outside; the work is in `loadgen`."""

import argparse
import importlib.util
import json
import secrets
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageferry.cli.arguments import DEFAULT_ADDRESS
from pageferry.core.errors import FailedPreconditionError, InvalidArgumentError, invalid

if TYPE_CHECKING:  # loaded only for this command
    from pageferry.loadgen.load import Load
    from pageferry.loadgen.prompts import PromptMaker
    from pageferry.loadgen.result import BenchResult
    from pageferry.loadgen.target import Target

_NEEDED = ("aiohttp", "matplotlib", "psutil")
_INTERRUPTED = 130
_LENGTHS = "N, LOW..HIGH, normal:MEAN,DEVIATION, lognormal:MEDIAN,SIGMA, or N*WEIGHT,N*WEIGHT"


def add_command(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    _add_load(parser)
    _add_limits(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--pid",
        type=int,
        action="append",
        default=[],
        metavar="PID",
        help="of the server, whose CPU is to be counted, with the processes that it has started; may be repeated",
    )
    output.add_argument("--label", default="", metavar="TEXT", help="names the run in files and comparisons")
    output.add_argument("--json", type=Path, metavar="FILE", help="write every request and sample")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    output.add_argument("--quiet", action="store_true", help="show no progress")
    parser.set_defaults(run=run)
    commands = parser.add_subparsers(metavar="[compare]")
    compare = commands.add_parser("compare", help="set two results side by side", allow_abbrev=False)
    compare.add_argument("first", type=Path, metavar="A.json", help="written by --json")
    compare.add_argument("second", type=Path, metavar="B.json")
    compare.add_argument("--across-loads", action="store_true", help="even where their loads differ")
    compare.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots of both")
    compare.set_defaults(run=run_compare, command=compare)


def run(arguments: argparse.Namespace) -> int:
    _check_installed()
    import uvloop

    load = _load(arguments)
    for path in (arguments.json, arguments.html):
        _check_writable(path)
    return uvloop.run(_bench(arguments, load))


def run_compare(arguments: argparse.Namespace) -> int:
    _check_installed()
    from rich.console import Console

    from pageferry.loadgen import compare
    from pageferry.loadgen.result import BenchResult

    _check_writable(arguments.html)
    first, second = BenchResult.read(arguments.first), BenchResult.read(arguments.second)
    if not arguments.across_loads:
        compare.check_same_load(first, second)
    Console().print(compare.as_table(first, second))
    if arguments.html is not None:
        from pageferry.loadgen.page import render_comparison

        arguments.html.write_text(render_comparison(first, second), encoding="utf-8")
    return 0


def _add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("target")
    where = group.add_mutually_exclusive_group()
    where.add_argument("--target", metavar="HOST:PORT", help=f"a Pageferry router's gRPC; default {DEFAULT_ADDRESS}")
    where.add_argument("--url", metavar="URL", help="an OpenAI-compatible server, such as http://127.0.0.1:8080/v1")
    group.add_argument("--endpoint", choices=("completions", "chat"), default="completions", help="default completions")
    group.add_argument("--model", default="", metavar="NAME", help="default: the first that the server names")
    group.add_argument("--api-key", default="", metavar="KEY", help="sent as Authorization: Bearer KEY")
    group.add_argument("--extra-body", metavar="JSON", help="with --url: an object of fields to add to every request")
    group.add_argument(
        "--tokenizer",
        default="smollm2",
        metavar="PATH|smollm2",
        help="of the model that is served: a directory or .gguf file; makes prompts of exact lengths; default smollm2",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--requests", type=int, metavar="N", help="default 64, unless --duration or --replay is given")
    group.add_argument("--duration", metavar="TIME", help="send no more after this, such as 30s or 2m")
    group.add_argument("--warmup", type=int, metavar="N", help="requests before, which do not count; default 1")
    group.add_argument("--concurrency", type=int, metavar="N", help="closed loop: N in flight; the default, with 1")
    group.add_argument("--rate", type=float, metavar="R", help="open loop: R requests a second, whatever is in flight")
    group.add_argument("--arrivals", choices=("poisson", "constant"), help="of the open loop; default poisson")
    group.add_argument("--max-concurrency", type=int, metavar="N", help="of --rate and --replay: the rest is sent late")
    group.add_argument(
        "--replay", type=Path, metavar="FILE.jsonl", help="send what a recorded trace has, when it has it"
    )
    group.add_argument("--speed", type=float, metavar="X", help="of --replay; 2 is twice as fast")
    group.add_argument("--input-tokens", default="128", metavar="D", help=f"default 128; {_LENGTHS}")
    group.add_argument("--output-tokens", default="128", metavar="D", help="default 128; as for --input-tokens")
    group.add_argument("--prefix-tokens", type=int, metavar="N", help="first tokens of prompts that are shared")
    group.add_argument("--prefixes", type=int, metavar="K", help="different prefixes; default 1")
    group.add_argument("--temperature", type=float, metavar="T", help="default 0, greedy")
    group.add_argument("--seed", type=int, metavar="S", help="of prompts, lengths and arrivals; default: a new one")
    group.add_argument("--timeout", metavar="TIME", help="a request fails after this; default 120s")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("goodput")
    group.add_argument("--slo", metavar="LIMITS", help="ttft=500ms,itl=50ms,e2e=10s or some: count requests within")
    group.add_argument("--find-goodput", action="store_true", help="find the highest rate that keeps --slo")
    group.add_argument("--goodput-share", type=float, metavar="SHARE", help="of requests that must; default 0.99")
    group.add_argument("--rate-range", metavar="LOW..HIGH", help="requests a second to search; default 0.5..64")


def _check_installed() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        message = f"pageferry bench needs {', '.join(missing)}: pip install 'pageferry[bench]'"
        raise FailedPreconditionError(message, reason="NOT_INSTALLED")


def _check_writable(path: Path | None) -> None:
    """Before minutes are spent on what can't be kept. Raises InvalidArgumentError."""
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        problem = "it is a directory" if path.is_dir() else f"there is no directory {path.resolve().parent}"
        raise InvalidArgumentError(f"{path} can't be written: {problem}")


def _load(arguments: argparse.Namespace) -> "Load":
    from pageferry.loadgen.lengths import parse_lengths
    from pageferry.loadgen.load import Load, parse_duration, parse_rate_range, parse_slo

    plain = (
        "requests",
        "warmup",
        "concurrency",
        "rate",
        "arrivals",
        "max_concurrency",
        "replay",
        "speed",
        "prefix_tokens",
        "prefixes",
        "temperature",
        "seed",
        "goodput_share",
    )
    given: dict[str, Any] = {"seed": secrets.randbelow(2**31)}  # a server has no prompt of an earlier run in its cache
    given |= {name: getattr(arguments, name) for name in plain if getattr(arguments, name) is not None}
    for name in ("duration", "timeout"):
        if getattr(arguments, name) is not None:
            given[f"{name}_s"] = parse_duration(f"--{name}", getattr(arguments, name))
    if arguments.slo is not None:
        given["slo"] = parse_slo(arguments.slo)
    if arguments.rate_range is not None:
        given["rate_range"] = parse_rate_range(arguments.rate_range)
    return Load(
        input_tokens=parse_lengths("--input-tokens", arguments.input_tokens),
        output_tokens=parse_lengths("--output-tokens", arguments.output_tokens),
        find_goodput=arguments.find_goodput,
        **given,
    )


def _target(arguments: argparse.Namespace, load: "Load") -> "Target":
    """Needs a running loop."""
    chat = arguments.endpoint == "chat"
    if arguments.url is None:
        from pageferry.loadgen.grpc_target import GrpcTarget

        if arguments.extra_body is not None:
            raise InvalidArgumentError("--extra-body needs --url")
        address = arguments.target or DEFAULT_ADDRESS
        return GrpcTarget(
            address, model=arguments.model, api_key=arguments.api_key, temperature=load.temperature, chat=chat
        )
    from pageferry.loadgen.openai_target import OpenAiTarget

    if not arguments.url.startswith(("http://", "https://")):
        raise invalid("--url", arguments.url, "must begin with http:// or https://")
    return OpenAiTarget(
        arguments.url,
        chat=chat,
        model=arguments.model,
        api_key=arguments.api_key,
        temperature=load.temperature,
        extra_body=_extra_body(arguments.extra_body),
    )


def _extra_body(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise invalid("--extra-body", text, "must be a JSON object")
    return value


def _prompts(arguments: argparse.Namespace, load: "Load") -> "PromptMaker":
    from pageferry.loadgen.prompts import PromptMaker, tokenizer_of

    return PromptMaker(
        tokenizer_of(arguments.tokenizer),
        seed=load.seed,
        chat=arguments.endpoint == "chat",
        prefix_tokens=load.prefix_tokens,
        num_prefixes=load.prefixes or 1,
    )


async def _bench(arguments: argparse.Namespace, load: "Load") -> int:
    from pageferry.loadgen import text
    from pageferry.loadgen.measure import Measurement
    from pageferry.loadgen.observe import Processes
    from pageferry.loadgen.progress import Bar
    from pageferry.loadgen.questions import Questions

    processes = Processes(arguments.pid)
    questions = Questions(load, _prompts(arguments, load))
    target: Target = _target(arguments, load)
    try:
        with Bar(quiet=arguments.quiet) as bar:
            command = shlex.join(["pageferry", *sys.argv[1:]])
            measurement = Measurement(target, load, questions, bar, processes, arguments.label, command)
            result = await measurement.run()
    finally:
        await target.close()
    print(*text.lines(result), sep="\n")
    _write(result, arguments)
    if any(note.startswith("interrupted") for note in result.notes):
        return _INTERRUPTED
    return 1 if result.summary.failed or not result.summary.completed else 0


def _write(result: "BenchResult", arguments: argparse.Namespace) -> None:
    if arguments.json is not None:
        arguments.json.write_text(result.to_json(), encoding="utf-8")
    if arguments.html is not None:
        from pageferry.loadgen.page import render

        arguments.html.write_text(render(result), encoding="utf-8")
