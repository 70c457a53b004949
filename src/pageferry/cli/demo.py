"""`pageferry demo`: one question through three processes, with its trace and the hand-off's figures."""

import argparse
import asyncio
import os
import sys

from pageferry.cli import trace
from pageferry.cli.arguments import default_api_key
from pageferry.cli.generate import handoff_text, stream_answer
from pageferry.cli.launch import Launch, plan
from pageferry.cli.up import report_progress, started
from pageferry.client import Client, Options, Result
from pageferry.core.config import Config
from pageferry.core.errors import InternalError
from pageferry.core.read_config import load_config
from pageferry.runtime.span_trees import Node, trees

QUESTION = "What is the capital of France?"
# The question is short: a decode worker would compute it itself, and a usual chunk would hold all of it.
_SETTINGS = {"server.port": 0, "server.http_port": 0, "router.local_prefill_tokens": 0, "scheduler.chunk_tokens": 16}
_GREEDY = Options(temperature=0, max_tokens=64)


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR|FILE.gguf|NAME", help="default smollm2, the packaged one")
    parser.add_argument("--question", default=QUESTION, metavar="TEXT")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings: dict[str, object] = dict(_SETTINGS)
    if arguments.model is not None:
        settings["engine.model"] = arguments.model
    return asyncio.run(_demo(load_config(None, os.environ, settings), arguments.question))


async def _demo(config: Config, question: str) -> int:
    # The trace is to be shown here, whatever collector others are sent to.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    launch = plan(config, 1, 1, environment)
    print("starting a router, a prefill worker and a decode worker", flush=True)
    try:
        async with started(launch, report_progress, environment):
            await _ask(launch, question)
            print("stopping", flush=True)
    except asyncio.CancelledError:  # a signal
        return 130
    return 0


async def _ask(launch: Launch, question: str) -> None:
    print(f"ready; asks:\n\n> {question}", flush=True)
    async with Client(launch.address, api_key=default_api_key(), **launch.client_files) as client:
        result = await stream_answer(client, [{"role": "user", "content": question}], _GREEDY)
        data = await trace.whole_trace(client, result.trace_id)
    print()
    trace.show(data, sys.stdout)
    print(f"\n{handoff_text(result)}\n", flush=True)
    _check(result, [node for root in trees(data) for _, node in root.walk()])


def _check(result: Result, spans: list[Node]) -> None:
    if not result.pages.shipped:
        raise InternalError("the demo's request was not handed over from prefill to decode")
    ends = {span.kind for span in spans if span.name == "kv.push"}
    if ends != {"client", "server"}:
        raise InternalError(f"the trace has kv.push at {len(ends)} of its 2 ends")
