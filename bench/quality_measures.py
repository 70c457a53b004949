"""What `quality.py` measures of an engine: its logits over a text, where its queries look, and what it writes.

Sequences lie on the pool's first pages, as the tests' engines put them; nothing else runs.
"""

import importlib
import math
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from engines import Generation, logits_of, sequence
from quality_text import FORMS, chat, continued, repeated_share

from pageferry.core.pool import PageId
from pageferry.core.sampling import StopParams
from pageferry.core.sequence import Sequence, page_table
from pageferry.engine.load import Engine
from pageferry.text.tokenizer import Tokenizer

_CHUNK_TOKENS = 256
_NUM_QUERIES = 16  # of a window, whose attention is looked at
_ANSWER_TOKENS = 64
_PROMPT_TOKENS = 240  # at most
_NUM_OUTPUTS = 4


@dataclass(frozen=True)
class Scores:
    """Against the reference's predictions of the same tokens; nats per token."""

    nll: float
    nll_change: float
    nll_error: float  # the change's standard error, as if tokens were independent
    kl: float
    top1: float  # share of tokens whose likeliest successor is the same


@dataclass(frozen=True)
class Outputs:
    """What was written greedily; shares from 0 to 1."""

    repeated: dict[int, float]  # by length: 4-grams there before, mean of the outputs that did not fail
    kept_forms: float
    answers: list[str]


def bytes_per_token(engine: Engine, context: int) -> float:
    """Of the pages that a sequence of so many tokens holds."""
    layout = engine.layout
    live = (len(list(group.live_pages(context - 1, context, layout.page_size))) for group in layout.groups)
    return sum(num * pages.page_bytes for num, pages in zip(live, layout.pages, strict=True)) / context


def pool_tokens(contexts: list[int], lengths: list[int]) -> int:
    """Enough for whatever is measured here."""
    num_replies = sum(len(form.questions) for form in FORMS)
    replies, written = num_replies * (_PROMPT_TOKENS + _ANSWER_TOKENS), _NUM_OUTPUTS * (_PROMPT_TOKENS + max(lengths))
    return max(*contexts, replies, written)


def log_probabilities(engine: Engine, ids: list[int], context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each window of `context` tokens: log-probabilities [context, vocab] and what followed [context].

    Each window begins with an empty cache; the last token of `ids` is only predicted.
    """
    for start in range(0, len(ids) - context, context):
        target = _placed(engine, ids[start : start + context], context)
        ends = [*range(_CHUNK_TOKENS, context, _CHUNK_TOKENS), context]
        logits = logits_of(engine, target, ends)
        yield torch.log_softmax(logits, dim=-1), torch.tensor(ids[start + 1 : start + context + 1])


def compare(reference: list[Tensor], found: Iterator[tuple[Tensor, Tensor]]) -> Scores:
    changes, losses, divergences, agreements = [], [], [], []
    for exact, (logs, following) in zip(reference, found, strict=True):
        loss = -logs.gather(1, following[:, None])[:, 0].double()
        losses.append(loss)
        changes.append(loss + exact.gather(1, following[:, None])[:, 0].double())
        agreements.append((logs.argmax(-1) == exact.argmax(-1)).double())
        divergences.append(exact.exp().mul_(logs.sub_(exact)).sum(-1).neg_().double())
    change = torch.cat(changes)
    return Scores(
        nll=float(torch.cat(losses).mean()),
        nll_change=float(change.mean()),
        nll_error=float(change.std() / len(change) ** 0.5),
        kl=float(torch.cat(divergences).mean()),
        top1=float(torch.cat(agreements).mean()),
    )


def query_positions(context: int, page_size: int) -> Tensor:
    """Last tokens of pages, evenly spread, so that no page they read is still open."""
    pages = context // page_size
    return torch.arange(1, _NUM_QUERIES + 1) * pages // _NUM_QUERIES * page_size - 1


def queries(engine: Engine, ids: list[int]) -> list[Tensor]:
    """Of each layer, [_NUM_QUERIES, H, D] at `query_positions`, turned and scaled; the engine attends by torch."""
    positions = query_positions(len(ids), engine.layout.page_size)
    target = _placed(engine, ids, len(ids))
    with _recorded(positions) as recorded:
        Generation(engine, [target]).prefill(chunk_tokens=len(ids))
    return [query * engine.model_config.head_dim**-0.5 for query in recorded]


@contextmanager
def _recorded(rows: Tensor) -> Iterator[list[Tensor]]:
    """Keeps those rows of what torch's attention is asked, layer after layer."""
    torch_model: Any = importlib.import_module("pageferry.engine.model")
    attend, kept = torch_model.paged_attention, list[Tensor]()

    def record(query: Tensor, *rest: object, **named: object) -> object:
        kept.append(query[rows].clone())
        return attend(query, *rest, **named)

    torch_model.paged_attention = record
    try:
        yield kept
    finally:
        torch_model.paged_attention = attend


def attention(engine: Engine, asked: list[Tensor], context: int) -> list[Tensor]:
    """Of each layer, [_NUM_QUERIES, H, context]: where the queries look among the keys that lie in the first pages."""
    num_pages = engine.layout.num_pages(context)
    keys_at, asked_at = torch.arange(context), query_positions(context, engine.layout.page_size)[:, None]
    weights = []
    for query, layer in zip(asked, engine.pages.layers, strict=True):
        stored = layer.keys.read()[:num_pages].transpose(0, 1).flatten(1, 2)  # [Hk, context, D]
        keys = stored.repeat_interleave(query.shape[1] // len(stored), 0)
        scores = torch.einsum("qhd,hnd->qhn", query, keys)
        hidden = keys_at > asked_at
        if layer.window is not None:
            hidden |= (keys_at <= asked_at - layer.window) & (keys_at >= layer.sinks)
        weights.append(scores.masked_fill_(hidden[:, None], float("-inf")).softmax(-1))
    return weights


def drift(reference: list[Tensor], found: list[Tensor]) -> list[float]:
    """Of each layer: the share of attention that went elsewhere (total variation), mean of heads and queries."""
    return [float((new - exact).abs().sum(-1).mean() / 2) for exact, new in zip(reference, found, strict=True)]


def spread(layers: list[float]) -> str:
    """Least, median, most, and where the most is."""
    most = max(layers)
    return f"{min(layers):.4f} {statistics.median(layers):.4f} {most:.4f} (layer {layers.index(most)})"


def outputs(engine: Engine, tokenizer: Tokenizer, lengths: list[int]) -> Outputs:
    longest = max(lengths)
    never_ends = StopParams(longest, min_tokens=longest, stop_token_ids=frozenset(tokenizer.eos_ids))
    written = _greedy(engine, continued(tokenizer), longest, never_ends)
    whole = [ids for ids in written if len(ids) == longest]  # the others failed
    repeated = {
        length: sum(repeated_share(ids[:length]) for ids in whole) / len(whole) if whole else math.nan
        for length in lengths
    }
    asked = [(form, chat(tokenizer, *form.turns(question))) for form in FORMS for question in form.questions]
    replies = _greedy(engine, [ids for _, ids in asked], _ANSWER_TOKENS, StopParams(_ANSWER_TOKENS))
    answers = [tokenizer.decode(_until(ids, tokenizer.eos_ids)) for ids in replies]
    kept = [form.is_kept(answer) for (form, _), answer in zip(asked, answers, strict=True)]
    return Outputs(repeated, statistics.mean(kept), answers)


def _greedy(engine: Engine, prompts: list[list[int]], num_tokens: int, stop: StopParams) -> list[list[int]]:
    """All in one batch; one whose logits are no numbers ends early."""
    targets, first = [], 0
    for tail, prompt in enumerate(prompts):
        length = len(prompt) + num_tokens
        targets.append(_placed(engine, prompt, length, first, tail, stop))
        first += engine.layout.num_pages(length)
    generation = Generation(engine, targets)
    generation.prefill()
    generation.decode(num_tokens - 1)
    return [target.output_ids for target in targets]


def _placed(
    engine: Engine, ids: list[int], length: int, first: int = 0, tail: int = 0, stop: StopParams | None = None
) -> Sequence:
    """Room for `length` tokens from page `first` on, in every cache group: what is behind a window is kept, unread."""
    num_pages = engine.layout.num_pages(length)
    if first + num_pages > min(engine.num_pages):
        raise ValueError(f"{first + num_pages} pages are needed in each group, they have {engine.num_pages}")
    target = sequence(ids, first, num_pages, stop=stop)
    target.tables = [page_table(target.tables[0]) for _ in engine.layout.groups]
    target.tail = PageId(tail)
    return target


def _until(ids: list[int], ends: tuple[int, ...]) -> list[int]:
    return ids[: next((i for i, id_ in enumerate(ids) if id_ in ends), len(ids))]
