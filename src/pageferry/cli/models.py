"""`pageferry models`: what is understood of a model before it is served, and how much memory it needs."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pageferry.cli.model_report import Asked, ModelReport, inspect
from pageferry.core.available import available_bytes
from pageferry.core.errors import PageferryError, invalid
from pageferry.core.model_files import packaged_models, resolve_model

_MB = 10**6
_WAYS = {
    "in_groups": "by the compiled kernels, in the file's own groups",
    "partly_in_groups": "by the compiled kernels, in the file's own groups, and what they can't hold by torch",
    "bf16": "in bf16 by torch",
    "fp32": "in fp32 by torch",
}


def add_command(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    text = "say what is understood of a model, and how much memory it needs; 1 where it can't be served"
    one = commands.add_parser("inspect", help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
    one.add_argument("model", metavar="DIR|FILE.gguf|NAME")
    one.add_argument("--memory-mb", type=int, metavar="MB", help="that a worker may take; default: what is there now")
    one.add_argument("--max-model-tokens", type=int, default=0, metavar="N", help="of prompt and answer together")
    one.add_argument("--chat-template", type=Path, metavar="FILE", help="as `up` takes it")
    one.add_argument("--json", action="store_true", help="print one object")
    one.set_defaults(run=run_inspect)
    text = "list the models that come as Python packages"
    commands.add_parser("list", help=text, description=f"{text[0].upper()}{text[1:]}.").set_defaults(run=run_list)


def run_list(_: argparse.Namespace) -> int:
    for name, package in packaged_models().items():
        try:
            print(f"{name}  {resolve_model(name).path}")
        except PageferryError:
            print(f"{name}  not there: install the package {package}")
    return 0


def run_inspect(arguments: argparse.Namespace) -> int:
    if arguments.memory_mb is not None and arguments.memory_mb < 1:
        raise invalid("--memory-mb", arguments.memory_mb, "must be at least 1")
    room = available_bytes() if arguments.memory_mb is None else arguments.memory_mb * _MB
    report = inspect(resolve_model(arguments.model), Asked(arguments.max_model_tokens, room, arguments.chat_template))
    if arguments.json:
        print(json.dumps(asdict(report), ensure_ascii=False, indent=2))
    else:
        print("\n".join(lines(report)))
    return 1 if report.problems else 0


def lines(report: ModelReport) -> list[str]:
    """The report for people; a part that could not be told has no line."""
    parts = {
        "model": _model(report.model) if report.model else [],
        "weights": _weights(report.weights) if report.weights else [],
        "tokenizer": _tokenizer(report.tokenizer) if report.tokenizer else [],
        "chats": _chat(report.chat) if report.chat else [],
        "sampling": [
            ", ".join(f"{name} {value}" for name, value in report.sampling.items()) or "no defaults of its own"
        ],
        "memory": _memory(report.memory) if report.memory else [],
        "problems": report.problems,
    }
    found = [f"{report.name}: {report.path}"]
    for name, texts in parts.items():
        found += [f"{name if index == 0 else '':<11}{text}" for index, text in enumerate(texts)]
    return found


def _model(model: dict[str, Any]) -> Iterator[str]:
    parameters = model["num_parameters"] / _MB
    yield f"{model['architecture']}, {parameters:,.1f} M parameters, {model['num_layers']} layers of {_heads(model)}"
    window = model["sliding_window"]
    yield f"attention over {'all tokens' if window is None else f'the last {window} tokens'}, {_rope(model)}"
    served, most = model["served_tokens"], model["most_tokens"]
    yield f"texts of up to {served} tokens" + (f", of {most} with max_model_tokens" if most > served else "")


def _heads(model: dict[str, Any]) -> str:
    return f"{model['num_heads']} query and {model['num_kv_heads']} KV heads of {model['head_dim']}"


def _rope(model: dict[str, Any]) -> str:
    scaling = model["rope_scaling"]
    if scaling is None:
        return f"rotary base {model['rope_theta']:g}, not scaled"
    return f"rotary base {model['rope_theta']:g}, {scaling['type']} scaling by {scaling['factor']:g}"


def _weights(weights: dict[str, Any]) -> Iterator[str]:
    for row in weights["stored"]:
        yield f"{row['tensors']:<13}{row['type']:<8}{row['count']:>5} tensors {_mb(row['bytes']):>10}"
    computed = weights["computed"]
    sizes = {way: weights[f"{way}_bytes"] for way in _WAYS}
    others = [f"{_WAYS[way]} {_mb(size)}" for way, size in sizes.items() if size and way != computed]
    yield f"computed here {_WAYS[computed]}: {_mb(sizes[computed])} ({'; '.join(others)})"


def _tokenizer(tokenizer: dict[str, Any]) -> Iterator[str]:
    padded = tokenizer["rows"] - tokenizer["tokens"]
    yield f"{tokenizer['tokens']} tokens" + (f", and {padded} rows without one" if padded else "")
    ends = ", ".join(f"{token_id} {text}" for token_id, text in tokenizer["ends"].items())
    begins = " ".join(tokenizer["begins"])
    yield f"ends with {ends or 'none'}; a prompt begins with {begins or 'nothing of its own'}"


def _chat(chat: dict[str, Any]) -> Iterator[str]:
    if not chat["template"]:
        yield f"none: {chat['problem']}"
    else:
        takes = [f"{name}: {'yes' if chat[name] else 'no'}" for name in ("system", "tools")]
        yield f"by the template; takes {', '.join(takes)}"


def _memory(memory: dict[str, Any]) -> Iterator[str]:
    yield "a token in pages: " + ", ".join(
        f"{name} {size / 1000:.1f} kB" for name, size in memory["token_bytes"].items()
    )
    yield f"as it is set up unless told otherwise: {_pool(memory['default_pool'])}"
    yield f"with {_mb(memory['available_bytes'])} for one worker (kv_memory_mb = 0): {_pool(memory['largest_pool'])}"


def _pool(pool: dict[str, Any]) -> str:
    if "problem" in pool:
        return str(pool["problem"])
    counts = " + ".join(map(str, pool["pages"]))
    terms = " + ".join(f"{name} {_mb(size)}" for name, size in pool["bytes"].items() if name != "total")
    text = f"{counts} {pool['page_format']} pages, {pool['tokens']} tokens, texts of up to {pool['longest_text']}"
    return f"{text}; {terms} = {_mb(pool['bytes']['total'])}"


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / _MB:,.1f} MB"
