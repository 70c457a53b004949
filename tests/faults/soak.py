"""Chaos: random load on real processes while they are killed, paused, drained and cut off; nothing may be lost or left.

    python tests/faults/soak.py --seed 1 --seconds 60            (make soak)
    python tests/faults/soak.py --script build/soak-1.jsonl      (the same again, or a part of it)

Two routers, two prefill and two decode workers with a tiny model. The seed gives the script: each request and each
fault, with its time. How they meet on the machine's clock is not fixed, so a replay may need several tries. Each answer
is held to what an undisturbed run gave, each position to come once, each trace to be whole; at the end no page, ticket,
file or thread is in use that was not before, and no process has grown. A failing script is written to a file, replayed
with less in it as often as `--replays` allows, and the shortest that still fails is printed.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ |= {"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "ERROR"}  # before grpc is imported
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import uvloop
from chaos.replay import play, shortest
from chaos.script import KINDS, Script, draw_script

MAX_LINES = 60  # of a script that is printed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=20, help="requests a second, on average")
    parser.add_argument("--faults", default=",".join(KINDS), metavar="KIND,...", help="which are drawn; default: all")
    parser.add_argument("--script", type=Path, metavar="FILE", help="play this instead of what the seed gives")
    parser.add_argument("--replays", type=int, default=16, help="most replays that a failure is shrunk by; 0: none")
    parser.add_argument("--out", type=Path, default=Path("build"), metavar="DIRECTORY", help="where scripts are kept")
    return parser.parse_args()


def say(line: str) -> None:
    print(f"soak: {line}", flush=True)


async def soak(script: Script, out: Path, num_replays: int) -> int:
    """Play it, and shrink it if it fails; the exit status."""
    say(f"seed {script.seed}, {script.seconds:g} s: {len(script.asks)} requests, {len(script.faults)} faults")
    verdict = await play(script, say)
    say(verdict.summary)
    if not verdict.problems:
        say(f"seed {script.seed}: nothing lost, nothing left")
        return 0
    path = write(script, out / f"soak-{script.seed}.jsonl")
    say(f"seed {script.seed}: FAILED with {len(verdict.problems)} problems")
    if num_replays:
        short = await shortest(script, verdict, say, num_replays)
        path = write(short, path.with_suffix(".short.jsonl"))
        lines = short.dump().splitlines()
        say(f"the shortest that failed again, {len(lines)} lines:")
        print("\n".join(lines if len(lines) <= MAX_LINES else [*lines[:MAX_LINES], "and so on"]))
    say(f"to play it again: python tests/faults/soak.py --script {path}")
    return 1


def write(script: Script, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script.dump(), encoding="utf-8")
    return path


def main() -> int:
    options = parse()
    kinds = [kind for kind in options.faults.split(",") if kind]
    if options.script:
        script = Script.load(options.script)
    else:
        script = draw_script(options.seed, options.seconds, per_second=options.rate, kinds=kinds)
    return uvloop.run(soak(script, options.out, options.replays))


if __name__ == "__main__":
    sys.exit(main())
