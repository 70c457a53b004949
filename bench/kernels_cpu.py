"""The compiled CPU kernels against torch, and against what the machine can read.

    python bench/kernels_cpu.py [--model smollm2] [--threads 0] [--rounds 15] [--hog] [--json FILE]

Whatever is compared runs in turns (A B A B) in one process, and medians are taken: foreign load then meets both.
Attention is one layer over pages, 32 sequences of 1,024 tokens, against torch's fp32 attention over contiguous memory.
Matmuls are those of one step, without the head where there are many rows: at batch 1 against reading as many bytes,
above it against the same kernel on a matrix that stays in the cache. Steps are whole forward passes; what neither
matmuls nor attention take of one is the rest. Attention is timed on one layer, whose pages may stay in a cache.
--hog measures only decode at batch 1, alone and beside a process that keeps a core busy.
"""

import argparse
import contextlib
import functools
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from compiled import kernels, sequences, unturned
from engines import load, runner_of, sequence
from page_pools import layout

from pageferry.core.cores import num_cores
from pageferry.core.formats import PageFormat
from pageferry.core.model_files import load_config_of, resolve_model
from pageferry.core.plan import Chunk, Plan
from pageferry.engine.gguf_tensors import GgufTensors
from pageferry.engine.load import Engine
from pageferry.engine.pages import PageTensors
from pageferry.engine.quantised_weights import load_quantised_weights
from pageferry.kernels.append_pages import rotate_append
from pageferry.kernels.cpu_library import Isa, available_isas
from pageferry.kernels.paged_attention import compiled_attention
from pageferry.kernels.quantised_linear import PackedMatrix, quantised_linear

BATCH, CONTEXT, HEADS, KV_HEADS, DIM, PAGE_SIZE = 32, 1024, 9, 3, 64, 16
NUM_LAYERS = 30
OTHERS = ("fp32", "bf16", "fp16", "fp8_e4m3", "int8:asym", "int4", "int4:asym", "int8:channel", "int4:channel:asym")
Times = dict[str, float]


def in_turns(parts: dict[str, Callable[[], object]], rounds: int) -> Times:
    """Median milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(rounds + 2):
        for name, run in parts.items():
            start = time.perf_counter()
            run()
            if turn >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def attention(isa: Isa, threads: int, rounds: int, page_format: str = "int8") -> Times:
    loaded, num_pages = kernels(isa, threads), CONTEXT // PAGE_SIZE
    of = layout(PageFormat.parse(page_format), heads=KV_HEADS, dim=DIM)
    pages = PageTensors(of, [BATCH * num_pages], BATCH)
    order = torch.randperm(BATCH * num_pages, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [order[i * num_pages : (i + 1) * num_pages] for i in range(BATCH)]
    for table in tables:
        rows = torch.randn(CONTEXT, HEADS + 2 * KV_HEADS, DIM)
        rotate_append(loaded, rows, unturned(CONTEXT, DIM), pages.layers[0], sequences([(0, CONTEXT)], [table]))
    batch = sequences([(CONTEXT - 1, 1)] * BATCH, tables)
    query = torch.randn(BATCH, HEADS + 2 * KV_HEADS, DIM)[:, :HEADS]
    # Query heads folded into rows: torch's fastest form.
    folded = query.reshape(BATCH, KV_HEADS, HEADS // KV_HEADS, DIM)
    keys, values = torch.randn(2, BATCH, KV_HEADS, CONTEXT, DIM)
    return in_turns(
        {
            "torch fp32, contiguous": lambda: functional.scaled_dot_product_attention(folded, keys, values),
            "pages": lambda: compiled_attention(loaded, query, pages.layers[0], batch, DIM**-0.5),
        },
        rounds,
    )


def load_matrices(model: str) -> tuple[list[PackedMatrix], PackedMatrix]:
    """Those of all layers, and the head."""
    files = resolve_model(model)
    config = load_config_of(files)
    tensors = GgufTensors(files.path, config)
    weights = load_quantised_weights(config, tensors, progress=lambda _: None)
    tensors.close()
    layers = [part for w in weights.layers for part in (*w.qkv, *w.output, *w.gate_up, *w.down)]
    return layers, weights.head


def decode_matmuls(matrices: list[PackedMatrix], isa: Isa, threads: int, rounds: int) -> tuple[Times, float]:
    """Milliseconds, and megabytes of weights."""
    inputs = {m.columns: torch.randn(1, m.columns) for m in matrices}
    loaded = kernels(isa, threads)
    num_bytes = sum(m.num_bytes for m in matrices)
    # Larger than any cache, read by as many threads as multiply.
    memory = torch.ones(max(num_bytes, 2**28) // 8, dtype=torch.int64)
    times = in_turns(
        {
            "read": lambda: memory.sum(),
            "matmuls": lambda: [quantised_linear(loaded, inputs[m.columns], m) for m in matrices],
        },
        rounds,
    )
    times["read"] *= num_bytes / (memory.numel() * 8)
    return times, num_bytes / 1e6


def many_rows(layers: list[PackedMatrix], num_rows: int, isa: Isa, threads: int, rounds: int) -> dict[str, float]:
    """Milliseconds of all layers' matmuls, and 10^9 operations a second: theirs, and those of one matrix alone."""
    inputs = {m.columns: torch.randn(num_rows, m.columns) for m in layers}
    loaded, smallest = kernels(isa, threads), min(layers, key=lambda m: m.num_bytes)
    repeats = 20
    times = in_turns(
        {
            "layers": lambda: [quantised_linear(loaded, inputs[m.columns], m) for m in layers],
            "one": lambda: [quantised_linear(loaded, inputs[smallest.columns], smallest) for _ in range(repeats)],
        },
        rounds,
    )
    products = {"layers": sum(m.rows * m.columns for m in layers), "one": repeats * smallest.rows * smallest.columns}
    rates = {name: 2e-6 * num_rows * products[name] / ms for name, ms in times.items()}
    return {"ms": times["layers"], "rate": rates["layers"], "in_cache": rates["one"]}


def layer_attention(chunks: tuple[Chunk, ...], isa: Isa, threads: int, rounds: int) -> float:
    """Milliseconds of one layer's attention of a step's rows, over int8 pages."""
    of = layout(PageFormat.parse("int8"), heads=KV_HEADS, dim=DIM)
    tables = [[int(page) for page in chunk.sequence.tables[0]] for chunk in chunks]
    pages = PageTensors(of, [1 + max(page for table in tables for page in table)], len(chunks))
    batch = sequences([(chunk.start, chunk.num_tokens) for chunk in chunks], tables)
    rows = sum(chunk.num_tokens for chunk in chunks)
    query, loaded = torch.randn(rows, HEADS + 2 * KV_HEADS, DIM)[:, :HEADS], kernels(isa, threads)
    return in_turns({"": lambda: compiled_attention(loaded, query, pages.layers[0], batch, DIM**-0.5)}, rounds)[""]


@contextlib.contextmanager
def busy_process() -> Iterator[Callable[[Callable[[], object]], Callable[[], object]]]:
    """Gives what makes a function run beside a process that never rests, which is stopped otherwise."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    process.send_signal(signal.SIGSTOP)

    def beside(run: Callable[[], object]) -> None:
        process.send_signal(signal.SIGCONT)
        run()
        process.send_signal(signal.SIGSTOP)

    try:
        yield lambda run: functools.partial(beside, run)
    finally:
        process.kill()
        process.wait()


def report_hog(model: str, threads: int, rounds: int) -> Times:
    """Prints and gives milliseconds a token; a turn is of tokens enough for a scheduler's time slices to even out."""
    tokens_a_turn = 50
    runner = runner_of(load(model, "int8", compute_dtype="auto", num_pages=64, threads=threads))
    plan = Plan(decode_chunks(1, 512))

    def run() -> None:
        for _ in range(tokens_a_turn):
            runner.run(plan)

    with busy_process() as beside:
        times = in_turns({"alone": run, "beside a busy process": beside(run)}, rounds)
    times = {name: ms / tokens_a_turn for name, ms in times.items()}
    print("decode, batch 1, context 512:", ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items()))
    return times


def step_times(engines: dict[str, Engine], chunks: tuple[Chunk, ...], rounds: int) -> Times:
    """Milliseconds of each engine for the same step."""
    parts = {how: functools.partial(runner_of(engine).run, Plan(chunks)) for how, engine in engines.items()}
    return in_turns(parts, rounds)


def decode_chunks(batch: int, context: int) -> tuple[Chunk, ...]:
    num_pages = -(-context // PAGE_SIZE)
    targets = [sequence([5] * context, i * num_pages, num_pages) for i in range(batch)]
    return tuple(Chunk(target, context - 1, 1, samples=True) for target in targets)


def prefill_chunk(num_tokens: int) -> tuple[Chunk, ...]:
    ids = np.random.default_rng(0).integers(10, 1000, num_tokens).tolist()
    return (Chunk(sequence(ids, 0, -(-num_tokens // PAGE_SIZE)), 0, num_tokens, samples=True),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file of Q4_0, Q4_1 and Q8_0")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--hog", action="store_true", help="what a process that keeps a core busy costs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    threads = options.threads or num_cores()
    torch.set_num_threads(threads)
    isas = available_isas()
    if not isas:
        sys.exit("the library is not built: install the package where there is a C++ compiler")
    report: dict[str, object] = {"threads": threads, "isa": isas[-1].name}
    if options.hog:
        report["hog"] = report_hog(options.model, threads, options.rounds)
    else:
        report |= report_kernels(options.model, isas, threads, options.rounds)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def report_kernels(model: str, isas: tuple[Isa, ...], threads: int, rounds: int) -> dict[str, object]:
    """Prints as it measures, and gives what it has."""
    report: dict[str, object] = {}
    for isa, page_format in [*((isa, "int8") for isa in isas[::-1]), *((isas[-1], other) for other in OTHERS)]:
        times = attention(isa, threads, rounds, page_format)
        share = times["pages"] / times["torch fp32, contiguous"]
        parts = (f"{name} {ms:.2f} ms," for name, ms in times.items())
        print(f"attention {isa.name:9} {page_format:18}", *parts, f"{share:.2f} of it")
        report[f"attention {isa.name} {page_format}"] = times
    layers, head = load_matrices(model)
    times, megabytes = decode_matmuls([*layers, head], isas[-1], threads, rounds)
    rate = {name: megabytes / ms for name, ms in times.items()}
    print(f"decode matmuls, batch 1: {times['matmuls']:.2f} ms, {rate['matmuls']:.1f} GB/s of {rate['read']:.1f} read")
    report["decode matmuls"] = times | {"megabytes": megabytes}
    return report | report_steps(model, layers, isas[-1], threads, rounds)


def report_steps(model: str, layers: list[PackedMatrix], isa: Isa, threads: int, rounds: int) -> dict[str, object]:
    """Whole forward passes, and what their parts take by themselves."""
    report: dict[str, object] = {}
    rounds = max(3, rounds // 3)
    settings = {"num_pages": 32 * CONTEXT // PAGE_SIZE, "threads": threads}
    engines = {
        "compiled": load(model, "int8", compute_dtype="auto", **settings),
        "torch": load(model, "int8", compute_dtype="auto", kernels="torch", **settings),
    }
    kinds = {f"decode, batch {batch}, context 512": decode_chunks(batch, 512) for batch in (1, 8, 32)}
    kinds |= {f"prefill of {tokens}": prefill_chunk(tokens) for tokens in (256, 512, 1024)}
    for name, chunks in kinds.items():
        result = step_times(engines, chunks, rounds)
        tokens = sum(chunk.num_tokens for chunk in chunks)
        rates = (f"{how} {ms:.1f} ms {tokens / ms * 1e3:.0f} tokens/s" for how, ms in result.items())
        print(f"{name}:", ", ".join(rates))
        report[name] = result
        if tokens == 1:
            continue
        matmuls = many_rows(layers, tokens, isa, threads, rounds)
        attended = NUM_LAYERS * layer_attention(chunks, isa, threads, rounds)
        rest = result["compiled"] - matmuls["ms"] - attended
        share = matmuls["rate"] / matmuls["in_cache"]
        print(f"  matmuls {matmuls['ms']:.1f} ms, {matmuls['rate']:.0f} GOP/s, {share:.0%} of them in cache;", end=" ")
        print(f"attention {attended:.1f} ms; rest {rest:.1f} ms")
        report[f"{name}: parts"] = matmuls | {"attention_ms": attended}
    return report


if __name__ == "__main__":
    main()
