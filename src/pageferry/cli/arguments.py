"""Arguments that commands share."""

import argparse
import os
from typing import cast

from pageferry.client import Options

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


def add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help="default: what the context length leaves")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; default: the model's own")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="draw from the likeliest tokens that make up this share"
    )
    group.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens; 0 is off")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same tokens")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="ends the answer, and is left out of it; may be repeated"
    )


def sampling_options(arguments: argparse.Namespace) -> Options:
    """What was given of `add_sampling`'s arguments."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return cast(Options, given)
