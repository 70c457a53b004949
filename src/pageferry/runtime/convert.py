"""Layouts and tokens of the contract as the core's types, and back.

Raises InvalidArgumentError where a message is wrong.
"""

from collections.abc import Iterable

from pageferry.core.beam import Hypothesis
from pageferry.core.errors import invalid
from pageferry.core.formats import Element, Granularity, PageFormat, TensorFormat
from pageferry.core.groups import CacheGroup, full_group, layer_runs
from pageferry.core.layout import CacheLayout
from pageferry.core.plan import SampledToken
from pageferry.core.sequence import FinishReason
from pageferry.v1 import types_pb2 as pb

# Those that the contract's older field can tell.
_FORMATS = {
    PageFormat.parse("fp32"): pb.PAGE_FORMAT_FP32,
    PageFormat.parse("bf16"): pb.PAGE_FORMAT_BF16,
    PageFormat.parse("int8"): pb.PAGE_FORMAT_INT8,
}
_FORMATS_BACK: dict[int, PageFormat] = {value: key for key, value in _FORMATS.items()}
_ELEMENTS = {pb.PageElement.Value(f"PAGE_ELEMENT_{element.name}"): element for element in Element}
_GRANULARITIES = {pb.ScaleGranularity.Value(f"SCALE_GRANULARITY_{kind.name}"): kind for kind in Granularity}
_LAYOUT_FIELDS = ("fingerprint", "page_size", "num_kv_heads", "head_dim", "version")
MAX_LAYERS = 4096  # of a peer's layout
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.REPETITION: pb.FINISH_REASON_REPETITION,
}


def format_from_proto(message: pb.PageLayout) -> PageFormat:
    """From `k_format` and `v_format`, or else from `format` alone."""
    if message.HasField("k_format") and message.HasField("v_format"):
        k, v = (_side_from_proto(name, getattr(message, name)) for name in ("k_format", "v_format"))
        return PageFormat(k, v)
    if message.format not in _FORMATS_BACK:
        raise invalid("layout.format", message.format, "is no page format that this version knows")
    return _FORMATS_BACK[message.format]


def _side_to_proto(side: TensorFormat) -> pb.TensorFormat:
    return pb.TensorFormat(
        element=f"PAGE_ELEMENT_{side.element.name}",
        granularity=f"SCALE_GRANULARITY_{side.granularity.name}",
        asymmetric=not side.symmetric,
    )


def _side_from_proto(name: str, message: pb.TensorFormat) -> TensorFormat:
    if message.element not in _ELEMENTS:
        raise invalid(f"layout.{name}.element", message.element, "is none that this version knows")
    if message.granularity not in _GRANULARITIES:
        raise invalid(f"layout.{name}.granularity", message.granularity, "is none that this version knows")
    return TensorFormat(_ELEMENTS[message.element], _GRANULARITIES[message.granularity], not message.asymmetric)


def groups_from_proto(message: pb.PageLayout) -> tuple[CacheGroup, ...]:
    """The cache groups, which older peers don't know: then one that keeps all."""
    if not 1 <= message.num_layers <= MAX_LAYERS:
        raise invalid("layout.num_layers", message.num_layers, f"must be from 1 to {MAX_LAYERS}")
    if not message.groups:
        return (full_group(message.num_layers),)
    groups: list[CacheGroup] = []
    num_left = message.num_layers
    for group in message.groups:
        groups.append(_group_from_proto(group, message.num_layers))
        num_left -= max(1, len(groups[-1].layers))
        if num_left < 0:  # a peer names thousands of layers in a few bytes: what repeats them is not read on
            limit = f"must hold each of {message.num_layers} layers once"
            raise invalid("layout.groups", f"{len(message.groups)} groups", limit)
    return tuple(groups)


def _group_from_proto(message: pb.CacheGroup, num_layers: int) -> CacheGroup:
    layers: list[int] = []
    for item in message.layers:
        first, end = item.first_layer, item.first_layer + item.num_layers
        if item.num_layers < 1 or end > num_layers or (layers and first <= layers[-1]):
            limit = f"must be layers of {num_layers}, behind those before them"
            raise invalid("layout.groups.layers", f"{first} to {end - 1}", limit)
        layers += range(first, end)
    return CacheGroup(tuple(layers), message.window if message.HasField("window") else None, message.sinks)


def _group_to_proto(group: CacheGroup) -> pb.CacheGroup:
    layers = [pb.LayerRange(first_layer=first, num_layers=last - first + 1) for first, last in layer_runs(group.layers)]
    return pb.CacheGroup(layers=layers, window=group.window, sinks=group.sinks)


def layout_to_proto(layout: CacheLayout) -> pb.PageLayout:
    values = {name: getattr(layout, name) for name in _LAYOUT_FIELDS}
    return pb.PageLayout(
        **values,
        format=_FORMATS.get(layout.format, pb.PAGE_FORMAT_UNSPECIFIED),
        k_format=_side_to_proto(layout.format.k),
        v_format=_side_to_proto(layout.format.v),
        num_layers=layout.num_layers,
        groups=[_group_to_proto(group) for group in layout.groups],
        page_bytes=_page_bytes(layout),
    )


def layout_from_proto(message: pb.PageLayout) -> CacheLayout:
    values = {name: getattr(message, name) for name in _LAYOUT_FIELDS}
    layout = CacheLayout(**values, format=format_from_proto(message), groups=groups_from_proto(message))
    if message.num_layers != layout.num_layers:
        limit = f"must be {layout.num_layers}, as many as the groups have"
        raise invalid("layout.num_layers", message.num_layers, limit)
    if message.page_bytes != _page_bytes(layout):
        limit = f"must be {_page_bytes(layout)} for the layout's other fields"
        raise invalid("layout.page_bytes", message.page_bytes, limit)
    return layout


def _page_bytes(layout: CacheLayout) -> int:
    """Of one page of each group."""
    return sum(pages.page_bytes for pages in layout.pages)


def token_to_proto(position: int, token: SampledToken, want_logprobs: bool = True) -> pb.GeneratedToken:
    """The token with its log-probabilities, where it has them and they are wanted."""
    message = pb.GeneratedToken(position=position, token_id=token.token_id)
    if want_logprobs and token.logprob is not None:
        message.logprobs.CopyFrom(_logprobs_to_proto(token))
    return message


def _logprobs_to_proto(token: SampledToken) -> pb.Logprobs:
    return pb.Logprobs(
        sampled=pb.TokenLogprob(token_id=token.token_id, logprob=token.logprob),
        top=[pb.TokenLogprob(token_id=id_, logprob=logprob) for id_, logprob in token.top],
    )


def prompt_logprobs_to_proto(tokens: Iterable[SampledToken]) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(tokens=map(_logprobs_to_proto, tokens))


def token_from_proto(message: pb.GeneratedToken) -> tuple[int, SampledToken]:
    """Position and token."""
    if not message.HasField("logprobs"):
        return message.position, SampledToken(message.token_id)
    top = tuple((entry.token_id, entry.logprob) for entry in message.logprobs.top)
    return message.position, SampledToken(message.token_id, message.logprobs.sampled.logprob, top)


def hypothesis_to_proto(hypothesis: Hypothesis) -> pb.Hypothesis:
    reason = finish_to_proto(hypothesis.reason)
    return pb.Hypothesis(token_ids=hypothesis.token_ids, score=hypothesis.score, reason=reason)


def finish_to_proto(reason: FinishReason | None) -> pb.FinishReason:
    return _REASONS[reason] if reason else pb.FINISH_REASON_UNSPECIFIED
