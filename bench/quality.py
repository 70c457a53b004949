"""What page formats and selective caching do to a model's predictions, attention and answers, beside bf16 pages.

    python bench/quality.py [--formats int8 int4:asym ...] [--cache-layers "0-14=window:256,sinks:4;15-29=full" ...]
                            [--contexts 512 2048] [--kernels torch] [--quick] [--json FILE]

English is Python's own reference, code is a class of its library. A text is read in windows of each context, and every
token predicted: change of negative log-likelihood (nats a token), mean KL divergence, and share of tokens with the same
likeliest successor. Attention drifts: for queries computed over bf16 pages, the share of attention that the stored keys
send elsewhere. Outputs are greedy: four long ones, whose 4-grams are searched for repetition, and 20 answers whose form
is checked. All formats are computed the same way; add fp32 to see what rounding alone does.
"""

import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import quality_text
from quality_measures import (
    Outputs,
    Scores,
    attention,
    bytes_per_token,
    compare,
    drift,
    log_probabilities,
    outputs,
    pool_tokens,
    queries,
    spread,
)

from pageferry.core.config import EngineConfig, SchedulerConfig
from pageferry.core.model_files import resolve_model
from pageferry.engine.load import Engine, load_engine
from pageferry.text.tokenizer import load_tokenizer

FORMATS = [
    *("fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int8:asym", "int8:channel", "k=int8:channel,v=int8"),
    *("k=int8,v=int4:asym", "k=int8:channel,v=int4:token", "int4", "int4:asym", "int4:channel", "int4:channel:asym"),
    "k=int4:channel:asym,v=int4:asym",
]
CACHE_LAYERS = ["0-14=window:256,sinks:4;15-29=full", "0-14=full;15-29=window:256,sinks:4"]
_PAGE_SIZE = 16
_COMPUTES = "computes in "


@dataclass
class Subject:
    """A format, or a format with selective caching, and what was found."""

    page_format: str
    cache_layers: str = ""
    bytes_per_token: dict[int, float] = field(default_factory=dict)  # by context
    scores: dict[str, dict[int, Scores]] = field(default_factory=dict)  # by text and context
    drift: dict[str, list[float]] = field(default_factory=dict)  # by text, of each layer
    outputs: Outputs | None = None

    @property
    def name(self) -> str:
        return f"{self.page_format} {self.cache_layers}".strip()


class Engines:
    """Loads them: those whose predictions are compared, and those that write.

    Each kind computes the same way whatever the format, or ValueError says how it can. Writing is computed as
    `pageferry up` computes, which is fast; it would hide in the predictions what fine formats do.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.ways: dict[str, str] = {}  # by kind

    def predicting(self, subject: Subject) -> Engine:
        return self._load("predictions", subject, self._options.kernels, self._options.compute_dtype)

    def writing(self, subject: Subject) -> Engine:
        return self._load("outputs", subject, self._options.kernels, "auto")

    def asking(self, subject: Subject) -> Engine:
        return self._load("queries", subject, "torch", "fp32")

    def _load(self, kind: str, subject: Subject, kernels: str, compute_dtype: str) -> Engine:
        options, lines = self._options, list[str]()
        config = EngineConfig(
            model=options.model,
            page_format=subject.page_format,
            page_size=_PAGE_SIZE,
            num_pages=-(-pool_tokens(options.contexts, options.lengths) // _PAGE_SIZE),
            threads=options.threads,
            kernels=kernels,
            compute_dtype=compute_dtype,
            cache_layers=subject.cache_layers,
        )
        engine = load_engine(config, SchedulerConfig(max_num_seqs=64), progress=lines.append)
        (line,) = (line for line in lines if _COMPUTES in line)
        way = line.split(_COMPUTES)[1].split(",")[0]
        if way != self.ways.setdefault(kind, way):
            others = f"the other formats' {kind} in {self.ways[kind]}"
            raise ValueError(f"{subject.name} is computed in {way}, {others}: ask for --kernels torch")
        return engine


def run(options: argparse.Namespace, subjects: list[Subject], engines: Engines) -> None:
    tokenizer = load_tokenizer(resolve_model(options.model))
    reference = Subject("bf16")
    for name, text in quality_text.texts().items():
        ids = quality_text.token_ids(tokenizer, text, options.tokens + 1)
        longest = max(options.contexts)
        asked = queries(engines.asking(reference), ids[-longest - 1 : -1])
        for context in options.contexts:
            engine = engines.predicting(reference)
            exact = [logs for logs, _ in log_probabilities(engine, ids, context)]
            looks = attention(engine, asked, longest) if context == longest else []
            for subject in subjects:
                report(f"{name}, context {context}: {subject.name}")
                engine = engines.predicting(subject)
                subject.bytes_per_token[context] = bytes_per_token(engine, context)
                found = log_probabilities(engine, ids, context)
                subject.scores.setdefault(name, {})[context] = compare(exact, found)
                if looks:
                    subject.drift[name] = drift(looks, attention(engine, asked, longest))
    for subject in subjects:
        report(f"outputs: {subject.name}")
        subject.outputs = outputs(engines.writing(subject), tokenizer, options.lengths)


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def tables(subjects: list[Subject], lengths: list[int]) -> Iterator[str]:
    """Markdown."""
    reference = next(subject for subject in subjects if subject.name == "bf16")
    for text, by_context in reference.scores.items():
        losses = ", ".join(f"{scores.nll:.4f} at {context:,}" for context, scores in by_context.items())
        yield f"\n{text}; NLL with bf16 pages {losses}\n"
        columns = [f"NLL at {context:,} | KL | top-1" for context in by_context]
        yield f"| Format | bytes a token | {' | '.join(columns)} |"
        yield "|---|---:|" + "---:|" * 3 * len(columns)
        for subject in subjects:
            cells = [_cells(scores) for scores in subject.scores[text].values()]
            yield f"| `{subject.name}` | {list(subject.bytes_per_token.values())[-1]:,.0f} | {' | '.join(cells)} |"
    yield "\nAttention that goes elsewhere (least, median and most of the layers); greedy outputs\n"
    columns = [f"drift, {text}" for text in reference.drift]
    columns += [f"4-grams repeated in {length:,}" for length in lengths]
    yield f"| Format | {' | '.join(columns)} | forms kept |"
    yield "|---|" + "---:|" * (len(columns) + 1)
    for subject in subjects:
        found = subject.outputs
        assert found is not None
        cells = [spread(layers) for layers in subject.drift.values()]
        cells += [f"{found.repeated[length]:.1%}" for length in lengths]
        yield f"| `{subject.name}` | {' | '.join(cells)} | {found.kept_forms:.0%} |"


def _cells(scores: Scores) -> str:
    change = f"{scores.nll_change:+.4f}".replace("-", "−")
    return f"{change} ± {scores.nll_error:.4f} | {scores.kl:.5f} | {scores.top1:.1%}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="one that answers chats and follows two examples")
    parser.add_argument("--formats", nargs="*", default=FORMATS, help="bf16 is always among them")
    parser.add_argument("--cache-layers", nargs="*", default=CACHE_LAYERS, help="each with pages of --cache-format")
    parser.add_argument("--cache-format", default="int8")
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048])
    parser.add_argument("--tokens", type=int, default=4096, help="of each text; a multiple of each context")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1000, 2000], help="of the long outputs")
    parser.add_argument("--kernels", choices=("auto", "cpu", "torch"), default="auto")
    parser.add_argument("--compute-dtype", choices=("auto", "fp32", "bf16"), default="fp32", help="of predictions")
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--quick", action="store_true", help="512 tokens of each text, outputs of 100")
    parser.add_argument("--json", type=Path, help="write all that was found to this file, each layer's drift too")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.contexts, options.lengths = 512, [512], [100]
    if any(options.tokens % context or context % _PAGE_SIZE for context in options.contexts):
        parser.error(f"--contexts must be multiples of {_PAGE_SIZE} and divide --tokens")
    return options


def main() -> int:
    options, start = parsed(), time.perf_counter()
    names = ["bf16", *(name for name in options.formats if name != "bf16")]
    subjects = [Subject(name) for name in names]
    subjects += [Subject(options.cache_format, layers) for layers in options.cache_layers]
    engines = Engines(options)
    run(options, subjects, engines)
    print("$", shlex.join(["python", "bench/quality.py", *sys.argv[1:]]))
    print(f"{options.tokens:,} tokens of each text of Python {platform.python_version()}")
    print("; ".join(f"{kind} computed in {way}" for kind, way in engines.ways.items()))
    print(*tables(subjects, options.lengths), sep="\n")
    print(f"\ntook {time.perf_counter() - start:.0f} s")
    if options.json:
        document = {
            "ways": engines.ways,
            "subjects": [asdict(subject) | {"name": subject.name} for subject in subjects],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
