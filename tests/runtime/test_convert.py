"""Messages and core types, there and back."""

from dataclasses import replace

import pytest
from pages import grouped_layout, large_layout, small_layout

from pageferry.core.errors import InvalidArgumentError
from pageferry.core.formats import PageFormat
from pageferry.core.layout import CacheLayout
from pageferry.core.plan import SampledToken
from pageferry.core.sampling import BeamParams, EarlyStopping, Grammar, GrammarKind, SamplingParams, StopParams
from pageferry.core.sequence import FinishReason, WorkItem
from pageferry.runtime import convert, convert_work
from pageferry.v1 import types_pb2 as pb

WORK = WorkItem(
    request_id="req-1",
    prompt_ids=(1, 2, 3),
    sampling=SamplingParams(0.7, 40, 0.9, 0.05, 1.1, 0.5, -0.5, 2**64 - 1, 0),
    stop=StopParams(20, 3, frozenset({2, 7})),
    output_ids=(9, 8),
    choice=1,
    priority=-4,
    cache_salt="tenant",
)


@pytest.mark.parametrize("num_logprobs", [None, 0, 5])
def test_a_work_item_comes_back_as_it_was(num_logprobs: int | None) -> None:
    work = replace(WORK, sampling=replace(WORK.sampling, num_logprobs=num_logprobs))
    message = pb.WorkItem.FromString(convert_work.work_to_proto(work).SerializeToString())
    assert convert_work.work_from_proto(message) == work


@pytest.mark.parametrize("kind", GrammarKind)
def test_what_an_output_must_match_and_must_not_contain_comes_back(kind: GrammarKind) -> None:
    texts = {GrammarKind.JSON_OBJECT: "", GrammarKind.CHOICES: '["yes", "no"]'}
    sampling = SamplingParams(
        num_prompt_logprobs=2,
        logit_bias=((3, -100.0), (70, 1.5)),
        banned=((1, 2), (9,)),
        grammar=Grammar(kind, texts.get(kind, "[0-9]+")),
    )
    work = replace(WORK, sampling=sampling, stop=StopParams(20, max_repeats=4), speculate=True, profile="batch")
    message = pb.WorkItem.FromString(convert_work.work_to_proto(work).SerializeToString())
    assert convert_work.work_from_proto(message) == work


@pytest.mark.parametrize("early_stopping", EarlyStopping)
def test_a_beam_search_comes_back(early_stopping: EarlyStopping) -> None:
    work = replace(WORK, beam=BeamParams(4, -0.5, early_stopping))
    message = pb.WorkItem.FromString(convert_work.work_to_proto(work).SerializeToString())
    assert convert_work.work_from_proto(message) == work
    message.beam.ClearField("early_stopping")
    assert convert_work.work_from_proto(message).beam == BeamParams(4, -0.5)


def test_absent_sampling_fields_take_the_contracts_defaults() -> None:
    assert convert_work.sampling_from_proto(pb.SamplingParams()) == SamplingParams()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("work.request_id", {"request_id": ""}),
        ("work.prompt_ids", {"prompt_ids": []}),
        ("stop.max_tokens", {"stop": pb.StopConditions()}),
        ("min_tokens", {"stop": pb.StopConditions(max_tokens=2, min_tokens=3)}),
        ("temperature", {"sampling": pb.SamplingParams(temperature=float("nan"))}),
        ("top_p", {"sampling": pb.SamplingParams(top_p=0)}),
        ("logprobs", {"sampling": pb.SamplingParams(logprobs=21)}),
        ("prompt_logprobs", {"sampling": pb.SamplingParams(prompt_logprobs=21)}),
        ("logit_bias[5]", {"sampling": pb.SamplingParams(logit_bias={5: 101})}),
        ("logit_bias[5]", {"sampling": pb.SamplingParams(logit_bias={5: float("nan")})}),
        ("banned", {"sampling": pb.SamplingParams(banned=[pb.TokenSequence()])}),
        ("grammar", {"sampling": pb.SamplingParams(grammar=pb.Grammar())}),
        ("grammar.regex", {"sampling": pb.SamplingParams(grammar=pb.Grammar(regex=""))}),
        ("grammar.choices", {"sampling": pb.SamplingParams(grammar=pb.Grammar(choices=pb.Choices()))}),
        ("max_repeats", {"stop": pb.StopConditions(max_tokens=2, max_repeats=1)}),
        ("beam.width", {"beam": pb.BeamSearch()}),
        ("beam.length_penalty", {"beam": pb.BeamSearch(width=2, length_penalty=float("inf"))}),
    ],
)
def test_a_wrong_work_item_names_its_field(field: str, change: dict[str, object]) -> None:
    message = convert_work.work_to_proto(WORK)
    for name, value in change.items():
        message.ClearField(name)  # type: ignore[arg-type]
        message.MergeFrom(pb.WorkItem(**{name: value}))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError) as caught:
        convert_work.work_from_proto(message)
    assert [violation.field for violation in caught.value.violations] == [field]


@pytest.mark.parametrize("layout", [small_layout(), large_layout(), grouped_layout()])
def test_a_layout_comes_back_as_it_was(layout: CacheLayout) -> None:
    message = pb.PageLayout.FromString(convert.layout_to_proto(layout).SerializeToString())
    assert message.page_bytes == sum(pages.page_bytes for pages in layout.pages)
    assert convert.layout_from_proto(message) == layout


def test_a_layout_without_groups_keeps_all_tokens_in_one() -> None:
    message = convert.layout_to_proto(small_layout())
    message.ClearField("groups")
    assert convert.layout_from_proto(message) == small_layout()


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 0)], "layout.groups.layers is '0 to -1'"),
        ([(2, 2)], "layout.groups.layers is '2 to 3', must be layers of 3"),
        ([(0, 2), (1, 2)], "layout.groups.layers is '1 to 2'"),
        ([(0, 2**32 - 1)], "layout.groups.layers"),
        ([(0, 2)], "layout.num_layers is 3, must be 2"),
        ([(1, 2)], "groups is '1-2=full', must hold every layer"),
        ([], "groups is '=full', must hold every layer"),
    ],
)
def test_groups_that_are_no_groups_are_refused(ranges: list[tuple[int, int]], message: str) -> None:
    layout = convert.layout_to_proto(small_layout())
    layout.ClearField("groups")
    layers = [pb.LayerRange(first_layer=first, num_layers=number) for first, number in ranges]
    layout.groups.append(pb.CacheGroup(layers=layers))
    with pytest.raises(InvalidArgumentError, match=message):
        convert.layout_from_proto(layout)


@pytest.mark.parametrize("layers", [[pb.LayerRange(num_layers=convert.MAX_LAYERS)], []])
def test_groups_that_repeat_layers_or_have_none_are_not_read_to_their_end(layers: list[pb.LayerRange]) -> None:
    message = convert.layout_to_proto(small_layout())
    message.num_layers = convert.MAX_LAYERS
    message.ClearField("groups")
    message.groups.extend([pb.CacheGroup(layers=layers)] * 100_000)
    with pytest.raises(InvalidArgumentError, match=r"layout\.groups is '100000 groups', must hold each of 4096 layers"):
        convert.layout_from_proto(message)


@pytest.mark.parametrize("num_layers", [0, 2**32 - 1])
def test_a_number_of_layers_that_no_model_has_is_refused(num_layers: int) -> None:
    message = convert.layout_to_proto(small_layout())
    message.num_layers = num_layers
    message.ClearField("groups")
    with pytest.raises(InvalidArgumentError, match=r"layout\.num_layers"):
        convert.layout_from_proto(message)


def test_a_layout_whose_page_size_in_bytes_does_not_follow_is_refused() -> None:
    message = convert.layout_to_proto(small_layout())
    message.page_bytes += 64
    with pytest.raises(InvalidArgumentError, match="page_bytes"):
        convert.layout_from_proto(message)


@pytest.mark.parametrize(
    "text", ["fp16", "fp8_e4m3", "int4", "int8:asym", "k=int8:channel,v=int4:asym", "k=fp32,v=bf16"]
)
def test_every_page_format_comes_back(text: str) -> None:
    layout = replace(small_layout(), format=PageFormat.parse(text))
    message = pb.PageLayout.FromString(convert.layout_to_proto(layout).SerializeToString())
    assert convert.layout_from_proto(message) == layout
    assert message.format == pb.PAGE_FORMAT_UNSPECIFIED


@pytest.mark.parametrize("text", ["fp32", "bf16", "int8"])
def test_a_plain_format_is_told_in_the_older_field_too(text: str) -> None:
    layout = replace(small_layout(), format=PageFormat.parse(text))
    message = convert.layout_to_proto(layout)
    assert pb.PageFormat.Name(message.format) == f"PAGE_FORMAT_{text.upper()}"
    message.ClearField("k_format")
    message.ClearField("v_format")
    assert convert.layout_from_proto(message) == layout


@pytest.mark.parametrize("value", [0, 99])
def test_an_unknown_page_format_is_refused(value: int) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"layout.format is {value}"):
        convert.layout_from_proto(pb.PageLayout(format=value))  # type: ignore[arg-type]
    for field in ("element", "granularity"):
        message = convert.layout_to_proto(small_layout())
        setattr(message.v_format, field, value)
        with pytest.raises(InvalidArgumentError, match=rf"layout.v_format.{field} is {value}"):
            convert.layout_from_proto(message)


@pytest.mark.parametrize(
    "token", [SampledToken(5), SampledToken(5, -0.25), SampledToken(5, -0.25, ((5, -0.25), (6, -1.5)))]
)
def test_a_token_comes_back_as_it_was(token: SampledToken) -> None:
    message = pb.GeneratedToken.FromString(convert.token_to_proto(17, token).SerializeToString())
    assert convert.token_from_proto(message) == (17, token)


def test_logprobs_that_are_not_wanted_are_left_out() -> None:
    message = convert.token_to_proto(0, SampledToken(5, -0.25), want_logprobs=False)
    assert not message.HasField("logprobs")


def test_finish_reasons() -> None:
    names = [pb.FinishReason.Name(convert.finish_to_proto(reason)) for reason in (None, *FinishReason)]
    assert names == [f"FINISH_REASON_{name}" for name in ("UNSPECIFIED", "STOP", "LENGTH", "REPETITION")]
