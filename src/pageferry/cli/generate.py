"""`pageferry generate`: one answer, streamed, or as one object with its figures."""

import argparse
import asyncio
import json
import sys
from dataclasses import asdict
from typing import cast

from pageferry.cli import trace
from pageferry.cli.arguments import add_address, add_sampling, connection_of, given_of, sampling_options
from pageferry.cli.waterfall import bytes_text
from pageferry.client import Choice, Client, Options, Prompt, Result
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
    _add_answers(parser)
    add_sampling(parser)
    add_address(parser)
    parser.set_defaults(run=run, usage_error=parser.error)


def _add_answers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("answers")
    group.add_argument("--n", type=int, metavar="N", help="how many; default 1")
    several = group.add_mutually_exclusive_group()
    several.add_argument("--best-of", type=int, metavar="N", help="generate so many, and print the likeliest")
    several.add_argument("--beams", type=int, metavar="N", help="search with so many beams, and print the best")
    group.add_argument("--logprobs", type=int, metavar="K", help="of each token and its K likeliest; with --json")
    group.add_argument("--echo", action="store_true", default=None, help="begin with the text asked; with --raw")


def run(arguments: argparse.Namespace) -> int:
    if arguments.raw and arguments.system:
        arguments.usage_error("--system needs the chat template, which --raw leaves out")
    if arguments.echo and not arguments.raw:
        arguments.usage_error("--echo needs --raw")
    if arguments.logprobs is not None and not arguments.json:
        arguments.usage_error("--logprobs needs --json")
    return asyncio.run(_generate(arguments))


async def stream_answer(client: Client, prompt: Prompt, options: Options, *, quiet: bool = False) -> Result:
    """Generate, and print the text unless `quiet`: as it comes, or of several answers each one whole."""
    is_one = options.get("n", 1) in (0, 1)  # 0 is the default
    async with client.generate(prompt, **options) as generation:
        if not quiet and is_one:
            try:
                async for delta in generation:
                    print(delta.text, end="", flush=True)
            finally:
                if generation.text:
                    print()
        result = await generation.result()
    if not quiet and not is_one:
        print(answers_text(result))
    return result


def answers_text(result: Result) -> str:
    """Several answers, a blank line between them, each under its number and its score where it has one."""
    parts = []
    for number, choice in enumerate(result.choices, 1):
        score = "" if choice.score is None else f", score {choice.score:.4f}"
        parts.append(f"[{number}] {choice.finish_reason}{score}\n{choice.text}")
    return "\n\n".join(parts)


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
    several = {"choices": [_answer_json(choice) for choice in result.choices]} if len(result.choices) > 1 else {}
    return {
        **_answer_json(result.choices[0]),
        **several,
        "usage": asdict(result.usage),
        "trace_id": result.trace_id,
        "timings_ms": {name: round(result.timings_ms[name], 3) for name in _TIMINGS},
        "pages": pages,
    }


def _answer_json(choice: Choice) -> dict[str, object]:
    answer: dict[str, object] = {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
    }
    if choice.score is not None:
        answer["score"] = choice.score
    if any(token.logprob is not None for token in choice.tokens):
        answer["logprobs"] = [{"logprob": token.logprob, "top": token.top} for token in choice.tokens]
    return answer


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
    options = sampling_options(arguments)
    options |= cast(Options, given_of(arguments, "n", "best_of", "echo", "logprobs", beam_width="beams"))
    async with Client(arguments.address, **connection_of(arguments)) as client:
        result = await stream_answer(client, prompt, options, quiet=arguments.json)
        if arguments.json:
            print(json.dumps(as_json(result), ensure_ascii=False), flush=True)
        if arguments.trace:
            out = sys.stderr if arguments.json else sys.stdout
            trace.show(await trace.whole_trace(client, result.trace_id), out)
            print(handoff_text(result), file=out)
    return 0
