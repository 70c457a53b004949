"""Runs the fuzz tests over and over, each round with a new seed, for as many minutes as it is told.

A round is one process for one module of tests, limited in memory and processor time. What fails is printed with its
input and the command that replays it, and is left out of later rounds; the exit status is 1 then. Inputs that failed
once are kept in build/fuzz and are tried first.
"""

import argparse
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "fuzz"
MAX_DATA_BYTES = 4 << 30
MAX_CPU_S = 600  # of a round; wall time says nothing on a machine that does other things
MAX_WALL_S = 3600  # of a round that neither computes nor ends
ROUND_CPU_S = (10.0, 40.0)  # a shorter round gets more examples the next time, a longer one fewer
FIRST_EXAMPLES = 300
FAILED = re.compile(r"^FAILED (\S+?)(?: - .*)?$", re.MULTILINE)
PASSED = re.compile(r"(\d+) passing")


@dataclass
class Target:
    """A module of fuzz tests."""

    path: Path
    num_examples: int = FIRST_EXAMPLES  # of each test, in the next round
    num_rounds: int = 0
    num_tried: int = 0
    cpu_s: float = 0.0
    found: set[str] = field(default_factory=set)  # ids of tests

    @property
    def name(self) -> str:
        return self.path.stem.removeprefix("test_")

    def command(self, seed: int, *options: str) -> list[str]:
        skipped = [f"--deselect={test}" for test in sorted(self.found)]
        shown = str(self.path.relative_to(ROOT))
        fixed = [
            "-q",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            "--hypothesis-show-statistics",
            f"--timeout={MAX_WALL_S}",
        ]
        return [sys.executable, "-m", "pytest", shown, f"--hypothesis-seed={seed}", *fixed, *skipped, *options]

    def environment(self) -> dict[str, str]:
        return {
            "HYPOTHESIS_PROFILE": "fuzz",
            "PAGEFERRY_FUZZ_EXAMPLES": str(self.num_examples),
            "PYTHONUNBUFFERED": "1",
        }


def limit_memory() -> None:
    """Of the process about to start: what an input makes it allocate then fails, and is found."""
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def execute(target: Target, command: list[str]) -> tuple[int, str]:
    """Exit status, and what was printed."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | target.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=limit_memory,
    )
    try:
        output, _ = process.communicate(timeout=MAX_WALL_S + 60)
    except BaseException as error:
        process.kill()
        output, _ = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    return process.returncode, output


def run_round(target: Target, seed: int) -> bool:
    """Whether nothing was found."""
    command = target.command(seed)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    status, output = execute(target, command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    tried = sum(map(int, PASSED.findall(output)))
    target.num_rounds += 1
    target.num_tried += tried
    target.cpu_s += cpu_s
    found = "ok" if status == 0 else "FOUND"
    print(
        f"{time.strftime('%X')} {target.name}: seed {seed}, {tried} inputs in {cpu_s:.0f} s of CPU, {found}", flush=True
    )
    if status != 0:
        report(target, seed, command, status, output)
    if cpu_s < ROUND_CPU_S[0]:
        target.num_examples *= 2
    elif cpu_s > ROUND_CPU_S[1]:
        target.num_examples = max(FIRST_EXAMPLES // 4, target.num_examples // 2)
    return status == 0


def report(target: Target, seed: int, command: list[str], status: int, output: str) -> None:
    """Print what was found, with its input and how to replay it; the whole of it is kept in build/fuzz."""
    failed = set(FAILED.findall(output))
    if not failed:  # the process died, or hung: the last input that is tried when it is run again is the one
        output += execute(target, [*command, "-s", "-x", "--hypothesis-verbosity=verbose"])[1][-20_000:]
    target.found |= failed
    KEPT.mkdir(parents=True, exist_ok=True)
    log = KEPT / f"{target.name}-{seed}.log"
    log.write_text(output, encoding="utf-8")
    settings = " ".join(f"{name}={value}" for name, value in target.environment().items())
    print("\n".join(line[:500] for line in output.splitlines()[-120:]))
    print(f"exit status {status}; all of it is in {log}; to replay:\n  {settings} {shlex.join(command)}", flush=True)


def summary(targets: list[Target]) -> None:
    print(f"\n{'target':20} {'rounds':>6} {'inputs':>10} {'CPU s':>8}  found")
    for target in targets:
        found = ", ".join(sorted(test.rpartition("::")[2] for test in target.found)) or "nothing"
        print(f"{target.name:20} {target.num_rounds:6} {target.num_tried:10} {target.cpu_s:8.0f}  {found}")
    total = [sum(getattr(target, name) for target in targets) for name in ("num_rounds", "num_tried", "cpu_s")]
    print(f"{'all':20} {total[0]:6} {total[1]:10} {total[2]:8.0f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="names, such as gguf; all unless given")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    targets = [Target(path) for path in sorted(Path(__file__).parent.glob("test_*.py"))]
    targets = [target for target in targets if not options.targets or target.name in options.targets]
    if not targets:
        parser.error("no such target")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(
        f"fuzzing {', '.join(target.name for target in targets)} for {options.minutes:g} min from seed {options.seed}"
    )
    is_clean, seed, end = True, options.seed, time.monotonic() + options.minutes * 60
    try:
        while time.monotonic() < end:
            for target in targets:
                if time.monotonic() < end:
                    is_clean &= run_round(target, seed)
                    seed += 1
    finally:
        summary(targets)
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
