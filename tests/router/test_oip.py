"""The Open Inference Protocol behind a gRPC server: what its clients ask, and what they get."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import pytest
from fake_workers import Rig, Script, eventually
from spans import assert_one_tree

from pageferry.core.config import Config, SecurityConfig, ServerConfig
from pageferry.core.tenants import key_digest
from pageferry.oip import open_inference_pb2 as oip
from pageferry.oip.open_inference_pb2_grpc import (
    GRPCInferenceServiceStub,
    add_GRPCInferenceServiceServicer_to_server,
)
from pageferry.router.oip import OIP_SERVICE, OpenInferenceServicer
from pageferry.runtime.errors import from_rpc_error
from pageferry.runtime.server import GrpcServer

if TYPE_CHECKING:
    from pageferry.oip.open_inference_pb2_grpc import GRPCInferenceServiceAsyncStub

Stub: TypeAlias = "GRPCInferenceServiceAsyncStub"  # is in the generated stubs only, not in the module
TEXT = "streamed text"
TOKENS = [4 + byte for byte in TEXT.encode()]

CONFIG = ServerConfig(max_message_bytes=16 * 2**20)  # as the router has it


@asynccontextmanager
async def serving(tiny_model: Path, **options: Any) -> AsyncIterator[tuple[Rig, Stub, GrpcServer]]:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(Rig(str(tiny_model), Script(TOKENS), **options))
        server = await stack.enter_async_context(GrpcServer(CONFIG, router.log.tracer()))
        server.add(add_GRPCInferenceServiceServicer_to_server, OpenInferenceServicer(router.frontend), OIP_SERVICE)
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{await server.start()}")
        yield router, GRPCInferenceServiceStub(await stack.enter_async_context(channel)), server


def parameter(value: object) -> oip.InferParameter:
    kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
    return oip.InferParameter(**{kinds[type(value)]: value})


def text_tensor(text: str | bytes = "Say something.", **fields: Any) -> oip.ModelInferRequest.InferInputTensor:
    data = text.encode() if isinstance(text, str) else text
    fields = {"name": "text_input", "datatype": "BYTES", "shape": [1]} | fields
    return oip.ModelInferRequest.InferInputTensor(contents=oip.InferTensorContents(bytes_contents=[data]), **fields)


def tensor(name: str, datatype: str, shape: Iterable[int] = (1,), **contents: Any):
    return oip.ModelInferRequest.InferInputTensor(
        name=name, datatype=datatype, shape=shape, contents=oip.InferTensorContents(**contents)
    )


def ask(id_: str = "", inputs: Iterable[Any] = (), model: str = "tiny", **parameters: Any) -> oip.ModelInferRequest:
    parameters = {"max_tokens": len(TOKENS)} | parameters
    return oip.ModelInferRequest(
        model_name=model,
        id=id_,
        inputs=[text_tensor(), *inputs],
        parameters={name: parameter(value) for name, value in parameters.items() if value is not None},
    )


def texts_of(response: oip.ModelInferResponse, name: str = "text_output") -> list[str]:
    """The elements of a tensor, however they came; it says how many there are."""
    for index, output in enumerate(response.outputs):
        if output.name == name:
            elements = [*output.contents.bytes_contents]
            if response.raw_output_contents:
                assert not elements
                data = response.raw_output_contents[index]
                while data:
                    (size,) = struct.unpack_from("<I", data)
                    elements.append(data[4 : 4 + size])
                    data = data[4 + size :]
            assert [len(elements)] == list(output.shape)
            assert output.datatype == "BYTES"
            return [element.decode() for element in elements]
    return []


async def rest(call: Any) -> list[oip.ModelStreamInferResponse]:
    """What a stream answers from now on to its end."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_an_answer_that_is_whole(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub, _):
        response = await stub.ModelInfer(ask("r-1"))
        assert (response.model_name, response.model_version, response.id) == ("tiny", "1", "r-1")
        assert texts_of(response) == [TEXT]
        assert texts_of(response, "finish_reason") == ["length"]
        parameters = response.parameters
        assert parameters["prompt_tokens"].int64_param == len(router.tokenizer.encode("Say something."))
        assert parameters["completion_tokens"].int64_param == len(TOKENS)
        assert len(parameters["trace_id"].string_param) == 32
        assert not response.raw_output_contents
        await router.check_idle()


async def test_raw_tensors_are_answered_raw(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub, _):
        text = "Grüße, 北京"
        request = ask(inputs=[tensor("max_tokens", "UINT32"), tensor("ignore_eos", "BOOL")], max_tokens=None)
        request.inputs[0].ClearField("contents")
        data = text.encode()
        request.raw_input_contents.extend([struct.pack("<I", len(data)) + data, struct.pack("<I", 4), b"\x01"])
        request.outputs.add(name="text_output")
        response = await stub.ModelInfer(request)
        assert texts_of(response) == [TEXT[:4]]
        assert [output.name for output in response.outputs] == ["text_output"]
        assert list(router.prefill.works[0].prompt_ids) == router.tokenizer.encode(text)


async def test_a_stream_answers_as_text_comes(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub, _):
        gate = router.decode.pause_at[5] = asyncio.Event()
        call = stub.ModelStreamInfer(iter([ask("a", stop="xt")]))
        responses = [await call.read() for _ in range(5)]
        gate.set()
        responses += await rest(call)
        assert not any(response.error_message for response in responses)
        answers = [response.infer_response for response in responses]
        assert "".join(text for answer in answers for text in texts_of(answer)) == "streamed te"
        assert [answer.parameters["triton_final_response"].bool_param for answer in answers][-2:] == [False, True]
        assert [texts_of(answer, "finish_reason") for answer in answers] == [[]] * (len(answers) - 1) + [["stop"]]
        assert answers[-1].parameters["completion_tokens"].int64_param == len(TOKENS)
        await router.check_idle()


async def test_clients_number_their_requests_alike(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub, _):
        gate = router.decode.pause_at[3] = asyncio.Event()
        calls = [stub.ModelStreamInfer(iter([ask("0")])) for _ in range(2)]
        for call in calls:
            assert texts_of((await call.read()).infer_response) == [TEXT[0]]
        gate.set()
        for call in calls:
            answers = await rest(call)
            assert {answer.infer_response.id for answer in answers} == {"0"}
            assert not any(answer.error_message for answer in answers)
        await router.check_idle()


async def test_requests_of_one_stream_run_together_and_fail_alone(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub, _):
        router.decode.pause_at[3] = asyncio.Event()
        call = stub.ModelStreamInfer()
        await call.write(ask("slow"))
        assert texts_of((await call.read()).infer_response) == ["s"]
        await call.write(ask("wrong", temperature=-1.0))
        await call.write(ask("whole", stream=False, max_tokens=3))
        found: dict[str, Any] = {}
        while {"wrong", "whole"} - found.keys():
            response = await call.read()
            found[response.infer_response.id] = response
        assert found["wrong"].error_message.startswith("INVALID_ARGUMENT: temperature is -1.0")
        assert found["wrong"].infer_response.parameters["code"].string_param == "INVALID_ARGUMENT"
        assert texts_of(found["whole"].infer_response) == [TEXT[:3]]
        router.decode.pause_at[3].set()
        await call.done_writing()
        texts = [texts_of(response.infer_response)[0] for response in await rest(call)]
        assert "".join(texts).endswith(TEXT[3:])
        await router.check_idle()


async def test_a_stream_may_end_with_an_errors_status(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub, _):
        router.decode.pause_at[3] = asyncio.Event()
        call = stub.ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
        await call.write(ask())
        await call.read()
        await call.write(ask(model="other"))
        error = from_rpc_error(await refusal(rest(call)))
        assert (error.code, error.reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")
        await router.check_idle()


async def test_several_answers_to_one_request(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub, _):
        whole = await stub.ModelInfer(ask(n=2))
        assert texts_of(whole) == [TEXT] * 2
        assert texts_of(whole, "finish_reason") == ["length"] * 2
        assert whole.parameters["completion_tokens"].int64_param == 2 * len(TOKENS)
        texts, ended = ["", ""], []
        answers = [response.infer_response async for response in stub.ModelStreamInfer(iter([ask(n=2)]))]
        for answer in answers[:-1]:
            choice = answer.parameters["choice"].int64_param
            assert choice not in ended
            texts[choice] += "".join(texts_of(answer))
            ended += [choice for reason in texts_of(answer, "finish_reason") if reason == "length"]
        assert texts == [TEXT] * 2
        assert sorted(ended) == [0, 1]
        assert answers[-1].parameters["triton_final_response"].bool_param
        await router.check_idle()


@pytest.mark.parametrize("how", ["parameters", "tensors", "sampling_parameters"])
async def test_parameters_are_fields_of_a_completion(tiny_model: Path, how: str) -> None:
    given: dict[str, Any] = {"temperature": 0.5, "top_k": 7, "seed": 11, "min_tokens": 1, "ignore_eos": True}
    kinds = {
        "temperature": ("FP32", "fp32_contents"),
        "top_k": ("INT32", "int_contents"),
        "seed": ("UINT64", "uint64_contents"),
        "min_tokens": ("INT64", "int64_contents"),
        "ignore_eos": ("BOOL", "bool_contents"),
    }
    match how:
        case "parameters":
            request = ask(**given, stop="no", stop_token_ids="[5, 6]", priority=-2)
        case "tensors":
            inputs = [tensor(name, kinds[name][0], **{kinds[name][1]: [value]}) for name, value in given.items()]
            request = ask(inputs=[*inputs, tensor("stop", "BYTES", (1, 1), bytes_contents=[b"no"])])
            request.parameters["stop_token_ids"].string_param = "[5, 6]"
            request.parameters["priority"].int64_param = -2
        case _:  # numbers as strings, as Triton's clients write them
            fields = {name: str(value).lower() for name, value in given.items()}
            fields |= {"stop": ["no"], "stop_token_ids": [5, 6], "priority": -2}
            request = ask(sampling_parameters=json.dumps(fields))
    async with serving(tiny_model) as (router, stub, _):
        await stub.ModelInfer(request)
        (work,) = router.prefill.works
        sampling = work.sampling
        assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 7, 11)
        assert (work.stop.min_tokens, list(work.stop.stop_token_ids), work.priority) == (1, [5, 6], -2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": [text_tensor()]}, "text_input is given twice"),
        ({"inputs": [tensor("top_k", "INT32", int_contents=[2])], "top_k": 3}, "top_k is given twice"),
        ({"temprature": 1.0}, "did you mean temperature?"),
        ({"temperature": float("nan")}, "parameters.temperature is nan, must be finite"),
        ({"max_tokens": "many"}, "max_tokens is a string, must be a whole number"),
        ({"stream": True}, "stream needs the call ModelStreamInfer"),
        ({"stream": 1}, "stream must be true or false"),
        ({"exclude_input_in_output": "no"}, "exclude_input_in_output must be true or false"),
        ({"exclude_input_in_output": True, "echo": False}, "exclude_input_in_output is the contrary of echo"),
        ({"logprobs": 1}, "logprobs is not answered over this protocol"),
        ({"prompt": "a"}, "prompt is the tensor text_input"),
        ({"timeout": -1}, "timeout must be a whole number of microseconds"),
        ({"sampling_parameters": "[1]"}, "sampling_parameters can't be read: body is a list"),
        ({"inputs": [tensor("top_k", "INT32", (2,), int_contents=[2, 3])]}, "inputs[1].shape is [2], must be of one"),
        ({"inputs": [tensor("top_k", "INT32", int_contents=[2, 3])]}, "inputs[1].contents has 2 elements"),
        ({"inputs": [tensor("top_k", "INT32", int64_contents=[2])]}, "inputs[1].contents has 0 elements"),
        ({"inputs": [tensor("top_k", "FP16")]}, "inputs[1].datatype is FP16, must be BYTES, BOOL"),
        ({"inputs": [text_tensor(b"\xff", name="stop")]}, "inputs[1] is not UTF-8 at byte 0"),
        ({"inputs": [text_tensor(parameters={"shared_memory_region": parameter("x")})]}, "shared memory is not taken"),
    ],
)
async def test_what_is_wrong_is_named(tiny_model: Path, change: dict[str, Any], message: str) -> None:
    async with serving(tiny_model) as (router, stub, _):
        error = await refusal(stub.ModelInfer(ask(**change)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert message in error.details()
        assert router.prefill.works == []


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ([b"\x01\x00\x00\x00a", b""], "raw_input_contents has 2 entries for 1 inputs"),
        ([b"\x02\x00\x00\x00a"], "inputs[0] must be the length of one element"),
        ([b"\x01"], "inputs[0] must be the length of one element"),
    ],
)
async def test_raw_contents_that_do_not_fit(tiny_model: Path, raw: list[bytes], message: str) -> None:
    async with serving(tiny_model) as (_, stub, _):
        request = ask()
        request.raw_input_contents.extend(raw)
        assert message in (await refusal(stub.ModelInfer(request))).details()


async def test_other_requests_that_are_refused(tiny_model: Path) -> None:
    async with serving(tiny_model) as (_, stub, _):
        without, several, other, version = ask(), ask(), ask(), ask()
        del without.inputs[:]
        several.inputs[0].shape[:] = [3, 1]
        other.outputs.add(name="logits")
        version.model_version = "2"
        for request, code, message in (
            (without, "INVALID_ARGUMENT", "inputs.text_input must be given, as BYTES"),
            (several, "INVALID_ARGUMENT", "inputs[0].shape is [3, 1], must be of one element"),
            (other, "INVALID_ARGUMENT", "outputs[0].name is logits, must be text_output or finish_reason"),
            (version, "NOT_FOUND", "version '2' of model 'tiny' is not served"),
            (ask(model="big"), "NOT_FOUND", "model 'big' is not served"),
        ):
            error = await refusal(stub.ModelInfer(request))
            assert error.code().name == code
            assert message in error.details()


@pytest.mark.field("llm-d/llm-d-router#1155", "laike9m/Cyberbrain#39")
async def test_a_prompt_over_its_limit_is_refused_by_its_size(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub, _):
        request = ask()
        request.inputs[0].contents.bytes_contents[0] = b"x" * (5 * 2**20)
        error = await refusal(stub.ModelInfer(request))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "prompt is 5242880 bytes, the limit is 1048576"
        assert router.prefill.works == []


async def test_health_and_metadata(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub, _):
        assert (await stub.ServerLive(oip.ServerLiveRequest())).live
        assert (await stub.ServerReady(oip.ServerReadyRequest())).ready
        assert (await stub.ModelReady(oip.ModelReadyRequest(name="tiny", version="1"))).ready
        assert (await refusal(stub.ModelReady(oip.ModelReadyRequest(name="big")))).code() is grpc.StatusCode.NOT_FOUND
        server = await stub.ServerMetadata(oip.ServerMetadataRequest())
        assert (server.name, list(server.extensions)) == ("pageferry", ["parameters", "schedule_policy"])
        model = await stub.ModelMetadata(oip.ModelMetadataRequest(name="tiny"))
        assert (model.name, list(model.versions)) == ("tiny", ["1"])
        assert [(tensor.name, tensor.datatype) for tensor in model.inputs] == [("text_input", "BYTES")]
        router.decode.publish(stalled=True)
        await eventually(lambda: not router.frontend.ready)
        assert not (await stub.ServerReady(oip.ServerReadyRequest())).ready
        assert (await stub.ServerLive(oip.ServerLiveRequest())).live


@pytest.mark.parametrize("streams", [True, False])
async def test_a_call_that_is_left_ends_everywhere(tiny_model: Path, streams: bool) -> None:
    async with serving(tiny_model) as (router, stub, _):
        router.decode.pause_at[3] = asyncio.Event()
        call: Any = stub.ModelStreamInfer(iter([ask()])) if streams else stub.ModelInfer(ask())
        if streams:
            await call.read()
        await eventually(lambda: bool(router.decode.works))
        call.cancel()
        await router.check_idle()
        async with asyncio.timeout(60):
            while not (roots := [span for span in router.log.spans if span.name == "pageferry.request"]):
                await router.log.wait(len(router.log.spans) + 1)
        assert [span.attributes["rpc.response.status_code"] for span in roots] == ["CANCELLED"]


async def test_a_timeout_of_the_request_is_a_deadline(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub, _):
        error = await refusal(stub.ModelInfer(ask(timeout=1)))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        (response,) = [response async for response in stub.ModelStreamInfer(iter([ask(timeout=1)]))]
        assert response.error_message.startswith("DEADLINE_EXCEEDED")
        assert router.decode.works == []


@pytest.mark.parametrize("streams", [True, False])
async def test_a_request_is_in_its_callers_trace(tiny_model: Path, streams: bool) -> None:
    trace_id, parent = "0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7"
    metadata = (("traceparent", f"00-{trace_id}-{parent}-01"),)
    async with serving(tiny_model) as (router, stub, _):
        if streams:
            answers = [
                response.infer_response async for response in stub.ModelStreamInfer(iter([ask()]), metadata=metadata)
            ]
        else:
            answers = [await stub.ModelInfer(ask(), metadata=metadata)]
        assert answers[-1].parameters["trace_id"].string_param == trace_id
        await router.check_idle()
        assert_one_tree(await router.log.wait(7), remote_parent=int(parent, 16))
        assert len(router.log.spans) == 7


async def test_callers_are_known_by_their_keys(tiny_model: Path, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(f'[[tenant]]\nname = "acme"\nkey_sha256 = ["{key_digest("k" * 32)}"]\n', encoding="utf-8")
    config = Config(security=SecurityConfig(tenants_file=str(tenants)))
    async with serving(tiny_model, config=config) as (router, stub, _):
        for call in (
            stub.ModelInfer(ask()),
            stub.ModelStreamInfer(iter([ask()])).read(),
            stub.ModelReady(oip.ModelReadyRequest(name="tiny")),
            stub.ModelMetadata(oip.ModelMetadataRequest(name="tiny")),
        ):
            assert (await refusal(call)).code() is grpc.StatusCode.UNAUTHENTICATED
        assert router.prefill.works == []
        assert (await stub.ServerReady(oip.ServerReadyRequest())).ready
        response = await stub.ModelInfer(ask("r-1"), metadata=(("authorization", f"Bearer {'k' * 32}"),))
        assert texts_of(response) == [TEXT]
        assert router.prefill.works[0].request_id.startswith("acme/")


async def test_a_drain_waits_for_requests_and_not_for_streams(tiny_model: Path) -> None:
    async with serving(tiny_model) as (router, stub, server):
        gate = router.decode.pause_at[3] = asyncio.Event()
        call = stub.ModelStreamInfer()
        await call.write(ask("live"))
        await call.read()
        assert server.num_open == 0
        drain = asyncio.create_task(router.frontend.drain(30))
        await eventually(lambda: not router.frontend.ready)
        await call.write(ask("late"))
        found = []
        while not found:
            response = await call.read()
            found += [response.error_message] if response.error_message else []
        assert found == ["UNAVAILABLE: the router is draining"]
        assert not drain.done()
        gate.set()
        texts = []
        while not (response := (await call.read()).infer_response).parameters["triton_final_response"].bool_param:
            texts += texts_of(response)
        assert "".join(texts).endswith(TEXT[3:])
        assert await drain == 0
        await server.drain(0)
        error = await refusal(stub.ModelStreamInfer(iter([ask()])).read())
        assert "the server is draining" in error.details()
        ending = asyncio.create_task(server.__aexit__())
        assert "the server drained" in (await refusal(call.read())).details()
        await ending
