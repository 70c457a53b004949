"""Measures Pageferry and its peers under the same loads, in turns, and writes one result of `pageferry bench` a turn.

python bench/peers/run.py --setup                      # environments and weights, once
python bench/peers/run.py --out build/peers-run        # measure; goes on where it was interrupted
python bench/peers/report.py build/peers-run --out bench/RESULTS.md
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from pageferry.core.cores import num_cores
from peers import results
from peers.environments import Environments, versions
from peers.loads import Load, loads
from peers.server import PROMPT, Server, ServerFailedError, free_port, running
from peers.system import Place, System
from peers.systems import SYSTEMS
from peers.weights import Weights

_SOURCE = str(Path(__file__).resolve().parents[2] / "src")
_REFERENCE = "pageferry"
_CLIENT = (sys.executable, "-m", "pageferry.cli", "bench", "--quiet")
_BACKGROUND_SEED = 10**6  # added, so that its prompts are others


class Turns:
    """Starts what the turn needs, and keeps what must stay for the next one."""

    def __init__(self, environments: Environments, weights: Weights, out: Path) -> None:
        self._environments = environments
        self._weights = weights
        self._out = out
        self._staying: dict[str, Server] = {}
        self.answers: dict[str, str] = {}

    @contextmanager
    def server(self, system: System, load: Load) -> Iterator[Server]:
        """Ready, and known to say what Pageferry says. Raises ServerFailedError."""
        if not system.stays:
            server = self._start(system, load)
            try:
                self._check(server)
                yield server
            finally:
                server.stop()
            return
        if system.name not in self._staying:
            server = self._start(system, load)
            try:
                self._check(server)
            except BaseException:
                server.stop()
                raise
            self._staying[system.name] = server
        with running(self._staying[system.name]):
            yield self._staying[system.name]

    def close(self) -> None:
        for server in self._staying.values():
            server.stop()

    def _start(self, system: System, load: Load) -> Server:
        place = Place(
            self._environments, self._weights, free_port(), num_cores(), load.streams, max_tokens=load.max_tokens
        )
        return Server(system, place, self._out / f"{system.name}.log")

    def _check(self, server: Server) -> None:
        answer = server.first_answer()
        self.answers[server.system.name] = answer
        expected = self.answers.get(_REFERENCE, answer)
        if answer.split()[:1] != expected.split()[:1]:
            raise ServerFailedError(f"{server.system.name} says {answer!r} where {_REFERENCE} says {expected!r}")


def seed_of(load: str, number: int, attempt: int) -> int:
    """The same for all systems; prompts of another load, round or attempt are none that a cache may hold."""
    return 1 + attempt + 10 * number + 1000 * list(loads()).index(load)


def measure(server: Server, load: Load, seed: int, path: Path) -> None:
    """Run the client, and write its result. Raises CalledProcessError where a request has failed."""
    with ExitStack() as stack:
        pids = [server.pid]
        if load.background:
            pids.append(stack.enter_context(_background(server, load, seed + _BACKGROUND_SEED, path)))
        options = [item for pid in pids for item in ("--pid", str(pid))]
        command = [*_CLIENT, *load.options, "--seed", str(seed), *server.bench_options(), *options]
        command += ["--label", server.system.title, "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextmanager
def _background(server: Server, load: Load, seed: int, path: Path) -> Iterator[int]:
    """Another client while the block runs; its pid."""
    command = [*_CLIENT, *load.background, "--seed", str(seed), *server.bench_options(), "--pid", str(server.pid)]
    command += ["--json", str(path.with_suffix(".background.json"))]
    client = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield client.pid
    finally:
        client.send_signal(signal.SIGINT)  # it writes what it has
        client.wait()


def turn(turns: Turns, system: System, load: Load, number: int, arguments: argparse.Namespace) -> None:
    """One system under one load, again while others disturb it; what was disturbed is kept under another name."""
    path = results.path_of(arguments.out, load.name, system.name, number)
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part.json")
    for attempt in range(1 + arguments.retries):
        with turns.server(system, load) as server:
            measure(server, load, seed_of(load.name, number, attempt), part)
        summary = json.loads(part.read_text())["summary"]
        foreign = summary["foreign_cpu_percent"] or 0.0
        said = ", ".join(f"{metric.title} {results.figure(summary, metric.path):.1f}" for metric in load.metrics)
        print(f"{load.name}, round {number + 1}, {system.name}: {said}; others {foreign:.1f}%", flush=True)
        if foreign <= arguments.max_foreign_percent:
            part.rename(path)
            return
        part.rename(results.dropped(path, attempt))
        time.sleep(arguments.pause_s)


def describe(chosen: list[System], answers: dict[str, str], place: Place) -> dict[str, Any]:
    """What a report must know beside the results; the commands are those at `place`."""
    return {
        "command": shlex.join(["python", "bench/peers/run.py", *sys.argv[1:]]),
        "prompt": PROMPT,
        "answers": answers,
        "systems": {
            system.name: {
                "versions": versions(system.environment, system.packages) if system.environment else {},
                "command": shlex.join(_short(system.command(place))),
            }
            for system in chosen
        },
    }


def _short(command: list[str]) -> list[str]:
    """Without this machine's paths."""
    here = str(Path.cwd())
    return [("python" if part == sys.executable else part.replace(here + "/", "")) for part in command]


def setup(chosen: list[System], environments: Environments, weights: Weights) -> int:
    """Install and convert; the exit status. What can't be had is said, and the rest goes on."""
    failed = []
    for system in {system.environment: system for system in chosen if system.environment}.values():
        try:
            environments.make(system.environment, system.module, system.build)
        except subprocess.CalledProcessError as error:
            failed.append(f"{system.environment}: {error}")
    weights.make()
    for line in failed:
        print(f"setup: failed: {line}", file=sys.stderr)
    return 1 if failed else 0


def run(chosen: list[System], under: list[Load], arguments: argparse.Namespace) -> int:
    """All turns, A B C A B C; the exit status."""
    environments, weights = _places(arguments)
    needed = {system.environment for system in chosen if system.environment}
    missing = {name for name in needed if not environments.has(name)}
    chosen = [system for system in chosen if system.environment not in missing]
    for name in sorted(missing):
        print(f"{name} is not installed as bench/peers/requirements has it, and left out: --setup", file=sys.stderr)
    arguments.out.mkdir(parents=True, exist_ok=True)
    turns = Turns(environments, weights, arguments.out)
    example = Place(environments, weights, 8000, num_cores(), streams=8, max_tokens=256)
    failed = bool(missing)
    try:
        with turns.server(SYSTEMS[_REFERENCE], under[0]):
            pass
        for load in under:
            for number in range(arguments.rounds):
                for system in chosen:
                    try:
                        turn(turns, system, load, number, arguments)
                    except (ServerFailedError, subprocess.CalledProcessError) as error:
                        failed = True
                        print(f"{system.name} under {load.name}: {error}", file=sys.stderr, flush=True)
                results.write_description(arguments.out, describe(chosen, turns.answers, example))
    finally:
        turns.close()
    return 1 if failed else 0


def _places(arguments: argparse.Namespace) -> tuple[Environments, Weights]:
    environments = Environments(arguments.environments.resolve())
    return environments, Weights(arguments.environments.resolve() / "weights", environments)


def _chosen(text: str | None, known: dict[str, Any], option: str) -> list[Any]:
    names = text.split(",") if text else list(known)
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{option}: {', '.join(unknown)} is not among {', '.join(known)}")
    return [known[name] for name in names]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="only make environments and weights")
    parser.add_argument("--peers", metavar="A,B", help=f"some of {', '.join(SYSTEMS)}")
    parser.add_argument("--loads", metavar="A,B", help=f"some of {', '.join(loads())}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="tiny loads: whether everything runs")
    parser.add_argument("--out", type=Path, default=Path("build/peers-run"), metavar="DIR")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"), metavar="DIR")
    parser.add_argument("--max-foreign-percent", type=float, default=5.0, help="of the machine, by other processes")
    parser.add_argument("--retries", type=int, default=2, help="of a disturbed measurement")
    parser.add_argument("--pause-s", type=float, default=10.0, help="before such a retry")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that servers are ended
    os.environ["PYTHONPATH"] = _SOURCE  # servers and clients of this tree, whatever is installed
    chosen = _chosen(arguments.peers, SYSTEMS, "--peers")
    if arguments.setup:
        return setup(chosen, *_places(arguments))
    return run(chosen, _chosen(arguments.loads, loads(quick=arguments.quick), "--loads"), arguments)


if __name__ == "__main__":
    sys.exit(main())
