"""Grammars that outputs must match, by llguidance: checked when a request comes in, matched where tokens are drawn.

A matcher is made of a grammar and the output's tokens alone, so that a retry, a resumed or a preempted request goes on
where it was. It knows tokens by their bytes, as `pieces` does, so that what it lets through is what is read.
"""

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile, zip_longest
from threading import Lock

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pageferry.core.errors import FailedPreconditionError, InvalidArgumentError, PageferryError, invalid, invalid_field
from pageferry.core.sampling import Grammar, GrammarKind
from pageferry.text.tokenizer import Tokenizer

MAX_GRAMMAR_BYTES = 64 * 1024
MAX_MULTIPLE = 10_000  # of `multipleOf`, scaled to a whole number: states of a matcher, and its time to compile
_NUM_KEPT = 128  # compiled grammars
# A kilobyte or two a state; what a step may take is llguidance's default, some 10 ms at worst.
_LIMITS = LLParserLimits(max_lexer_states=25_000, verbose_errors=False)
# As much white space as indented JSON needs: where any is allowed, a model may write nothing else to the end.
_SCHEMA_OPTIONS = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": r"(?: |\r?\n[ \t]{0,32})?"}


class GrammarMatcher:
    """The `Constraint` there is."""

    def __init__(self, matcher: LLMatcher, eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._taken: list[int] = []  # by the matcher
        self.problem = ""

    def follow(self, output_ids: Sequence[int]) -> None:
        # An end is nothing to match, nor is what drafts have behind it.
        output = list(output_ids)
        if not self._eos_ids.isdisjoint(output):
            output = list(takewhile(lambda token_id: token_id not in self._eos_ids, output))
        taken = self._taken
        if output[: len(taken)] != taken:
            kept = next(i for i, pair in enumerate(zip_longest(taken, output)) if pair[0] != pair[1])
            self._matcher.rollback(len(taken) - kept)
            del taken[kept:]
        new = output[len(taken) :]
        num_taken = self._matcher.try_consume_tokens(new) if new else 0
        taken += new[:num_taken]
        self.problem = ""
        if num_taken < len(new):
            why = _first_line(self._matcher.get_error())
            self.problem = f"the output does not match the grammar, or that has become too complex: {why}"

    def allowed(self) -> bytes | None:
        if self.problem:
            return None
        mask = self._matcher.compute_bitmask()
        # A matcher that has broken off for want of memory or time would let the end follow.
        if self._matcher.is_error():
            self.problem = f"the grammar is too complex here: {_first_line(self._matcher.get_error())}"
            return None
        if self._matcher.is_stopped() and not self._matcher.is_accepting():
            self.problem = "the grammar can't go on here"
            return None
        return mask


class Grammars:
    """Compiles grammars for one model, on any thread; its tokenizer is loaded for the first one."""

    def __init__(self, load: Callable[[], Tokenizer], vocab_size: int) -> None:
        """`vocab_size` is the model's: ids that have no token never match."""
        self._load = load
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._eos_ids: frozenset[int] = frozenset()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()  # never used but to be copied
        self._loading, self._lock = Lock(), Lock()

    async def check(self, grammar: Grammar) -> None:
        """Raise InvalidArgumentError, saying what is wrong, where it can't be compiled; off the event loop."""
        await asyncio.to_thread(self.matcher, grammar)

    async def constraint(self, grammar: Grammar, output_ids: Sequence[int]) -> GrammarMatcher:
        """As `matcher`, off the event loop."""
        return await asyncio.to_thread(self.matcher, grammar, output_ids)

    def matcher(self, grammar: Grammar, output_ids: Sequence[int] = ()) -> GrammarMatcher:
        """One that has taken the output so far.

        Raises InvalidArgumentError for a grammar that can't be compiled or an output that doesn't match it,
        FailedPreconditionError where the model's tokenizer can't be loaded.
        """
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = _compile(grammar, self._loaded())
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _NUM_KEPT:
                self._compiled.popitem(last=False)
            matcher = GrammarMatcher(compiled.deep_copy(), self._eos_ids)
        matcher.follow(output_ids)
        if matcher.problem:
            raise invalid("output_ids", f"{len(output_ids)} tokens", "must match the grammar")
        return matcher

    def _loaded(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                try:
                    tokenizer = self._load()
                    self._eos_ids = frozenset(tokenizer.eos_ids)
                    self._tokenizer = _ll_tokenizer(tokenizer, self._vocab_size)
                except (PageferryError, OSError, ValueError) as error:
                    message = f"grammars can't be matched here: the model's tokenizer can't be loaded: {error}"
                    raise FailedPreconditionError(message, reason="NO_TOKENIZER") from error
            return self._tokenizer


class _Vocabulary:
    """What llguidance wants to know of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = None
        # Ends are no text, whatever their tokens look like.
        self.special_token_ids = sorted({*tokenizer.pieces.special_ids, *tokenizer.eos_ids})
        self.tokens = [tokenizer.pieces.bytes_of(token_id) for token_id in range(vocab_size)]

    def __call__(self, text: bytes | str) -> list[int]:
        characters = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode(characters, add_special=False)


def _ll_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    if not tokenizer.eos_ids:
        raise ValueError("the model has no end-of-sequence token")
    wrapper = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size))
    return LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(tokenizer.eos_ids))


def _compile(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    num_bytes = len(grammar.text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise invalid(f"grammar.{grammar.kind.value}", f"{num_bytes} bytes", f"must have at most {MAX_GRAMMAR_BYTES}")
    try:
        source = _source(grammar)
    except (ValueError, RecursionError) as error:  # what is no JSON, for one
        raise _refused(grammar, str(error)) from None
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(source, tokenizer, limits=_LIMITS)
    if is_wrong or (messages and grammar.kind is GrammarKind.JSON_SCHEMA):
        raise _refused(grammar, "; ".join(messages))
    matcher = LLMatcher(tokenizer, source, limits=_LIMITS, log_level=0)
    if matcher.is_error():
        raise _refused(grammar, matcher.get_error())
    start = GrammarMatcher(matcher.deep_copy(), frozenset())
    if start.allowed() is None:  # rules that lead nowhere, or to too much, and an engine's step would find out
        raise _refused(grammar, start.problem)
    return matcher


def _source(grammar: Grammar) -> str:
    """In llguidance's own notation."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            for multiple in _multiples(json.loads(grammar.text)):
                if multiple > MAX_MULTIPLE:
                    raise ValueError(f"multipleOf needs a divisor of {multiple}, the most is {MAX_MULTIPLE}")
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_SCHEMA_OPTIONS)  # type: ignore[arg-type]
        case GrammarKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_SCHEMA_OPTIONS)  # type: ignore[arg-type]
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
        case GrammarKind.CHOICES:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(grammar.text))))


def _multiples(schema: object) -> Iterator[int]:
    """What `multipleOf` asks for anywhere in a schema, with decimal places as whole numbers."""
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
            multiple = value.get("multipleOf")
            if isinstance(multiple, int | float):
                yield int(re.sub(r"e.*|\D", "", repr(multiple)) or "0")
        elif isinstance(value, list):
            waiting += value


def _refused(grammar: Grammar, why: str) -> InvalidArgumentError:
    return invalid_field(f"grammar.{grammar.kind.value}", f"can't be compiled: {_first_line(why)}")


def _first_line(text: str) -> str:
    return text.strip().partition("\n<state>")[0][:500]
