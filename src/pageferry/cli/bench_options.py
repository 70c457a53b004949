"""The options of `pageferry bench`, and the load that they describe."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageferry.cli.arguments import API_KEY_VARIABLE, DEFAULT_ADDRESS, add_files

if TYPE_CHECKING:  # loaded only for this command
    from pageferry.loadgen.load import Load

_LENGTHS = "N, LOW..HIGH, normal:MEAN,DEVIATION, lognormal:MEDIAN,SIGMA, or N*WEIGHT,N*WEIGHT"
_AS_THEY_ARE = (  # those that need no parsing
    "requests",
    "warmup",
    "concurrency",
    "rate",
    "arrivals",
    "max_concurrency",
    "replay",
    "speed",
    "prefix_tokens",
    "prefixes",
    "temperature",
    "goodput_share",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    _add_load(parser)
    _add_limits(parser)
    _add_output(parser)


def load_of(arguments: argparse.Namespace, new_seed: int) -> "Load":
    """Raises InvalidArgumentError naming the option."""
    from pageferry.loadgen.lengths import parse_lengths
    from pageferry.loadgen.load import Load, parse_duration, parse_rate_range, parse_slo

    values = {name: getattr(arguments, name) for name in _AS_THEY_ARE}
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    for name in ("duration", "timeout"):
        if getattr(arguments, name) is not None:
            given[f"{name}_s"] = parse_duration(f"--{name}", getattr(arguments, name))
    if arguments.slo is not None:
        given["slo"] = parse_slo(arguments.slo)
    if arguments.rate_range is not None:
        given["rate_range"] = parse_rate_range(arguments.rate_range)
    return Load(
        input_tokens=parse_lengths("--input-tokens", arguments.input_tokens),
        output_tokens=parse_lengths("--output-tokens", arguments.output_tokens),
        seed=new_seed if arguments.seed is None else arguments.seed,
        find_goodput=arguments.find_goodput,
        **given,
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("target")
    where = group.add_mutually_exclusive_group()
    text = f"a Pageferry router's gRPC, or several with commas between them; default {DEFAULT_ADDRESS}"
    where.add_argument("--target", metavar="HOST:PORT", help=text)
    where.add_argument("--url", metavar="URL", help="an OpenAI-compatible server, such as http://127.0.0.1:8080/v1")
    group.add_argument("--endpoint", choices=("completions", "chat"), default="completions", help="default completions")
    group.add_argument("--model", default="", metavar="NAME", help="default: the first that the server names")
    text = f"sent as Authorization: Bearer KEY; default, for --target only: {API_KEY_VARIABLE} of the environment"
    group.add_argument("--api-key", default="", metavar="KEY", help=text)
    add_files(group)
    group.add_argument(
        "--new-connections", action="store_true", help="with --url: one a request, where the server drops kept ones"
    )
    group.add_argument("--extra-body", metavar="JSON", help="with --url: an object of fields to add to every request")
    text = "of the model that is served: a directory or .gguf file; makes prompts of exact lengths; default smollm2"
    group.add_argument("--tokenizer", default="smollm2", metavar="PATH|smollm2", help=text)


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--requests", type=int, metavar="N", help="default 64, unless --duration or --replay is given")
    group.add_argument("--duration", metavar="TIME", help="send no more after this, such as 30s or 2m")
    group.add_argument("--warmup", type=int, metavar="N", help="requests before, which do not count; default 1")
    group.add_argument("--concurrency", type=int, metavar="N", help="closed loop: N in flight; the default, with 1")
    group.add_argument("--rate", type=float, metavar="R", help="open loop: R requests a second, whatever is in flight")
    group.add_argument("--arrivals", choices=("poisson", "constant"), help="of the open loop; default poisson")
    group.add_argument("--max-concurrency", type=int, metavar="N", help="of --rate and --replay: the rest is sent late")
    text = "send what a recorded trace has, when it has it"
    group.add_argument("--replay", type=Path, metavar="FILE.jsonl", help=text)
    group.add_argument("--speed", type=float, metavar="X", help="of --replay; 2 is twice as fast")
    group.add_argument("--input-tokens", default="128", metavar="D", help=f"default 128; {_LENGTHS}")
    group.add_argument("--output-tokens", default="128", metavar="D", help="default 128; as for --input-tokens")
    text = "first tokens of the prompts that are the same in all, or in those of the same of K prefixes; default 0"
    group.add_argument("--prefix-tokens", type=int, metavar="N", help=text)
    group.add_argument("--prefixes", type=int, metavar="K", help="prefixes that differ, used in turn; default 1")
    group.add_argument("--temperature", type=float, metavar="T", help="default 0, greedy")
    group.add_argument("--seed", type=int, metavar="S", help="of prompts, lengths and arrivals; default: a new one")
    group.add_argument("--timeout", metavar="TIME", help="a request fails after this; default 120s")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("goodput")
    group.add_argument("--slo", metavar="LIMITS", help="ttft=500ms,itl=50ms,e2e=10s or some: count requests within")
    group.add_argument("--find-goodput", action="store_true", help="find the highest rate that keeps --slo")
    group.add_argument("--goodput-share", type=float, metavar="SHARE", help="of requests that must; default 0.99")
    group.add_argument("--rate-range", metavar="LOW..HIGH", help="requests a second to search; default 0.5..64")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    text = "of the server: count its CPU, and that of the processes it has started; may be repeated"
    group.add_argument("--pid", type=int, action="append", default=[], metavar="PID", help=text)
    group.add_argument("--label", default="", metavar="TEXT", help="names the run in files and comparisons")
    group.add_argument("--json", type=Path, metavar="FILE", help="write every request and sample")
    group.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")
    group.add_argument("--quiet", action="store_true", help="show no progress")
