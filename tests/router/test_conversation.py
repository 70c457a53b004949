"""What a chat template is given: messages, tools, variables; and a last message that is continued."""

import json
from typing import Any

import pytest

from pageferry.core.errors import InvalidArgumentError
from pageferry.router.conversation import num_bytes, rendered
from pageferry.text.chat_template import ChatTemplate
from pageferry.v1 import inference_pb2 as pb

SHOW_ALL = (
    "{{ {'messages': messages, 'tools': tools, 'documents': documents, 'x': x, 'add': add_generation_prompt}|tojson }}"
)
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
CALLS = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]


@pytest.fixture(scope="module")
def show_all() -> ChatTemplate:
    return ChatTemplate(SHOW_ALL, {"x": ""})


@pytest.fixture(scope="module")
def turns() -> ChatTemplate:
    return ChatTemplate(TURNS, {})


def chat_of(*messages: dict[str, Any], **fields: Any) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(**message) for message in messages], **fields)


USER = {"role": "user", "content": "hi"}


async def values_of(template: ChatTemplate, chat: pb.ChatMessages) -> Any:
    return json.loads(await rendered(chat, template, normalise_system=True))


async def test_a_plain_chat_has_what_transformers_would_set(show_all: ChatTemplate) -> None:
    values = await values_of(show_all, chat_of({"role": "system", "content": " a\r\nb\n"}, USER))
    assert values == {
        "messages": [{"role": "system", "content": "a\nb"}, USER],
        "tools": None,
        "documents": None,
        "x": "",
        "add": True,
    }


async def test_tools_and_their_calls_come_as_objects(show_all: ChatTemplate) -> None:
    call = {"role": "assistant", "tool_calls_json": json.dumps(CALLS)}
    odd = json.dumps([{"function": {"name": "f", "arguments": "{oops"}}])
    answer = {"role": "tool", "content": "rain", "tool_call_id": "c", "name": "weather"}
    chat = chat_of(USER, call, answer, {"role": "assistant", "tool_calls_json": odd}, tools_json=json.dumps(TOOLS))
    values = await values_of(show_all, chat)
    _, first, second, third = values["messages"]
    assert values["tools"] == TOOLS
    assert first["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"} and first["tool_calls"][0]["id"] == "c"
    assert second == answer
    assert third["tool_calls"][0]["function"]["arguments"] == "{oops"
    assert num_bytes(chat) > len(json.dumps(CALLS)) + len(odd) + len(json.dumps(TOOLS))


async def test_variables_reach_the_template(show_all: ChatTemplate) -> None:
    variables = json.dumps({"x": ["é"], "add_generation_prompt": False})
    values = await values_of(show_all, chat_of(USER, template_variables_json=variables))
    assert (values["x"], values["add"]) == (["é"], False)


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("content", ["Hel", "Hello  ", "<user>hi</>"])
async def test_a_last_message_is_continued_as_by_transformers(content: str, strips: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = TURNS.replace("m.content", "m.content | trim") if strips else TURNS
    messages = [USER, {"role": "assistant", "content": content}]
    (theirs,), _ = utils.render_jinja_template([messages], chat_template=source, continue_final_message=True)
    ours = await rendered(chat_of(*messages, continue_last=True), ChatTemplate(source, {}), normalise_system=True)
    assert ours == theirs


@pytest.mark.parametrize("content", ["Hel", "", "Hello  ", "<user>hi</>"])
async def test_a_last_message_is_continued(turns: ChatTemplate, content: str) -> None:
    chat = chat_of(USER, {"role": "assistant", "content": content}, continue_last=True)
    assert await rendered(chat, turns, normalise_system=True) == f"<user>hi</><assistant>{content}"


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"messages": []}, "chat.messages", "at least one"),
        ({"messages": [{"role": "", "content": "x"}]}, "chat.messages[0].role", "empty"),
        ({"tools_json": "{}"}, "chat.tools_json", "list of objects"),
        ({"tools_json": "[1]"}, "chat.tools_json", "list of objects"),
        ({"tools_json": "[" * 100_000}, "chat.tools_json", "deep nesting"),
        ({"tools_json": '["\\ud800"]'}, "chat.tools_json", "surrogate"),
        ({"tools_json": "[NaN]"}, "chat.tools_json", "must be JSON"),
        ({"tools_json": json.dumps(TOOLS)}, "chat.tools_json", "takes no tools"),
        ({"template_variables_json": "[]"}, "chat.template_variables_json", "JSON object"),
        ({"template_variables_json": '{"tools": []}'}, "chat.template_variables_json", "must not set tools"),
        (
            {"messages": [{"role": "assistant", "tool_calls_json": "[{}]"}]},
            "chat.messages[0].tool_calls_json",
            "a function in each call",
        ),
        ({"continue_last": True}, "chat.continue_last", "the assistant's"),
    ],
)
async def test_what_is_wrong_is_named(turns: ChatTemplate, fields: dict[str, Any], field: str, words: str) -> None:
    messages = fields.pop("messages", [USER])
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        await rendered(chat_of(*messages, **fields), turns, normalise_system=True)
    assert caught.value.violations[0].field == field
