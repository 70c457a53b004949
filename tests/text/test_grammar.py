"""Grammars: what is refused, what may come next, and that nothing but the output's tokens matters."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
from grammars import allowed_ids, json_schema, regex, takes
from tiny_model import EOS_ID, VOCAB_SIZE

from pageferry.core.errors import FailedPreconditionError, InvalidArgumentError
from pageferry.core.model_files import resolve_model
from pageferry.core.sampling import Grammar, GrammarKind
from pageferry.text.grammar import MAX_GRAMMAR_BYTES, GrammarMatcher, Grammars
from pageferry.text.tokenizer import Tokenizer, load_tokenizer

PERSON = json_schema(
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},'
    ' "required": ["name", "age"], "additionalProperties": false}'
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(tiny_model)))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(lambda: tokenizer, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (PERSON, '{"name": "Bo", "age": 7}', '{"name": 7'),
        (PERSON, '{\n  "name": "ö😀",\n  "age": -70\n}', "{\n \n"),
        (Grammar(GrammarKind.JSON_OBJECT, ""), '{"a": [1, {"b": null}]}', "[1]"),
        (regex(r"[a-c]{2,3}\d"), "abc7", "abcc"),
        (Grammar(GrammarKind.LARK, 'start: "a" start | "b"'), "aab", "ba"),
        (Grammar(GrammarKind.CHOICES, json.dumps(['say "no"\n', "北京"])), 'say "no"\n', "say n"),
        (Grammar(GrammarKind.CHOICES, json.dumps(['say "no"\n', "北京"])), "北京", "北北"),
    ],
)
def test_what_matches_may_come_and_then_the_end(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, good: str, bad: str
) -> None:
    matcher = grammars.matcher(grammar)
    assert EOS_ID not in allowed_ids(matcher)
    assert takes(matcher, tokenizer.encode(good))
    assert EOS_ID in allowed_ids(matcher)
    assert not takes(grammars.matcher(grammar), tokenizer.encode(bad))


def test_where_nothing_more_matches_only_the_end_may_come(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(PERSON, tokenizer.encode('{"name": "Bo", "age": 7}'))
    assert allowed_ids(matcher) == [EOS_ID]


def test_special_tokens_and_ids_without_a_token_never_match(tokenizer: Tokenizer) -> None:
    matcher = Grammars(lambda: tokenizer, VOCAB_SIZE + 70).matcher(regex(r"(?s).*"))
    allowed = allowed_ids(matcher)
    assert EOS_ID in allowed
    assert not {0, 1, 3} & set(allowed)
    assert max(allowed) < VOCAB_SIZE


def test_every_end_of_several_may_come(tokenizer: Tokenizer, tiny_model: Path) -> None:
    several = load_tokenizer(resolve_model(str(tiny_model)))
    several.eos_ids = (EOS_ID, 0)
    assert allowed_ids(Grammars(lambda: several, VOCAB_SIZE).matcher(regex("a?b?"), tokenizer.encode("ab"))) == [0, 2]


def test_a_matcher_is_made_again_from_any_part_of_the_output(grammars: Grammars, tokenizer: Tokenizer) -> None:
    output = tokenizer.encode('{"name": "Bo 北", "age": 7}')
    whole = grammars.matcher(PERSON)
    for end in range(len(output)):
        assert allowed_ids(grammars.matcher(PERSON, output[:end])) == allowed_ids(whole)
        whole.follow(output[: end + 1])


def test_an_output_that_does_not_match_is_refused(grammars: Grammars, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgumentError, match=r"output_ids is .2 tokens., must match the grammar"):
        grammars.matcher(PERSON, tokenizer.encode("{]"))


def test_a_wrong_token_is_a_problem_and_not_an_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(PERSON)
    matcher.follow(tokenizer.encode("]"))
    assert "does not match the grammar" in matcher.problem
    assert matcher.allowed() is None


def test_a_matcher_that_takes_too_much_is_a_problem_and_not_an_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    matcher = grammars.matcher(Grammar(GrammarKind.LARK, "start: " + "x " * 3000 + '\nx: "a"?'))
    for num in range(1, 10):
        if matcher.allowed() is None:
            break
        matcher.follow(tokenizer.encode("a") * num)
    assert "too complex" in matcher.problem
    assert matcher.allowed() is None


@pytest.mark.parametrize(
    ("grammar", "field", "why"),
    [
        (json_schema("{"), "grammar.json_schema", "Expecting property name"),
        (json_schema('{"type": "array", "uniqueItems": true}'), "grammar.json_schema", "uniqueItems"),
        (json_schema('{"not": {"type": "null"}}'), "grammar.json_schema", "not"),
        (json_schema('{"x-guidance": {"lenient": true}, "not": {}}'), "grammar.json_schema", "not"),
        (json_schema('{"if": {}, "then": {}}'), "grammar.json_schema", "if"),
        (json_schema('{"type": "string", "format": "weird"}'), "grammar.json_schema", "Unknown format"),
        (json_schema('{"$ref": "https://localhost/x"}'), "grammar.json_schema", "does not fetch"),
        (json_schema('{"enum": []}'), "grammar.json_schema", "Unsatisfiable"),
        (json_schema('{"oneOf": [{"type": "integer"}, {"type": "number"}]}'), "grammar.json_schema", "oneOf"),
        (json_schema('{"items": {"multipleOf": 999983}}'), "grammar.json_schema", "divisor of 999983"),
        (json_schema('{"multipleOf": 0.999983}'), "grammar.json_schema", "divisor of 999983"),
        (json_schema('{"items": ' * 5000 + "{}" + "}" * 5000), "grammar.json_schema", "recursion"),
        (regex("(a|b"), "grammar.regex", "unclosed group"),
        (regex("(?=a)b"), "grammar.regex", "look-around"),
        (regex("a" * (MAX_GRAMMAR_BYTES + 1)), "grammar.regex", f"at most {MAX_GRAMMAR_BYTES}"),
        (Grammar(GrammarKind.LARK, "start: nothing"), "grammar.lark", "nothing"),
        (Grammar(GrammarKind.LARK, "start: a\na: b\nb: a"), "grammar.lark", "too complex here"),
        (json_schema('{"$ref": "#"}'), "grammar.json_schema", "too complex here"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    grammars: Grammars, grammar: Grammar, field: str, why: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{field} ") as refused:
        grammars.matcher(grammar)
    assert why in refused.value.message
    assert [violation.field for violation in refused.value.violations] == [field]
    assert len(refused.value.message) < 1000


def test_schemas_that_multiply_out_are_refused_at_once(grammars: Grammars) -> None:
    parts = [{"anyOf": [{"properties": {f"{side}{i}": {"type": "integer"}}} for side in "ab"]} for i in range(30)]
    with pytest.raises(InvalidArgumentError, match="too large"):
        grammars.matcher(json_schema(json.dumps({"allOf": parts})))


def test_without_a_tokenizer_it_is_said(tmp_path: Path) -> None:
    without = Grammars(lambda: load_tokenizer(resolve_model(str(tmp_path))), VOCAB_SIZE)
    with pytest.raises(FailedPreconditionError, match=r"tokenizer can't be loaded.*config\.json"):
        without.matcher(PERSON)


def test_the_tokenizer_is_loaded_once_and_off_the_event_loop(tokenizer: Tokenizer) -> None:
    loaded: list[str] = []

    def load() -> Tokenizer:
        loaded.append(threading.current_thread().name)
        return tokenizer

    grammars = Grammars(load, VOCAB_SIZE)
    assert loaded == []

    async def several() -> list[GrammarMatcher]:
        return await asyncio.gather(*(grammars.constraint(PERSON, ()) for _ in range(8)))

    matchers = asyncio.run(several())
    assert len(loaded) == 1
    assert loaded[0] != threading.main_thread().name
    matchers[0].follow(tokenizer.encode("{"))
    assert allowed_ids(matchers[0]) != allowed_ids(matchers[1]), "each has a state of its own"


def test_tokens_that_are_not_kept_are_taken_back(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Drafts, an end among them."""
    matcher = grammars.matcher(regex("ab(cd)?"))
    start, *drafts = (tokenizer.encode(text) for text in ("ab", "abcd", "abc", "ab"))
    matcher.follow(start)
    allowed = allowed_ids(matcher)
    wrong = tokenizer.encode("abx")
    for draft in (*drafts, [*start, EOS_ID], [*drafts[0], EOS_ID], [*start, EOS_ID, EOS_ID, 80], wrong):
        matcher.follow(draft)
        matcher.allowed()
        matcher.follow(start)
        assert allowed_ids(matcher) == allowed
        assert matcher.problem == ""
