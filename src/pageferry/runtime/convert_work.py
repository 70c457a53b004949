"""What a worker is asked to compute: messages of the contract as the core's types, and back.

Raises InvalidArgumentError where a message is wrong.
"""

import json
from collections.abc import Mapping
from typing import Any

from pageferry.core.errors import invalid
from pageferry.core.sampling import BeamParams, EarlyStopping, Grammar, GrammarKind, SamplingParams, StopParams
from pageferry.core.sequence import WorkItem
from pageferry.v1 import types_pb2 as pb

# Those that have the same name in the core and in the contract.
_SAMPLING_FIELDS: tuple[Any, ...] = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_EARLY_STOPPING = {
    EarlyStopping.HEURISTIC: pb.EARLY_STOPPING_HEURISTIC,
    EarlyStopping.FIRST: pb.EARLY_STOPPING_FIRST,
    EarlyStopping.NEVER: pb.EARLY_STOPPING_NEVER,
}
_EARLY_STOPPING_BACK: dict[int, EarlyStopping] = {
    pb.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    **{value: kind for kind, value in _EARLY_STOPPING.items()},
}


def sampling_from_proto(message: pb.SamplingParams, defaults: Mapping[str, float] | None = None) -> SamplingParams:
    """A field that is absent takes its default, or else the contract's own."""
    given = {name: getattr(message, name) for name in _SAMPLING_FIELDS if message.HasField(name)}
    return SamplingParams(
        **{**(defaults or {}), **given},
        num_logprobs=message.logprobs if message.HasField("logprobs") else None,
        num_prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        banned=tuple(tuple(sequence.ids) for sequence in message.banned),
        grammar=_grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
    )


def _sampling_to_proto(sampling: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(
        **{name: getattr(sampling, name) for name in _SAMPLING_FIELDS},
        logprobs=sampling.num_logprobs,
        prompt_logprobs=sampling.num_prompt_logprobs,
        logit_bias=dict(sampling.logit_bias),
        banned=[pb.TokenSequence(ids=ids) for ids in sampling.banned],
    )
    if sampling.grammar is not None:
        message.grammar.CopyFrom(_grammar_to_proto(sampling.grammar))
    return message


def _grammar_from_proto(message: pb.Grammar) -> Grammar:
    name = message.WhichOneof("kind")
    if name is None:
        raise invalid("grammar", None, "must have one kind set")
    kind = GrammarKind(name)
    if kind is GrammarKind.JSON_OBJECT:
        return Grammar(kind, "")
    if kind is GrammarKind.CHOICES:
        texts = list(message.choices.texts)
        if not texts or "" in texts:
            raise invalid("grammar.choices", texts[:1], "must be at least one text, none empty")
        return Grammar(kind, json.dumps(texts))
    text: str = getattr(message, name)
    if not text:
        raise invalid(f"grammar.{name}", text, "must not be empty")
    return Grammar(kind, text)


def _grammar_to_proto(grammar: Grammar) -> pb.Grammar:
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return pb.Grammar(json_object=True)
    if grammar.kind is GrammarKind.CHOICES:
        return pb.Grammar(choices=pb.Choices(texts=json.loads(grammar.text)))
    values: dict[str, Any] = {grammar.kind.value: grammar.text}
    return pb.Grammar(**values)


def beam_from_proto(message: pb.BeamSearch) -> BeamParams:
    if message.early_stopping not in _EARLY_STOPPING_BACK:
        raise invalid("beam.early_stopping", message.early_stopping, "is none that this version knows")
    length_penalty = message.length_penalty if message.HasField("length_penalty") else 1.0
    return BeamParams(message.width, length_penalty, _EARLY_STOPPING_BACK[message.early_stopping])


def _beam_to_proto(beam: BeamParams) -> pb.BeamSearch:
    return pb.BeamSearch(
        width=beam.width, length_penalty=beam.length_penalty, early_stopping=_EARLY_STOPPING[beam.early_stopping]
    )


def stop_from_proto(message: pb.StopConditions) -> StopParams:
    if not message.HasField("max_tokens"):
        raise invalid("stop.max_tokens", None, "must be set")
    stop_token_ids = frozenset(message.stop_token_ids)
    return StopParams(message.max_tokens, message.min_tokens, stop_token_ids, message.max_repeats)


def work_to_proto(work: WorkItem) -> pb.WorkItem:
    stop = work.stop
    return pb.WorkItem(
        request_id=work.request_id,
        prompt_ids=work.prompt_ids,
        output_ids=work.output_ids,
        sampling=_sampling_to_proto(work.sampling),
        stop=pb.StopConditions(
            max_tokens=stop.max_tokens,
            min_tokens=stop.min_tokens,
            stop_token_ids=sorted(stop.stop_token_ids),
            max_repeats=stop.max_repeats,
        ),
        choice=work.choice,
        priority=work.priority,
        cache_salt=work.cache_salt,
        speculate=work.speculate,
        beam=_beam_to_proto(work.beam) if work.beam is not None else None,
        profile=work.profile,
    )


def work_from_proto(message: pb.WorkItem) -> WorkItem:
    if not message.request_id:
        raise invalid("work.request_id", "", "must not be empty")
    if not message.prompt_ids:
        raise invalid("work.prompt_ids", [], "must hold at least one token id")
    return WorkItem(
        request_id=message.request_id,
        prompt_ids=tuple(message.prompt_ids),
        sampling=sampling_from_proto(message.sampling),
        stop=stop_from_proto(message.stop),
        output_ids=tuple(message.output_ids),
        choice=message.choice,
        priority=message.priority,
        cache_salt=message.cache_salt,
        speculate=message.speculate,
        beam=beam_from_proto(message.beam) if message.HasField("beam") else None,
        profile=message.profile,
    )
