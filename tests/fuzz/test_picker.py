"""What gateways tell of requests, which is what clients send: read, or refused by name."""

import ext_proc
from fuzzing import held_to_contract, messages, mutated, near
from hypothesis import given, strategies as st

from pageferry.ext_proc import external_processor_pb2 as envoy
from pageferry.router.picker_reply import passed
from pageferry.router.picker_request import Head, served_of, subset_of
from pageferry.v1.inference_pb2 import GenerateRequest

JSON = ext_proc.headers_of(x_pageferry_profile="interactive", subset=["127.0.0.1:8080"])
GRPC = ext_proc.headers_of("/pageferry.v1.InferenceService/Generate", content_type="application/grpc")
FRAMED = ext_proc.framed(GenerateRequest(prompt="hello", request_id="r-1"))


def read(head: envoy.ProcessingRequest, body: bytes) -> None:
    with held_to_contract():
        known = Head.of(head)
        reader = known.reader(refuse_unknown=True)
        if reader is not None:
            reader(body)


@given(near(JSON) | near(GRPC) | messages(envoy.ProcessingRequest))
def test_headers(head: envoy.ProcessingRequest) -> None:
    read(head, ext_proc.chat())
    subset_of(head)
    served_of(head)
    passed(head, Head.of(JSON))


@given(st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/responses"]), mutated(st.just(ext_proc.chat())))
def test_a_body_of_json(path: str, body: bytes) -> None:
    read(ext_proc.headers_of(path), body)


@given(mutated(st.just(FRAMED)))
def test_a_body_of_grpc(body: bytes) -> None:
    read(GRPC, body)
