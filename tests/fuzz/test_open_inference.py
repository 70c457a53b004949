"""Requests of the Open Inference Protocol: whatever comes is read, or refused by name."""

import struct

from fuzzing import JSON_VALUES, TEXTS, as_json, held_to_contract, messages, mutated, near
from hypothesis import given, strategies as st

from pageferry.oip import open_inference_pb2 as oip
from pageferry.router.oip_request import parse_infer

WHOLE = oip.ModelInferRequest(
    model_name="tiny",
    id="r-1",
    parameters={
        "max_tokens": oip.InferParameter(int64_param=5),
        "temperature": oip.InferParameter(double_param=0.5),
        "stop": oip.InferParameter(string_param="a"),
        "sampling_parameters": oip.InferParameter(string_param='{"top_k": "3", "stop_token_ids": [1]}'),
    },
    inputs=[
        oip.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1]),
        oip.ModelInferRequest.InferInputTensor(name="top_p", datatype="FP32", shape=[1, 1]),
    ],
    raw_input_contents=[struct.pack("<I", 5) + b"Hello", struct.pack("<f", 0.5)],
)
TYPED = oip.ModelInferRequest()
TYPED.CopyFrom(WHOLE)
TYPED.ClearField("raw_input_contents")
TYPED.inputs[0].contents.bytes_contents.append(b"Hello")
TYPED.inputs[1].contents.fp32_contents.append(0.5)
ODD = ["[" * 100_000, "1" * 5000, '{"a":1,"a":2}', '"\\ud800"', "NaN", "1e999", "[1e999]", "[" * 990 + "]" * 990]


@given(near(WHOLE) | near(TYPED) | messages(oip.ModelInferRequest), st.booleans())
def test_a_request(request: oip.ModelInferRequest, streams: bool) -> None:
    with held_to_contract():
        parse_infer(request, streams=streams)


@given(
    st.sampled_from(["max_tokens", "stop", "sampling_parameters", "logit_bias", "timeout"]) | TEXTS,
    st.sampled_from(ODD) | JSON_VALUES.map(lambda value: as_json(value).decode(errors="ignore")) | TEXTS,
)
def test_a_parameter_of_text(name: str, text: str) -> None:
    request = oip.ModelInferRequest()
    request.CopyFrom(TYPED)
    with held_to_contract(ValueError):  # half a surrogate pair is no text of a message
        request.parameters[name].string_param = text
    with held_to_contract():
        parse_infer(request, streams=True)


@given(mutated(st.just(WHOLE.raw_input_contents[0])), mutated(st.just(WHOLE.raw_input_contents[1])))
def test_raw_elements(text: bytes, number: bytes) -> None:
    request = oip.ModelInferRequest()
    request.CopyFrom(WHOLE)
    request.raw_input_contents[:] = [text, number]
    with held_to_contract():
        parse_infer(request, streams=True)
