"""The process that compiles and renders a model's chat template, which comes with the model and is not to be trusted.

It is run as a script, with the number of the socket that it is asked through, and imports nothing of ours. The sandbox
keeps a template from Python's objects; what it can still do, build huge texts and loop, costs this process alone: its
memory and its processor time for each request are limited, and it can open nothing. It ends when the socket does.
"""

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY_BYTES = 512 << 20
MAX_CPU_S = 1.0  # of one request; the signal that comes then ends the process
MAX_CHARACTERS = 8 << 20  # of a rendered chat
Reply = dict[str, str]


class _Generation(Extension):
    """`{% generation %}` marks what the model says, for training; here it is left out."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's; the router ends in its own time
    _warm_up()
    _limit()
    try:
        job = json.loads(connection.recv_bytes())
        template, reply = _timed(_compile, job["source"])
        for_tools = template
        if job["tool_source"] is not None and template is not None:
            for_tools, reply = _timed(_compile, job["tool_source"])
        _send(connection, reply)
        while True:
            request = job["special_tokens"] | json.loads(connection.recv_bytes())
            _send(connection, _timed(_render, for_tools if request.get("tools") else template, request))
    except (EOFError, OSError):
        return


def _warm_up() -> None:
    """Load what Python and jinja2 load at first use, while files can be opened."""
    template, _ = _compile(r"{{ strftime_now('%B\n\u00e4') }}{{ raise_exception('') }}")
    assert template is not None
    _render(template, {})


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
        resource.setrlimit(limit, (0, 0))


def _timed(work: Any, *arguments: Any) -> Any:
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    try:
        return work(*arguments)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _send(connection: Connection, reply: Reply) -> None:
    connection.send_bytes(json.dumps(reply).encode())


def _compile(source: str) -> tuple[Template | None, Reply]:
    """The template, or None; the reply says why."""
    try:
        return _environment().from_string(source), {"problem": ""}
    except TemplateSyntaxError as error:
        return None, {"problem": f"has an error in line {error.lineno}: {error.message}"}
    except Exception as error:  # whatever it is, it is the template's
        return None, {"problem": f"can't be compiled ({type(error).__name__})"}


def _render(template: Template, values: Mapping[str, Any]) -> Reply:
    """The text, or the template's own words on why it refuses, or the kind of error that it has: never that one's."""
    try:
        parts, num_characters = [], 0
        for part in template.generate(**values):
            parts.append(part)
            num_characters += len(part)
            if num_characters > MAX_CHARACTERS:
                return {"failed": f"more than {MAX_CHARACTERS} characters"}
        return {"text": "".join(parts)}
    except TemplateError as error:
        return {"refused": error.message or type(error).__name__}
    except Exception as error:
        return {"failed": type(error).__name__}


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers sets it up, so that templates written for it render the same."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    main()
