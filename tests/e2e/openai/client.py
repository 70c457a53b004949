"""What the official Python client gets from a running Pageferry: `python client.py http://127.0.0.1:8080/v1`.

Prints what comes and ends with an error where it is not what it should be; docs/openai-transcript.md is its output.
"""

import json
import sys
from contextlib import closing
from typing import Any

import openai
from openai import OpenAI

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
STORY: Any = [{"role": "user", "content": "Write a long story about a ferry."}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
    "required": ["city", "country"],
    "additionalProperties": False,
}


def main(base_url: str) -> None:
    client = OpenAI(base_url=base_url, api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    print(f"model: {model}")
    for step in (stream, cancel, logprobs, choices, json_schema, responses, errors):
        print(f"\n{step.__name__}:")
        step(client, model)


def stream(client: OpenAI, model: str) -> None:
    options: Any = {"include_usage": True}
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_completion_tokens=24, stream=True, stream_options=options
    )
    pieces, reasons, usage = [], [], None
    for chunk in answer:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces += [choice.delta.content] if choice.delta.content else []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    print("  " + "|".join(pieces))
    print(f"  finish_reason: {reasons}, completion_tokens: {usage.completion_tokens if usage else None}")
    assert len(reasons) == 1 and usage is not None and usage.completion_tokens >= len(pieces) > 1


def cancel(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=STORY, max_completion_tokens=2000, seed=1, stream=True, extra_body={"ignore_eos": True}
    )
    num_chunks = 0
    with closing(answer):
        for _ in answer:
            num_chunks += 1
            if num_chunks == 10:
                break
    print(f"  left after {num_chunks} chunks of at most 2000")


def logprobs(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_completion_tokens=3, logprobs=True, top_logprobs=2
    )
    told = answer.choices[0].logprobs
    assert told is not None and told.content is not None and len(told.content) == 3
    for token in told.content:
        likeliest = ", ".join(f"{top.token!r} {top.logprob:.3f}" for top in token.top_logprobs)
        print(f"  {token.token!r} {token.logprob:.3f}, bytes {token.bytes}; likeliest: {likeliest}")
        assert token.logprob <= 0 and len(token.top_logprobs) == 2


def choices(client: OpenAI, model: str) -> None:
    prompts = ["The ferry left", "The fog came"]
    answer = client.completions.create(model=model, prompt=prompts, n=2, seed=7, max_tokens=8)
    for choice in answer.choices:
        print(f"  {choice.index}: {prompts[choice.index // 2]} …{choice.text!r}")
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None and answer.usage.completion_tokens <= 32


def json_schema(client: OpenAI, model: str) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_completion_tokens=64, response_format=form
    )
    text = answer.choices[0].message.content or ""
    value = json.loads(text)
    print(f"  {value}")
    assert set(value) == {"city", "country"} and all(isinstance(entry, str) for entry in value.values())


def responses(client: OpenAI, model: str) -> None:
    kinds = []
    with client.responses.stream(
        model=model, input="What is the capital of France?", temperature=0, max_output_tokens=24
    ) as answer:
        for event in answer:
            if event.type not in kinds:
                kinds.append(event.type)
        text = answer.get_final_response().output_text
    print(f"  {', '.join(kinds)}")
    print(f"  {text}")
    assert kinds[-1] == "response.completed" and text


def errors(client: OpenAI, model: str) -> None:
    asked: list[dict[str, Any]] = [{"temperature": -1}, {"modalities": ["audio"]}, {"extra_body": {"temprature": 1}}]
    for fields in asked:
        try:
            client.chat.completions.create(model=model, messages=QUESTION, **fields)
        except openai.BadRequestError as error:
            print(f"  {error.status_code} {error.code}, param {error.param}: {error.body['message']}")  # type: ignore[index]
        else:
            raise AssertionError(f"{fields} was not refused")
    try:
        client.chat.completions.create(model="gpt-none", messages=QUESTION)
    except openai.NotFoundError as error:
        print(f"  {error.status_code} {error.code}, request id {'given' if error.request_id else 'missing'}")


if __name__ == "__main__":
    main(sys.argv[1])
