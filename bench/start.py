"""What `pageferry up` takes to start, to stop, and to do nothing.

    python bench/start.py [--rounds 5] [--idle 20] [--json FILE] [options of `pageferry up`, such as --prefill 0]

Starts it, by default with a router, one prefill and one decode worker and the packaged model, waits for its last line,
and stops it as Ctrl-C does, which nothing running delays. Stages are read off the processes' logs, in seconds since
`up` was started: a process runs (Python and the service are there), torch is there, the model is loaded, a step of each
kind has run. On a busy machine only the processor time says something. The last round measures that of each process
while nothing is asked, too.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import psutil
from cluster import Cluster

# What a process's first line with this text says has been reached.
STAGES = {
    '"event": "starting"': "runs",
    "reading ": "torch",
    " s, computes in ": "loaded",
    '"event": "listening"': "listens",
    '"event": "ready"': "ready",
}
LIMITS = {"ready_s": 6.0, "load_s": 2.0, "stop_s": 2.0, "idle_percent": 2.0}
SETTLE_S = 3.0


@dataclass
class Round:
    """Seconds since the start, by process and stage; `idle_percent` of a core, by process, where it was measured."""

    stages: dict[str, dict[str, float]] = field(default_factory=dict)
    ready_s: float = 0.0
    stop_s: float = 0.0
    cpu_s: float = 0.0  # of all processes, from start to end
    idle_percent: dict[str, float] = field(default_factory=dict)

    @property
    def load_s(self) -> float:
        """Of the slowest worker."""
        return max(stages["loaded"] - stages["torch"] for stages in self.stages.values() if "loaded" in stages)


def one_round(arguments: list[str], idle_s: float) -> Round:
    start, cpu_s = time.monotonic(), children_cpu_s()
    cluster = Cluster(*arguments)
    try:
        cluster.wait_ready()
        result = Round(stages_of(cluster, start), time.monotonic() - start)
        if idle_s:
            result.idle_percent = idle_percent(cluster, idle_s)
    finally:
        stop = time.monotonic()
        status = cluster.stop()
    assert status == 0, cluster.output
    result.stop_s, result.cpu_s = time.monotonic() - stop, children_cpu_s() - cpu_s
    return result


def children_cpu_s() -> float:
    """Of all processes that have ended."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def stages_of(cluster: Cluster, start: float) -> dict[str, dict[str, float]]:
    stages: dict[str, dict[str, float]] = defaultdict(dict)
    for at, line in zip(cluster.times, cluster.lines, strict=False):
        role, _, text = line.partition(" ")
        for mark, stage in STAGES.items():
            if mark in text:
                stages[role].setdefault(stage, at - start)
    return dict(stages)


def role_of(child: psutil.Process) -> str:
    """Such as "decode-0": what `up` names its configuration after."""
    command = child.cmdline()
    return Path(command[command.index("--config") + 1]).stem


def idle_percent(cluster: Cluster, seconds: float) -> dict[str, float]:
    up = psutil.Process(cluster.process.pid)
    processes = {"up": up} | {role_of(child): child for child in up.children()}
    time.sleep(SETTLE_S)
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    time.sleep(seconds)
    return {name: 100 * (sum(p.cpu_times()[:2]) - before[name]) / seconds for name, p in processes.items()}


def report(rounds: list[Round]) -> dict[str, float]:
    """Print medians; those that are limited."""
    for role in rounds[0].stages:
        reached = [one.stages.get(role, {}) for one in rounds]
        known = set.intersection(*map(set, reached))  # the last line of a process may come after that of `up`
        medians = {stage: statistics.median(stages[stage] for stages in reached) for stage in known}
        print(f"{role:<10} " + ", ".join(f"{stage} {medians[stage]:.2f}" for stage in sorted(known, key=medians.get)))
    for name, percent in rounds[-1].idle_percent.items():
        print(f"idle: {name:<10} {percent:.2f} % of a core")
    figures = {
        name: statistics.median(getattr(one, name) for one in rounds) for name in ("ready_s", "load_s", "stop_s")
    }
    if rounds[-1].idle_percent:
        figures["idle_percent"] = max(rounds[-1].idle_percent.values())
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=float, default=20, metavar="SECONDS", help="0: not measured")
    parser.add_argument("--json", type=Path, help="write the rounds to this file")
    options, arguments = parser.parse_known_args()
    rounds = []
    for number in range(1, options.rounds + 1):
        rounds.append(one_round(arguments, options.idle if number == options.rounds else 0))
        last = rounds[-1]
        print(
            f"round {number}: ready after {last.ready_s:.2f} s, ended in {last.stop_s:.2f} s, "
            f"{last.cpu_s:.2f} s of processor time in all",
            flush=True,
        )
    figures = report(rounds)
    for name, value in figures.items():
        print(f"{name} {value:.2f} (limit {LIMITS[name]:g})")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in rounds], indent=1) + "\n", encoding="utf-8")
    return 0 if all(value <= LIMITS[name] for name, value in figures.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
