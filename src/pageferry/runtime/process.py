"""The main function of a service's process: arguments, configuration, signals, one event loop, exit code."""

import argparse
import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from pageferry.core.config import Config
from pageferry.core.errors import PageferryError
from pageferry.core.read_config import load_config
from pageferry.core.settings import parse_overrides
from pageferry.runtime.logs import configure_logging, log

_PR_SET_PDEATHSIG = 1
# Options for settings of a worker's engine: the setting, how its value is called, and what it is.
ENGINE_OPTIONS = {
    "--pages": (
        "engine.page_format",
        "FORMAT",
        (
            "format of the pages: fp32, bf16, fp16, fp8_e4m3, int8 (the default) or int4; with scales per channel as "
            "int8:channel, with zero points as int4:asym; keys and values apart as k=int8:channel,v=int4"
        ),
    ),
    "--cache-layers": (
        "engine.cache_layers",
        "LAYERS=POLICY;...",
        (
            "which tokens layers keep: full, window:W (the last W), or window:W,sinks:S (and the first S), such as "
            "'0-14=window:256,sinks:4;15-29=full'; default: all layers as the model has it"
        ),
    ),
    "--device": ("engine.device", "DEVICE", "cpu, the default, or cuda:N"),
}
# Torch's threads wait for each other awake, for milliseconds unless told, and keep a shared machine's cores from those
# that have work. Its OpenMP reads this when torch is imported.
_OPENMP_SPINS = ("GOMP_SPINCOUNT", "1000")  # some tens of microseconds
Main = Callable[[Config, asyncio.Event], Awaitable[int]]


def run_service(
    main: Main, *, name: str, arguments: list[str] | None = None, engine_options: Iterable[str] = ()
) -> NoReturn:
    """Run a service until it returns, and end the process with its exit code. It takes these of ENGINE_OPTIONS.

    `main` gets the configuration and an event that is set by SIGTERM or Ctrl-C; a second Ctrl-C ends the process at
    once. An error that the user can mend is one line on stderr.
    """
    os.environ.setdefault(*_OPENMP_SPINS)
    end_process(_exit_code(main, name, arguments, engine_options))


def end_process(code: int) -> NoReturn:
    """Flush what was logged and printed, and end without taking the interpreter apart.

    With torch that takes a third of a second, and seconds where cores are few. So what a service has to bring to an end
    (streams, pages, spans) ends in its `main`; nothing of it may be left to `atexit` or to finalisers.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as it is in a process that was started with it closed
            with contextlib.suppress(OSError):  # whoever read it has gone
                stream.flush()
    os._exit(code)


@contextlib.contextmanager
def lasting_objects() -> Iterator[None]:
    """What comes into being in the block, and before it, is taken to stay: no collection looks at it.

    A full one takes 0.1 s where torch is loaded, in which no token is computed and none is sent.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.collect()  # what was made in cycles and let go would stay, too
        gc.freeze()
        gc.enable()


def _exit_code(main: Main, name: str, arguments: list[str] | None, engine_options: Iterable[str]) -> int:
    try:
        options = _parse(name, sys.argv[1:] if arguments is None else arguments, engine_options)
        if options.die_with_parent is not None:
            _die_with_parent(options.die_with_parent or os.getppid())
        overrides = parse_overrides(options.set) | given_settings(options)
        config = load_config(options.config, dict(os.environ), overrides)
        configure_logging(name, config.telemetry.log_level)
        return _run(main, config)
    except PageferryError as error:
        sys.stderr.write(f"error: {error.message}\n")
    except Exception as error:
        sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
        log("crashed", level="debug", error=error)
    return 1


def add_engine_options(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """`given_settings` finds what was given."""
    for name in names:
        setting, metavar, text = ENGINE_OPTIONS[name]
        parser.add_argument(name, dest=setting, metavar=metavar, help=text)


def given_settings(options: argparse.Namespace) -> dict[str, object]:
    """The settings of the engine options that were given, by "section.field"."""
    names = [setting for setting, *_ in ENGINE_OPTIONS.values()]
    return {name: getattr(options, name) for name in names if getattr(options, name, None) is not None}


def _parse(name: str, arguments: list[str], engine_options: Iterable[str]) -> argparse.Namespace:
    module = sys.modules["__main__"].__spec__
    parser = argparse.ArgumentParser(prog=f"python -m {module.parent}" if module else name)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the sections of the configuration")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="override one field; may be repeated"
    )
    parser.add_argument(
        "--die-with-parent",
        type=int,
        nargs="?",
        const=0,
        metavar="PID",
        help="stop when the process that started this one ends; with its id, also where that was before this began",
    )
    add_engine_options(parser, engine_options)
    return parser.parse_args(arguments)


def _die_with_parent(parent: int) -> None:
    """Get SIGTERM when the parent ends, however it ends, or where it has ended already."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _run(main: Main, config: Config) -> int:
    import uvloop

    async def run() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop, stop, number)
        return await main(config, stop)

    return uvloop.run(run())


def _stop(stop: asyncio.Event, number: int) -> None:
    if stop.is_set() and number == signal.SIGINT:
        end_process(130)
    log("stopping", signal=signal.Signals(number).name)
    stop.set()
