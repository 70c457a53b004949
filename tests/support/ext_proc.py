"""A gateway's side of ext_proc: what Envoy sends about one HTTP request, and what it would do with the answers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from pageferry.ext_proc import external_processor_pb2 as envoy
from pageferry.ext_proc.external_processor_pb2_grpc import ExternalProcessorStub
from pageferry.v1.inference_pb2 import GenerateRequest

MODE = envoy.ProcessingMode
CHAT = "/v1/chat/completions"


def chat(text: str = "Say something.", **fields: Any) -> bytes:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4} | fields
    return json.dumps(body).encode()


def framed(request: GenerateRequest) -> bytes:
    """The body of a call of gRPC."""
    data = request.SerializeToString()
    return b"\0" + len(data).to_bytes(4, "big") + data


def headers_of(
    path: str = CHAT,
    *,
    method: str = "POST",
    body_mode: int = MODE.BUFFERED,
    response_body_mode: int = MODE.NONE,
    subset: list[str] | None = None,
    end_of_stream: bool = False,
    **headers: str,
) -> envoy.ProcessingRequest:
    """The first message; underscores of names are hyphens."""
    named = {"content-type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
    pairs = {":method": method, ":path": path} | named
    message = envoy.ProcessingRequest(
        request_headers=envoy.HttpHeaders(
            headers=envoy.HeaderMap(
                headers=[envoy.HeaderValue(key=key, raw_value=text.encode()) for key, text in pairs.items()]
            ),
            end_of_stream=end_of_stream,
        ),
        protocol_config=envoy.ProtocolConfiguration(request_body_mode=body_mode, response_body_mode=response_body_mode),
    )
    if subset is not None:
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
            {"x-gateway-destination-endpoint-subset": subset}
        )
    return message


def body_of(data: bytes, *, end_of_stream: bool = True) -> envoy.ProcessingRequest:
    return envoy.ProcessingRequest(request_body=envoy.HttpBody(body=data, end_of_stream=end_of_stream))


def answer_of(served: str = "") -> envoy.ProcessingRequest:
    """The answer's headers."""
    message = envoy.ProcessingRequest(response_headers=envoy.HttpHeaders())
    if served:
        message.metadata_context.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": served})
    return message


@dataclass
class Told:
    """What a picker's answers come to."""

    headers: dict[str, str] = field(default_factory=dict)  # set on the request
    metadata: dict[str, str] = field(default_factory=dict)  # in envoy.lb
    body: bytes = b""  # sent on, in duplex
    is_whole: bool = False
    status: int = 0  # of an immediate response
    error: dict[str, Any] = field(default_factory=dict)
    error_headers: dict[str, str] = field(default_factory=dict)
    grpc_status: int | None = None
    text: str = ""  # of an immediate response

    @property
    def endpoints(self) -> list[str]:
        """Those picked, which header and metadata tell alike."""
        assert self.headers["x-gateway-destination-endpoint"] == self.metadata["x-gateway-destination-endpoint"]
        return self.headers["x-gateway-destination-endpoint"].split(",")

    def take(self, reply: envoy.ProcessingResponse) -> None:
        if reply.HasField("immediate_response"):
            self._take_error(reply.immediate_response)
            return
        if "envoy.lb" in reply.dynamic_metadata.fields:
            self.metadata |= dict(reply.dynamic_metadata["envoy.lb"])
        kind = reply.WhichOneof("response")
        if kind in ("request_headers", "request_body"):
            common = getattr(reply, kind).response
            self.headers |= _set_by(common.header_mutation)
            piece = common.body_mutation.streamed_response
            self.body += piece.body
            self.is_whole = piece.end_of_stream

    def _take_error(self, reply: envoy.ImmediateResponse) -> None:
        self.status, self.text = reply.status.code, reply.body.decode()
        self.error_headers = _set_by(reply.headers)
        if reply.HasField("grpc_status"):
            self.grpc_status = reply.grpc_status.status
        else:
            self.error = json.loads(reply.body)["error"]


def _set_by(mutation: envoy.HeaderMutation) -> Mapping[str, str]:
    options = mutation.set_headers
    assert all(option.append_action == envoy.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD for option in options)
    return {option.header.key: option.header.raw_value.decode() for option in options}


class Gateway:
    """Asks a picker."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = ExternalProcessorStub(channel)

    def open(self, *metadata: tuple[str, str]) -> Any:
        """A stream for one request."""
        return self._stub.Process(metadata=metadata)

    async def ask(self, body: bytes | None = None, *, call: Any = None, **head: Any) -> Told:
        """A request whose body is buffered, up to the choice; the stream is left open where it is the test's."""
        call, told = call or self.open(), Told()
        await call.write(headers_of(end_of_stream=body is None, **head))
        reply = await call.read()
        told.take(reply)
        if body is not None and not told.status and not told.headers:
            await call.write(body_of(body))
            told.take(await call.read())
        return told
