"""Tokens per second with and without drafts, on a model's own text: copying, and free text.

    python bench/speculation.py --model smollm2 --sources lookup,layers:6 --batches 1,8,32

Runs alternate between off and on, so that what else the machine does falls on both; of each, the median is taken.
`copy` asks for a text to be rewritten that was so once
before, which a small model can do; `free` for a story. Answers are greedy and equal with and without drafts.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from decoding import Decoding, requested
from engines import load

from pageferry.core.config import SchedulerConfig
from pageferry.core.model_files import resolve_model
from pageferry.core.sampling import SamplingParams
from pageferry.core.sequence import Sequence
from pageferry.core.step_costs import StepCosts
from pageferry.engine.load import Engine
from pageferry.text.tokenizer import load_tokenizer

TEXT = """The ferry leaves the northern quay at six in the morning and calls at four islands before noon. On the first,
a lighthouse keeper takes the mail and two crates of oranges. On the second, a school of eleven children waits for
chalk, paper and a new bell. The third island has no pier: a rowing boat comes out, and the captain counts the sacks
of flour aloud while the mate ties a rope. The fourth is the largest. There the ferry stays for an hour, the engineer
buys bread, and passengers walk up to the chapel, from whose steps the whole strait can be seen on a clear day. In
the afternoon the ferry returns the same way, lighter by thirty tonnes, with wool, honey and letters for the city."""
TOPICS = ("a fox in winter", "the first ship to Mars", "a baker's daughter", "an old clock", "two rivers", "a library")


Message = dict[str, str]


def said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def conversations(kind: str, count: int) -> list[list[Message]]:
    if kind == "free":
        return [[said("user", f"Write a long story about {TOPICS[i % len(TOPICS)]}, part {i}.")] for i in range(count)]
    texts = [TEXT.split(" ", 9 * i % 20)[-1] for i in range(count)]
    asked = [said("user", f"Rewrite this text:\n\n{text}") for text in texts]
    return [[question, said("assistant", text), question] for question, text in zip(asked, texts, strict=True)]


@dataclass(frozen=True)
class Run:
    tokens_per_s: float
    tokens_per_cpu_s: float  # of all threads: what else the machine does shows less
    outputs: list[list[int]]
    proposed: int
    accepted: int
    steps: int


@dataclass(frozen=True)
class Bench:
    options: argparse.Namespace
    engine: Engine

    def sequences(self, kind: str, batch: int) -> list[Sequence]:
        tokenizer = load_tokenizer(resolve_model(self.options.model))
        made = []
        for number, messages in enumerate(conversations(kind, batch)):
            ids = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special=False)
            sampling = SamplingParams(temperature=self.options.temperature, seed=number)
            made.append(requested(ids, self.options.tokens, sampling, number=number))
        return made

    def run(self, kind: str, batch: int, source: str) -> Run:
        """From when all prompts are computed; no answer ends before it has all of its tokens."""
        sequences = self.sequences(kind, batch)
        limits = SchedulerConfig(max_num_seqs=batch)
        decoding = Decoding(self.engine, source, self.options.drafts, limits, costs=StepCosts())
        decoding.add(sequences)
        while decoding.scheduler.num_waiting or decoding.scheduler.queued_prompt_tokens or not decoding.step_count:
            decoding.step()
        before, steps = sum(one.num_output for one in sequences), decoding.step_count
        started, started_cpu = time.perf_counter(), time.process_time()
        while decoding.step() is not None:
            pass
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
        outputs = [one.output_ids for one in sequences]
        num_tokens = sum(map(len, outputs)) - before
        return Run(
            num_tokens / seconds,
            num_tokens / cpu_s,
            outputs,
            sum(one.num_drafted for one in sequences),
            sum(one.num_accepted for one in sequences),
            decoding.step_count - steps,
        )

    def compare(self, kind: str, batch: int, source: str) -> str:
        runs: dict[str, list[Run]] = {"off": [], source: []}
        for _ in range(self.options.rounds):
            for name, of_name in runs.items():
                of_name.append(self.run(kind, batch, name))
        off, on = (statistics.median(run.tokens_per_s for run in of_name) for of_name in runs.values())
        off_cpu, on_cpu = (statistics.median(run.tokens_per_cpu_s for run in of_name) for of_name in runs.values())
        last = runs[source][-1]
        is_same = "equal" if all(run.outputs == runs["off"][0].outputs for run in runs[source]) else "DIFFERENT"
        ratios = sorted(b.tokens_per_s / a.tokens_per_s for a, b in zip(runs["off"], runs[source], strict=True))
        return (
            f"{kind:5} batch {batch:2} {source:12} off {off:7.1f} on {on:7.1f} tokens/s = {on / off:.2f} x "
            f"(pairs {ratios[0]:.2f} to {ratios[-1]:.2f}; by processor time {on_cpu / off_cpu:.2f} x), "
            f"{last.proposed} proposed, {last.accepted} accepted, {last.steps} steps, {is_same}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pages", default="int8")
    parser.add_argument("--sources", default="lookup")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--kinds", default="copy,free")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    for source in options.sources.split(","):
        engine = load(
            options.model,
            options.pages,
            num_pages=1000,
            compute_dtype="auto",
            threads=options.threads,
            speculation=source,
        )
        bench = Bench(options, engine)
        for kind in options.kinds.split(","):
            for batch in map(int, options.batches.split(",")):
                print(bench.compare(kind, batch, source), flush=True)


if __name__ == "__main__":
    main()
