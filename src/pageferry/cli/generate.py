"""`pageferry generate`: one answer, streamed, or as one object with its figures."""

import argparse
import asyncio
import json
import sys
from dataclasses import asdict

from pageferry.cli import trace
from pageferry.cli.arguments import add_address, add_sampling, connection_of, sampling_options
from pageferry.cli.waterfall import bytes_text
from pageferry.client import Client, Options, Prompt, Result
from pageferry.core.errors import invalid

_TIMINGS = ("queue", "prefill", "transfer_tail", "ttft", "total")


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="TEXT", help="what to ask; - reads it from standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    form.add_argument("--chat", action="store_true", help="ask in the model's chat template (the default)")
    parser.add_argument("--system", metavar="TEXT", help="system message to put before the question")
    parser.add_argument("--json", action="store_true", help="print one object, at the end")
    parser.add_argument("--trace", action="store_true", help="print the request's waterfall too")
    add_sampling(parser)
    add_address(parser)
    parser.set_defaults(run=run, usage_error=parser.error)


def run(arguments: argparse.Namespace) -> int:
    if arguments.raw and arguments.system:
        arguments.usage_error("--system needs the chat template, which --raw leaves out")
    return asyncio.run(_generate(arguments))


async def stream_answer(client: Client, prompt: Prompt, options: Options, *, quiet: bool = False) -> Result:
    """Generate, and print the text as it comes unless `quiet`."""
    async with client.generate(prompt, **options) as generation:
        if not quiet:
            try:
                async for delta in generation:
                    print(delta.text, end="", flush=True)
            finally:
                if generation.text:
                    print()
        return await generation.result()


def handoff_text(result: Result) -> str:
    """The hand-off's figures in one line."""
    pages = result.pages
    if not pages.shipped:
        return f"hand-off: none; {result.usage.cached_tokens} of {result.usage.prompt_tokens} prompt tokens were cached"
    return (
        f"hand-off: {pages.shipped} pages shipped, {pages.cached} cached; {bytes_text(pages.bytes)} as {pages.format}; "
        f"{pages.hidden:.0%} of the transfer hidden behind compute"
    )


def as_json(result: Result) -> dict[str, object]:
    """The object of `--json`."""
    pages = asdict(result.pages)
    del pages["hidden"]
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "usage": asdict(result.usage),
        "trace_id": result.trace_id,
        "timings_ms": {name: round(result.timings_ms[name], 3) for name in _TIMINGS},
        "pages": pages,
    }


def _prompt(arguments: argparse.Namespace) -> Prompt:
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not text:
        raise invalid("TEXT", text, "must not be empty", reason="EMPTY_PROMPT")
    if arguments.raw:
        return str(text)
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return [*system, {"role": "user", "content": text}]


async def _generate(arguments: argparse.Namespace) -> int:
    prompt = _prompt(arguments)
    async with Client(arguments.address, **connection_of(arguments)) as client:
        result = await stream_answer(client, prompt, sampling_options(arguments), quiet=arguments.json)
        if arguments.json:
            print(json.dumps(as_json(result), ensure_ascii=False), flush=True)
        if arguments.trace:
            out = sys.stderr if arguments.json else sys.stdout
            trace.show(await trace.whole_trace(client, result.trace_id), out)
            print(handoff_text(result), file=out)
    return 0
