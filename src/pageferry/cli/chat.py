"""`pageferry chat`: a conversation in the terminal."""

import argparse
import contextlib
import sys

from pageferry.cli.arguments import add_address, add_sampling, connection_of, sampling_options
from pageferry.client import Message, Options, PageferryError, SyncClient

_HELP = "Ctrl-C stops an answer, Ctrl-D leaves; /new starts over"


def add_command(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system message to begin with")
    add_sampling(parser)
    add_address(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    opening: list[Message] = [{"role": "system", "content": arguments.system}] if arguments.system else []
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() history and editing)
    with SyncClient(arguments.address, **connection_of(arguments)) as client:
        (model, *_) = client.models()
        print(f"{model.name}. {_HELP}.")
        return converse(client, opening, sampling_options(arguments))


def converse(client: SyncClient, opening: list[Message], options: Options) -> int:
    """Ask and answer until the input ends. What was answered before a Ctrl-C stays in the conversation."""
    history = list(opening)
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:  # what was typed is dropped; it may have been meant for an answer that just ended
            print(f"\n{_HELP}.")
            continue
        if text.strip() == "/new":
            history = list(opening)
        elif text.strip():
            question = {"role": "user", "content": text}
            answer = _answer(client, [*history, question], options)
            if answer is not None:
                history += [question, {"role": "assistant", "content": answer}]


def _answer(client: SyncClient, history: list[Message], options: Options) -> str | None:
    """Stream one answer; None where it failed, and the question is as if it had not been asked."""
    try:
        generation = client.generate(history, **options)
        try:
            for delta in generation:
                print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            generation.cancel()
        except PageferryError:
            if generation.text:
                print()
            raise
    except PageferryError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return None
    print()
    return generation.text
