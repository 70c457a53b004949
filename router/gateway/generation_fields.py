"""How to sample, when to end, how many answers: the fields that all endpoints share, as a GenerateRequest has them."""

from pageferry.router.gateway.fields import UINT32, Fields, as_number
from pageferry.router.gateway.grammar_fields import read_grammar
from pageferry.router.gateway.strict_json import kind_of
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_EARLY_STOPPING: dict[object, types.EarlyStopping] = {
    True: types.EARLY_STOPPING_FIRST,
    False: types.EARLY_STOPPING_HEURISTIC,
    "never": types.EARLY_STOPPING_NEVER,
}


def read_generation(fields: Fields) -> pb.GenerateRequest:
    """A request without its input. Raises InvalidArgumentError."""
    request = pb.GenerateRequest(model=fields.text("model") or "")
    _read_sampling(fields, request.sampling)
    _read_stop(fields, request)
    _read_answers(fields, request)
    request.priority = fields.integer("priority", low=-(2**31), high=2**31 - 1) or 0
    request.profile = fields.text("profile") or ""
    request.bad_words.extend(fields.texts("bad_words"))
    if fields.get("skip_special_tokens") is not None:
        request.skip_special_tokens = fields.flag("skip_special_tokens")
    return request


def _read_sampling(fields: Fields, sampling: types.SamplingParams) -> None:
    for name in _NUMBERS:
        if (number := fields.number(name)) is not None:
            setattr(sampling, name, number)
    if (top_k := fields.integer("top_k", low=-1)) is not None:
        sampling.top_k = max(0, top_k)  # for other servers -1 turns it off
    if (seed := fields.integer("seed", low=-(2**63), high=2**64 - 1)) is not None:
        sampling.seed = seed % 2**64
    if (num := fields.integer("prompt_logprobs")) is not None:
        sampling.prompt_logprobs = num
    _read_bias(fields, sampling)
    grammar = read_grammar(fields)
    if grammar is not None:
        sampling.grammar.CopyFrom(grammar)


def _read_bias(fields: Fields, sampling: types.SamplingParams) -> None:
    biases = fields.get("logit_bias")
    if biases is None:
        return
    if not isinstance(biases, dict):
        fields.refuse("logit_bias", f"is {kind_of(biases)}, must be an object with numbers by token id")
    for name, bias in biases.items():
        path = f"{fields.path('logit_bias')}.{name[:20]!a}"
        if not (name.isascii() and name.isdecimal() and len(name) <= 10 and int(name) <= UINT32):
            fields.refuse("logit_bias", 'must have token ids, such as "50256", as names')
        sampling.logit_bias[int(name)] = as_number(bias, path)


def read_top_logprobs(fields: Fields, sampling: types.SamplingParams, needs: str, *, wanted: bool) -> None:
    """The field `top_logprobs` where log-probabilities are `wanted`; `needs` says what else it needs for that."""
    top_logprobs = fields.integer("top_logprobs")
    if wanted:
        sampling.logprobs = top_logprobs or 0
        if top_logprobs is not None:
            fields.sets("top_logprobs", "logprobs")
    elif top_logprobs:
        fields.refuse("top_logprobs", needs)


def _read_stop(fields: Fields, request: pb.GenerateRequest) -> None:
    stop = request.stop
    if (limit := fields.integer("max_tokens")) is not None:
        stop.max_tokens = limit
    stop.min_tokens = fields.integer("min_tokens") or 0
    stop.ignore_eos = fields.flag("ignore_eos")
    stop.stop_token_ids.extend(fields.token_ids("stop_token_ids"))
    stop.max_repeats = fields.integer("max_repeats") or 0
    request.stop_strings.extend(fields.texts("stop", or_one=True))


def _read_answers(fields: Fields, request: pb.GenerateRequest) -> None:
    request.n = fields.integer("n", low=1) or 0
    best_of = fields.integer("best_of", low=1) or 0
    length_penalty = fields.number("length_penalty")
    early_stopping = fields.get("early_stopping")
    if not fields.flag("use_beam_search"):
        request.best_of = best_of
        if length_penalty not in (None, 1.0):
            fields.refuse("length_penalty", "needs use_beam_search to be true")
        if early_stopping not in (None, False):
            fields.refuse("early_stopping", "needs use_beam_search to be true")
        return
    request.beam.width = best_of or request.n or 1
    fields.sets("use_beam_search", "beam")
    fields.sets("best_of" if best_of else "n", "beam.width")
    if length_penalty is not None:
        request.beam.length_penalty = length_penalty
    if early_stopping is not None:
        if not (isinstance(early_stopping, bool) or early_stopping == "never"):
            fields.refuse("early_stopping", 'must be true, false or "never"')
        request.beam.early_stopping = _EARLY_STOPPING[early_stopping]
