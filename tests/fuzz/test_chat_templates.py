"""Chat templates: any template on any chat ends in text or in an error, within the limits of its process."""

import json
import random
from typing import Any

import pytest
from fuzzing import held_to_contract, numbers
from hypothesis import given, settings, strategies as st

from pageferry.text.chat_template import ChatTemplate
from pageferry.text.template_process import MAX_CHARACTERS

NAMES = st.sampled_from(
    [
        *("messages", "messages[0]", "messages[0]['content']", "bos_token", "add_generation_prompt", "loop", "ns", "x"),
        *("namespace", "range", "dict", "cycler", "joiner", "lipsum", "self", "caller", "strftime_now", "none"),
        *("raise_exception", "''", "[]", "{}", "1", "'{0.__class__}'", "'%s'", "10**9", "namespace(x='a')"),
    ]
)
ATTRIBUTES = st.sampled_from(
    [
        *("__class__", "__init__", "__globals__", "__mro__", "__subclasses__()", "__code__", "_module", "x", "content"),
        *("format", "format_map", "mro()", "gi_frame", "append(1)", "upper()", "replace('a', 'b' * 999)", "items()"),
        *("ljust(10**10)", "zfill(10**9)", "split('')", "encode()", "join(range(99999))", "strip()", "startswith('a')"),
    ]
)
FILTERS = st.sampled_from(
    [
        *("attr('__class__')", "format(1)", "tojson", "tojson(indent=10**9)", "list", "string", "length", "safe", "e"),
        *(
            "batch(10**9, 'x')",
            "slice(10**9)",
            "center(10**10)",
            "indent(10**9)",
            "replace('', 'x' * 9999)",
            "map('upper')",
        ),
        *(
            "map(attribute='__class__')",
            "selectattr('role', 'equalto', 'user')",
            "join(',')",
            "pprint",
            "urlize",
            "xmlattr",
        ),
        *("wordwrap(1)", "default('x')", "first", "last", "trim", "sum", "sort", "unique", "reverse", "round(10**9)"),
    ]
)
NUMBERS = numbers(0, 2**40).map(str)
EXPRESSIONS: st.SearchStrategy[str] = st.recursive(
    NAMES | NUMBERS,
    lambda inner: (
        st.builds("{}.{}".format, inner, ATTRIBUTES)
        | st.builds("{}|{}".format, inner, FILTERS)
        | st.builds(
            "({} {} {})".format, inner, st.sampled_from(["*", "**", "+", "~", "%", "-", "/", "in", "and", "=="]), inner
        )
        | st.builds("{}[{}]".format, inner, inner)
        | st.builds("{}({})".format, inner, inner)
        | st.builds("{} if {} else {}".format, inner, inner, inner)
    ),
    max_leaves=6,
)
TEMPLATES: st.SearchStrategy[str] = st.recursive(
    st.builds("{{{{ {} }}}}".format, EXPRESSIONS)
    | st.builds("{{% set ns.x = {} %}}".format, EXPRESSIONS)
    | st.builds("{{% set x = {} %}}".format, EXPRESSIONS)
    | st.text(max_size=5)
    | st.sampled_from(
        ["{%", "%}", "{{", "{#", "{% endfor %}", "{% break %}", "{% include 'x' %}", "{% import 'os' as x %}"]
    ),
    lambda inner: (
        st.builds("{{% for x in {} %}}{}{{% endfor %}}".format, EXPRESSIONS, inner)
        | st.builds("{{% if {} %}}{}{{% endif %}}".format, EXPRESSIONS, inner)
        | st.builds("{{% macro x() %}}{}{{% endmacro %}}{{{{ x() }}}}".format, inner)
        | st.builds("{}{}".format, inner, inner)
    ),
    max_leaves=6,
)
CHATS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", ""]), "content": st.text(max_size=20)}
    ),
    max_size=3,
)


@settings(max_examples=settings.default.max_examples // 4)  # since each starts a process
@given(TEMPLATES, CHATS)
def test_a_template(source: str, messages: list[dict[str, str]]) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    with held_to_contract():
        assert len(template.render(messages)) <= MAX_CHARACTERS


BOMBS = {
    "a long text": "{{ 'a' * 10**9 }}",
    "a text longer than memory": "{{ 'a' * 10**15 }}",
    "doubling": "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "much output": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a long loop": "{% for i in range(10**12) %}{% endfor %}",
    "a huge number": "{{ 10**(10**10) }}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a wide column": "{{ 'x'.ljust(10**11) }}",
    "a wide batch": "{{ messages|batch(10**10, 'x')|list }}",
    "a long list": "{{ [0] * 10**10 }}",
    "many words": "{{ lipsum(n=10**9) }}",
    "a recursive macro": "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "a recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "deep brackets": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "deep blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "a power of a chat": "{% for a in messages[0].content %}" * 12 + "x" + "{% endfor %}" * 12,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_goes_off_in_a_process_of_its_own(name: str) -> None:
    template = ChatTemplate(BOMBS[name], {})
    with held_to_contract():
        template.render([{"role": "user", "content": "hello" * 10}])
        raise AssertionError("it did not go off")


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ ''|attr('__class__') }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ [messages]|map('attr', '__class__')|list }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{{ ''['format']('{0.__class__}') }}",
    "{{ ('{0.__class__}'|safe).format(1) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
    "{{ messages.append({}) }}",
    "{{ messages[0].update({}) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ dict.mro() }}",
    "{{ range.__new__ }}",
    "{{ loop.__class__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_object_of_pythons_is_reached(source: str) -> None:
    template = ChatTemplate(source, {})
    text = ""
    with held_to_contract():
        text = template.render([{"role": "user", "content": "hello"}])
    for word in ("class '", "<module", "root:", "code object"):
        assert word not in text, text


def test_any_chat_comes_through_whole() -> None:
    random_ = random.Random(3)
    template = ChatTemplate("{{ messages|tojson }}", {})
    for _ in range(20):
        characters = [chr(random_.choice([0, 10, 34, 92, 127, 0x2028, 0xD7FF, 0xFFFF, 0x1F600])) for _ in range(40)]
        messages: list[dict[str, Any]] = [{"role": "user", "content": "".join(characters)}]
        assert json.loads(template.render(messages)) == messages
