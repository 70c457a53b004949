"""Arguments that commands share."""

import argparse
import os
from pathlib import Path
from typing import cast

from pageferry.client import Options
from pageferry.core.errors import invalid

DEFAULT_ADDRESS = "127.0.0.1:50051"
API_KEY_VARIABLE = "API_KEY_PAGEFERRY"  # PAGEFERRY_… are settings
_FILES = (
    ("--ca", "FILE", "PEM, who signs the router's certificate: encrypt the connection"),
    ("--cert", "FILE", "PEM, the certificate to show, where the router wants one"),
    ("--key", "FILE", "PEM, its key"),
    ("--server-name", "NAME", "in the router's certificate; default: the host of its address"),
)


def add_address(parser: argparse.ArgumentParser) -> None:
    text = f"of the router; several with commas between them, or dns:///NAME:PORT; default {DEFAULT_ADDRESS}"
    parser.add_argument("--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help=text)
    add_credentials(parser)


def add_credentials(parser: argparse.ArgumentParser) -> None:
    """What the caller shows, and of an encrypted connection."""
    text = f"of the caller; default {API_KEY_VARIABLE} of the environment, where other users can't see it"
    parser.add_argument("--api-key", default="", metavar="KEY", help=text)
    add_files(parser)


def add_files(parser: argparse._ActionsContainer) -> None:
    """Of an encrypted connection."""
    for name, metavar, text in _FILES:
        parser.add_argument(name, default="", metavar=metavar, help=text)


def files_of(arguments: argparse.Namespace) -> dict[str, str]:
    """As the client library takes them."""
    return {name: getattr(arguments, name) for name in ("ca", "cert", "key", "server_name")}


def connection_of(arguments: argparse.Namespace) -> dict[str, str]:
    """What was given of `add_credentials`'s arguments, as the client library takes it."""
    return {"api_key": arguments.api_key or default_api_key(), **files_of(arguments)}


def default_api_key() -> str:
    """That of the environment."""
    return os.environ.get(API_KEY_VARIABLE, "")


_SAMPLING: tuple[tuple[str, type, str, str], ...] = (
    ("--max-tokens", int, "N", "default: what the context length leaves"),
    ("--temperature", float, "T", "0 is greedy; default: the model's own"),
    ("--top-p", float, "P", "draw from the likeliest tokens that make up this share"),
    ("--top-k", int, "K", "draw from the K likeliest tokens; 0 is off"),
    ("--min-p", float, "P", "draw from tokens that have this share of the likeliest's probability"),
    ("--repetition-penalty", float, "X", "divides the logits of tokens that have come; 1 is off"),
    ("--seed", int, "N", "the same seed draws the same tokens"),
    ("--max-repeats", int, "N", "end an answer that ends with the same run of tokens N times over"),
    ("--profile", str, "NAME", "of the router's profiles"),
    ("--priority", int, "N", "lower runs first; default 0"),
)
_REPEATED = (
    ("--stop", "TEXT", "ends the answer, and is left out of it; may be repeated"),
    ("--bad-word", "TEXT", "must not be generated; may be repeated"),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, kind, metavar, text in _SAMPLING:
        group.add_argument(name, type=kind, metavar=metavar, help=text)
    for name, metavar, text in _REPEATED:
        group.add_argument(name, action="append", metavar=metavar, help=text)
    grammar = group.add_mutually_exclusive_group()
    grammar.add_argument("--json-schema", metavar="FILE", help="the answer is JSON that matches the schema")
    grammar.add_argument("--regex", metavar="PATTERN", help="the answer matches it, whole")
    grammar.add_argument("--choice", action="append", metavar="TEXT", help="the answer is one of these; repeated")


def sampling_options(arguments: argparse.Namespace) -> Options:
    """What was given of `add_sampling`'s arguments. InvalidArgumentError for a file that can't be read."""
    names = [name.removeprefix("--").replace("-", "_") for name, *_ in _SAMPLING]
    given = given_of(arguments, *names, "stop", "regex", bad_words="bad_word", choices="choice")
    if arguments.json_schema is not None:
        try:
            given["json_schema"] = Path(arguments.json_schema).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise invalid("--json-schema", arguments.json_schema, f"can't be read: {reason}") from None
    return cast(Options, given)


def given_of(arguments: argparse.Namespace, *same: str, **named: str) -> dict[str, object]:
    """The options whose arguments, of the same name or the one that is named, were given."""
    names = {**dict(zip(same, same, strict=True)), **named}
    return {name: value for name, argument in names.items() if (value := getattr(arguments, argument)) is not None}
