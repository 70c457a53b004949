"""`pageferry COMMAND`: arguments in, exit status out; errors are one line."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from pageferry import __version__
from pageferry.cli import bench, chat, demo, drain, generate, key, models, status, trace, up
from pageferry.cli.arguments import API_KEY_VARIABLE
from pageferry.core.errors import PageferryError, UnauthenticatedError, UnavailableError

_INTERRUPTED = 130
_UNREACHED = ("failed to connect", "dns resolution failed", "errors resolving")  # as the gRPC library says it
# The same of connections that came about and could not be trusted, by one side or the other.
_DISTRUSTED = {
    "socket closed": "it ends the connection; it may be encrypted or want a certificate: --ca, --cert and --key",
    "certificate has expired": "its certificate is past its last day, or a clock is wrong",
    "certificate_verify_failed": "its certificate is not signed by whom --ca names",
    "hostname verification": "its certificate is for another name; see --server-name",
    "wrong_version_number": "it is not encrypted; leave --ca out",
}
_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "up": (up.add_command, "start a router with prefill and decode workers on this machine"),
    "generate": (generate.add_command, "ask once"),
    "chat": (chat.add_command, "ask in a conversation"),
    "status": (status.add_command, "show workers, pages and queues"),
    "trace": (trace.add_command, "show a request's way as a waterfall"),
    "drain": (drain.add_command, "take a router or worker out of work, and wait until nothing is open"),
    "bench": (bench.add_command, "put load on a server, this one or another, and measure it"),
    "models": (models.add_command, "say what is understood of a model, and how much memory it needs"),
    "key": (key.add_command, "make an API key for a caller"),
    "demo": (demo.add_command, "start three processes, ask one question, show its trace"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit status."""
    arguments, unknown = build_parser().parse_known_args(argv)
    if unknown:
        arguments.command.error(f"unrecognized arguments: {' '.join(unknown)}")  # under the command's usage
    try:
        return int(arguments.run(arguments))
    except PageferryError as error:
        return _fail(_message(error, arguments))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # whoever read the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if sys.flags.dev_mode:  # python -X dev
            raise
        return _fail(f"{type(error).__name__}: {error}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pageferry", description="Serves a language model from separate prefill and decode processes."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (add_command, summary) in _COMMANDS.items():
        description = f"{summary[0].upper()}{summary[1:]}."
        command = commands.add_parser(name, help=summary, description=description, allow_abbrev=False)
        command.set_defaults(command=command)
        add_command(command)
    return parser


def _message(error: PageferryError, arguments: argparse.Namespace) -> str:
    address, called = getattr(arguments, "address", ""), getattr(arguments, "called", "router")
    from_router = error.reason != error.code  # it names a reason, and may quote what it heard of a worker
    unreached = any(sign in error.message.lower() for sign in _UNREACHED)
    if address and isinstance(error, UnavailableError) and unreached and not from_router:
        for sign, hint in _DISTRUSTED.items():
            if sign in error.message.lower():
                return f"no {called} answers at {address}: {hint}"
        return f"no {called} answers at {address}; start one with `pageferry up`, or name another with --address"
    if address and isinstance(error, UnauthenticatedError):
        return f"{error.message}; give --api-key, or set {API_KEY_VARIABLE}"
    return error.message


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
