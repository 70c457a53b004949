"""`pageferry bench`: put load on a server and measure it from outside; the work is in `loadgen`."""

import argparse
import importlib.util
import json
import secrets
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageferry.cli.arguments import DEFAULT_ADDRESS, default_api_key, files_of
from pageferry.cli.bench_options import add_options, load_of
from pageferry.client.connection import certificates
from pageferry.core.errors import FailedPreconditionError, InvalidArgumentError, invalid

if TYPE_CHECKING:  # loaded only for this command
    from pageferry.loadgen.load import Load
    from pageferry.loadgen.prompts import PromptMaker
    from pageferry.loadgen.result import BenchResult
    from pageferry.loadgen.target import Target

_NEEDED = ("aiohttp", "matplotlib", "psutil")
_INTERRUPTED = 130


def add_command(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.set_defaults(run=run)
    commands = parser.add_subparsers(metavar="[compare]")
    compare = commands.add_parser("compare", help="set two results side by side", allow_abbrev=False)
    compare.add_argument("first", type=Path, metavar="A.json", help="written by --json")
    compare.add_argument("second", type=Path, metavar="B.json")
    compare.add_argument("--across-loads", action="store_true", help="even where their loads differ")
    compare.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots of both")
    compare.set_defaults(run=run_compare, command=compare)


def run(arguments: argparse.Namespace) -> int:
    """1 where a request failed, or none was completed."""
    _check_installed()
    import uvloop

    load = load_of(arguments, secrets.randbelow(2**31))  # a server may have the prompts of an old seed in its cache
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


async def _bench(arguments: argparse.Namespace, load: "Load") -> int:
    from pageferry.loadgen import text
    from pageferry.loadgen.measure import Measurement
    from pageferry.loadgen.observe import Processes
    from pageferry.loadgen.progress import Bar
    from pageferry.loadgen.questions import Questions

    processes = Processes(arguments.pid)
    questions = Questions(load, _prompts(arguments, load))
    target = _target(arguments, load)
    try:
        with Bar(quiet=arguments.quiet) as bar:
            command = _command(arguments.api_key)
            measurement = Measurement(target, load, questions, bar, processes, arguments.label, command)
            result = await measurement.run()
    finally:
        await target.close()
    print(*text.lines(result), sep="\n")
    _write(result, arguments)
    if measurement.interrupted:
        return _INTERRUPTED
    return 1 if result.summary.failed or not result.summary.completed else 0


def _prompts(arguments: argparse.Namespace, load: "Load") -> "PromptMaker":
    from pageferry.loadgen.prompts import PromptMaker, tokenizer_of

    return PromptMaker(
        tokenizer_of(arguments.tokenizer),
        seed=load.seed,
        chat=arguments.endpoint == "chat",
        prefix_tokens=load.prefix_tokens,
        num_prefixes=load.prefixes or 1,
    )


def _target(arguments: argparse.Namespace, load: "Load") -> "Target":
    """Needs a running loop."""
    common: dict[str, Any] = {
        "chat": arguments.endpoint == "chat",
        "model": arguments.model,
        # That of the environment is for Pageferry, whatever else is measured.
        "api_key": arguments.api_key or (default_api_key() if arguments.url is None else ""),
        "temperature": load.temperature,
        "certificates": certificates(**files_of(arguments)),
    }
    if arguments.url is None:
        from pageferry.loadgen.grpc_target import GrpcTarget

        if arguments.extra_body is not None:
            raise InvalidArgumentError("--extra-body needs --url")
        if arguments.new_connections:
            raise InvalidArgumentError("--new-connections needs --url")
        return GrpcTarget(arguments.target or DEFAULT_ADDRESS, **common)
    from pageferry.loadgen.openai_target import OpenAiTarget

    if not arguments.url.startswith(("http://", "https://")):
        raise invalid("--url", arguments.url, "must begin with http:// or https://")
    return OpenAiTarget(
        arguments.url,
        extra_body=_extra_body(arguments.extra_body),
        keep_connections=not arguments.new_connections,
        **common,
    )


def _extra_body(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise invalid("--extra-body", text, "must be a JSON object")
    return value


def _command(api_key: str) -> str:
    """As it was given, to be put into files; without the key."""
    command = shlex.join(["pageferry", *sys.argv[1:]])
    return command.replace(api_key, "…") if api_key else command


def _write(result: "BenchResult", arguments: argparse.Namespace) -> None:
    if arguments.json is not None:
        arguments.json.write_text(result.to_json(), encoding="utf-8")
    if arguments.html is not None:
        from pageferry.loadgen.page import render

        arguments.html.write_text(render(result), encoding="utf-8")
