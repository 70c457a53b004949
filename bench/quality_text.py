"""What `quality.py` lets the model read and write: texts that come with Python, answers whose form can be checked."""

import argparse
import inspect
import json
import pydoc_data.topics
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pageferry.text.tokenizer import Tokenizer

# Prose of Python's own reference; together more than 5,000 of SmolLM2's tokens.
_TOPICS = ("objects", "execmodel", "import")
_CONTINUED_TOKENS = 128  # of a text, before the model goes on with it
_STORY = "Write a long story about a ferry, its crew, and a winter on the coast."
_MANUAL = "Explain step by step how to plan, build and look after a vegetable garden."


def texts() -> dict[str, str]:
    """English and code; the same for one version of Python."""
    english = "\n\n".join(pydoc_data.topics.topics[topic] for topic in _TOPICS)
    return {"English": english, "code": inspect.getsource(argparse.ArgumentParser)}


def token_ids(tokenizer: Tokenizer, text: str, num_tokens: int) -> list[int]:
    ids = tokenizer.encode(text, add_special=False)
    if len(ids) < num_tokens:
        raise ValueError(f"the text has {len(ids)} tokens, {num_tokens} are to be read: ask for fewer with --tokens")
    return ids[:num_tokens]


def chat(tokenizer: Tokenizer, *turns: str) -> list[int]:
    """Of the user and the assistant in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special=False)


def continued(tokenizer: Tokenizer) -> list[list[int]]:
    """Beginnings of long outputs: both texts, and two questions that ask for much."""
    starts = [token_ids(tokenizer, text, _CONTINUED_TOKENS) for text in texts().values()]
    return starts + [chat(tokenizer, question) for question in (_STORY, _MANUAL)]


def repeated_share(ids: Sequence[int], length: int = 4) -> float:
    """Share of the runs of `length` tokens that were there before."""
    runs = list(zip(*(ids[offset:] for offset in range(length)), strict=False))
    return (len(runs) - len(set(runs))) / len(runs) if runs else 0.0


@dataclass(frozen=True)
class Form:
    """How an answer must look: whether it is right isn't asked. Two answered questions come before each that counts."""

    pattern: str  # of the whole answer without outer whitespace: a regular expression
    instruction: str  # stands behind each question
    answered: tuple[str, str, str, str]  # question, answer, question, answer
    questions: tuple[str, ...]
    json_type: type | None = None  # what the answer must be as JSON

    def turns(self, question: str) -> tuple[str, ...]:
        first, answer, second, other, instruction = *self.answered, self.instruction
        return f"{first} {instruction}", answer, f"{second} {instruction}", other, f"{question} {instruction}"

    def is_kept(self, answer: str) -> bool:
        text = answer.strip()
        if not re.fullmatch(self.pattern, text):
            return False
        try:
            return self.json_type is None or isinstance(json.loads(text), self.json_type)
        except ValueError:
            return False


FORMS = (
    Form(
        r"-?\d[\d,.]*",
        "Answer with only a number.",
        ("How many legs has a dog?", "4", "What is 2 plus 3?", "5"),
        ("How many days are in a week?", "What is 7 plus 5?", "How many wheels has a car?"),
    ),
    Form(
        r"(?i:yes|no)\.?",
        "Answer only with yes or no.",
        ("Is snow cold?", "yes", "Can a stone sing?", "no"),
        ("Is the sun hot?", "Can a fish ride a bicycle?", "Is Paris in France?"),
    ),
    Form(
        r"\w+\.?",
        "Answer in one word.",
        ("What is the capital of Spain?", "Madrid", "What colour is grass?", "Green"),
        ("What is the capital of Italy?", "What do cows drink?", "What is the opposite of small?"),
    ),
    Form(
        r"- [^\n]+\n- [^\n]+\n- [^\n]+",
        "Write three lines that each start with a dash.",
        ("Name drinks.", "- tea\n- milk\n- water", "Name tools.", "- hammer\n- saw\n- drill"),
        ("Name fruits.", "Name animals.", "Name cities in Europe."),
    ),
    Form(
        r"[^,\n]+(, [^,\n]+){3}",
        "Write four, separated by commas, on one line.",
        ("Name metals.", "iron, gold, copper, tin", "Name months.", "May, June, July, August"),
        ("Name vegetables.", "Name musical instruments.", "Name countries."),
    ),
    Form(
        r'(?s:\{.*"name".*"kind".*\})',
        'Answer with a JSON object that has the keys "name" and "kind".',
        ("A dog called Rex.", '{"name": "Rex", "kind": "dog"}', "A boat, Alma.", '{"name": "Alma", "kind": "boat"}'),
        ("A cat called Tom.", "A horse with the name Star.", "The river Thames."),
        dict,
    ),
    Form(
        r"[^.!?\n]+\?",
        "Write one question about it.",
        ("The sea.", "How deep is the sea?", "Bread.", "Who baked the first bread?"),
        ("The weather.", "Trains."),
    ),
)
