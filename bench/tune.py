"""What the scheduler's settings do to latency and throughput: the measurements behind their defaults.

    python bench/tune.py [--only NAME ...] [--rounds 3] [--seconds 12] [--model smollm2] [--out docs/tuning]

Each experiment starts Pageferry anew for each value of one setting, under the same load of `pageferry bench`, values in
turn (A B C A B C), and takes medians over the rounds. Prints a table and draws a plot for each; docs/tuning.md says
what follows from them. Run it where nothing else runs, with one core or more for each worker.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import numpy as np
from cluster import PAGEFERRY, environment, running

from pageferry.loadgen.plots import Frame, Panel, Series, lines
from pageferry.loadgen.result import BenchResult, Record
from pageferry.loadgen.svg import standalone

SHORT = 256  # tokens: prompts up to this length count as short ones
SPLIT = ("--prefill", "1", "--decode", "1")
COLOCATED = ("--prefill", "0", "--decode", "1")
WARM_UP = 4  # requests before each run

Figures: TypeAlias = dict[str, float]


@dataclass(frozen=True)
class Experiment:
    """One setting's values under one load. `figures` are those of the plot's panels, by unit."""

    setting: str
    values: tuple[float, ...]
    workers: tuple[str, ...]
    load: tuple[str, ...]
    figures: Mapping[str, Mapping[str, Callable[[BenchResult], float]]]

    @property
    def name(self) -> str:
        return self.setting.partition(".")[2]


def first_token(share: float, *, long: bool = False) -> Callable[[BenchResult], float]:
    return lambda result: percentile([one.ttft_ms for one in chosen(result, long)], share)


def gap(share: float) -> Callable[[BenchResult], float]:
    """Between tokens, from the second on: the first gap of a stream holds the hand-off."""
    return lambda result: percentile([each for one in result.requests for each in one.gaps_ms[1:]], share)


def second_token(*, long: bool) -> Callable[[BenchResult], float]:
    return lambda result: percentile([one.gaps_ms[0] for one in chosen(result, long) if one.gaps_ms], 50)


def throughput(result: BenchResult) -> float:
    return result.summary.output_tokens_per_s


def chosen(result: BenchResult, long: bool) -> list[Record]:
    return [one for one in result.requests if one.error is None and (one.input_tokens > SHORT) == long]


def percentile(values: Sequence[float | None], share: float) -> float:
    known = [value for value in values if value is not None]
    return float(np.percentile(known, share)) if known else float("nan")


LATENCY = {
    "first token, ms": {
        "short prompts, median": first_token(50),
        "short prompts, p90": first_token(90),
        "long prompts, median": first_token(50, long=True),
    },
    "between tokens, ms": {"median": gap(50), "p99": gap(99)},
}
# One prompt in ten is long; the prefill core is busy for about half of the time.
MIXED = ("--rate", "4", "--arrivals", "poisson", "--input-tokens", "128*9,1500*1", "--output-tokens", "32")
EXPERIMENTS = (
    Experiment("scheduler.chunk_tokens", (64, 128, 256, 512), SPLIT, MIXED, LATENCY),
    Experiment(
        "scheduler.final_chunk_tokens",
        (0, 32, 64, 128),
        SPLIT,
        MIXED,
        {
            "first token, ms": {"long prompts, median": first_token(50, long=True)},
            "gap to the second token, ms": {"long prompts, median": second_token(long=True)},
        },
    ),
    Experiment("scheduler.max_prefills", (1, 2, 8, 32), SPLIT, MIXED, LATENCY),
    Experiment("scheduler.ageing_tokens_per_s", (0, 250, 1000, 4000), SPLIT, MIXED, LATENCY),
    Experiment(
        "scheduler.batch_window_ms",
        (0, 2, 5, 20),
        SPLIT,
        ("--rate", "16", "--arrivals", "poisson", "--input-tokens", "32..128", "--output-tokens", "4"),
        {"first token, ms": {"median": first_token(50), "p90": first_token(90)}},
    ),
    Experiment(
        "scheduler.local_chunk_tokens",
        (64, 128, 256, 512),
        COLOCATED,
        ("--rate", "3", "--arrivals", "poisson", "--input-tokens", "128*9,1500*1", "--output-tokens", "64"),
        LATENCY,
    ),
    Experiment(
        "scheduler.max_num_seqs",
        (8, 16, 32, 64),
        COLOCATED,
        ("--concurrency", "64", "--input-tokens", "128", "--output-tokens", "64"),
        {
            "tokens/s": {"all streams": throughput},
            "first token, ms": {"median": first_token(50)},
            "between tokens, ms": {"median": gap(50)},
        },
    ),
)


def measure(experiment: Experiment, value: float, seconds: float, model: str, seed: int) -> BenchResult:
    """One run of the load, on a cluster of its own."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running(
            *experiment.workers, "--model", model, settings={experiment.setting: f"{value:g}"}, ready_s=300
        ) as cluster,
    ):
        path = Path(folder) / "result.json"
        options = ("--target", cluster.address, "--duration", f"{seconds:g}s", "--warmup", str(WARM_UP))
        command = [*PAGEFERRY, "bench", *options, *experiment.load, "--seed", str(seed), "--json", str(path), "--quiet"]
        subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
        return BenchResult.from_json(path.read_text(encoding="utf-8"), str(path))


def run(experiment: Experiment, num_rounds: int, seconds: float, model: str) -> dict[float, Figures]:
    """The figures of each value, medians over the rounds."""
    seen: dict[float, list[Figures]] = {value: [] for value in experiment.values}
    for number in range(num_rounds):
        for value in experiment.values:
            result = measure(experiment, value, seconds, model, seed=number)
            seen[value].append(
                {
                    f"{unit}: {name}": figure(result)
                    for unit, group in experiment.figures.items()
                    for name, figure in group.items()
                }
            )
            shown = ", ".join(f"{name} {figure:.1f}" for name, figure in seen[value][-1].items())
            print(f"{experiment.name} {value:g}, round {number + 1}: {shown}", file=sys.stderr, flush=True)
    return {
        value: {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        for value, rounds in seen.items()
    }


def table(experiment: Experiment, medians: Mapping[float, Figures]) -> str:
    names = list(next(iter(medians.values())))
    rows = [[f"`{experiment.name}`", *names], ["---", *("---:" for _ in names)]]
    rows += [[f"{value:g}", *(f"{figures[name]:.1f}" for name in names)] for value, figures in medians.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def plot(experiment: Experiment, medians: Mapping[float, Figures]) -> str:
    panels = [
        Panel(
            unit,
            [
                Series.of(name, [(value, figures[f"{unit}: {name}"]) for value, figures in medians.items()])
                for name in group
            ],
        )
        for unit, group in experiment.figures.items()
    ]
    alt = f"{', '.join(experiment.figures)} over {experiment.setting}"
    log = min(experiment.values) > 0
    return standalone(lines(Frame(experiment.name, alt, experiment.setting, log_x=log), *panels))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[one.name for one in EXPERIMENTS], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, help="folder for the plots")
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    options = parser.parse_args()
    document = {}
    for experiment in EXPERIMENTS:
        if options.only and experiment.name not in options.only:
            continue
        medians = run(experiment, options.rounds, options.seconds, options.model)
        print(f"\n{' '.join((*experiment.workers, *experiment.load))}\n\n{table(experiment, medians)}\n", flush=True)
        document[experiment.setting] = {f"{value:g}": figures for value, figures in medians.items()}
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{experiment.name}.svg").write_text(plot(experiment, medians), encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
