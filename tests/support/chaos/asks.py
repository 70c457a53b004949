"""The kinds of requests of a chaos run: what each asks for beside tokens, and what its answer must then be.

Of "several" answers all are drawn alike, of "best" the likelier ones are sent, "beam" is a beam search, a "grammar" is
to be matched, and of a "prompt" log-probabilities are asked for.
"""

import re
from collections.abc import Iterator

from answer import Answer, Choice
from cluster import greedy

from chaos.prompts import Golden
from chaos.script import Ask
from pageferry.v1 import inference_pb2 as pb

_N = {"several": 3, "best": 1, "beam": 2}  # answers that are sent
_BEST_OF, _WIDTH = 2, 3
_PATTERN = "[a-f0-9]{6,40}"
_BEGINNING = re.compile("[a-f0-9]{0,40}")


def request_of(ask: Ask, golden: Golden) -> pb.GenerateRequest:
    request = greedy(list(golden.prompt), ask.max_tokens)
    request.priority, request.profile, request.n = ask.priority, ask.profile, _N.get(ask.wants, 0)
    if ask.seed is not None:
        request.sampling.temperature, request.sampling.seed = 1.0, ask.seed
    match ask.wants:
        case "best":
            request.best_of = _BEST_OF
        case "beam":
            request.beam.width = _WIDTH
        case "grammar":
            request.sampling.grammar.regex = _PATTERN
            request.stop.ignore_eos = False
        case "prompt":
            request.sampling.prompt_logprobs = 1
    return request


def problems(ask: Ask, golden: Golden, answer: Answer, *, is_whole: bool) -> Iterator[str]:
    """What is wrong with what came, in words; `is_whole`: the request succeeded."""
    choices = list(answer.choices.values())
    if is_whole:
        if len(choices) != _N.get(ask.wants, 1):
            yield f"finished with {len(choices)} answers"
        if ask.wants == "prompt" and len(answer.prompt_logprobs or ()) != len(golden.prompt) - 1:
            yield f"log-probabilities are {len(answer.prompt_logprobs or ())}, of {len(golden.prompt)} tokens"
    for choice in choices:
        if is_whole:
            reason = answer.reason if len(choices) == 1 else choice.reason
            yield from _ending(ask, choice, reason)
        if ask.seed is None and ask.wants not in ("beam", "grammar") and (differs := golden.differs(choice.token_ids)):
            yield differs


def _ending(ask: Ask, choice: Choice, reason: str) -> Iterator[str]:
    if ask.wants != "grammar":
        if (len(choice.token_ids), reason) != (ask.max_tokens, "length"):
            yield f"finished with {len(choice.token_ids)} tokens, {reason}"
        return
    pattern = re.compile(_PATTERN) if reason == "stop" else _BEGINNING
    if not pattern.fullmatch(choice.text):
        yield f"finished with {choice.text!r}, {reason}"
