"""What a gateway tells of an HTTP request, and what of it is a generation that workers can be chosen for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct, Value
from starlette.datastructures import Headers

from pageferry.core.errors import InvalidArgumentError
from pageferry.ext_proc import external_processor_pb2 as envoy
from pageferry.router.gateway.chat_request import parse_chat
from pageferry.router.gateway.completion_request import parse_completion
from pageferry.router.gateway.envelope import REQUEST_ID, read_profile
from pageferry.router.gateway.fields import Reading
from pageferry.router.gateway.parsed import Parsed
from pageferry.router.gateway.responses_request import parse_responses
from pageferry.v1.inference_pb2 import GenerateRequest

ENDPOINT = "x-gateway-destination-endpoint"
SUBSET, SUBSET_NAMESPACE = f"{ENDPOINT}-subset", "envoy.lb.subset_hint"
SERVED, NAMESPACE = f"{ENDPOINT}-served", "envoy.lb"
_PARSERS: Mapping[str, Callable[[bytes, Reading], Parsed]] = {  # by the end of a path: gateways may have prefixes
    "/v1/chat/completions": parse_chat,
    "/v1/completions": parse_completion,
    "/v1/responses": parse_responses,
}
_GENERATE = "/pageferry.v1.InferenceService/Generate"
_FRAME_BYTES = 5  # of gRPC: whether it is compressed, and the message's length
# The request, and names that its body has for fields of the contract, for errors.
Read = tuple[GenerateRequest, Mapping[str, str]]
Reader = Callable[[bytes], Read]


@dataclass(frozen=True, slots=True)
class Head:
    """A request but for its body."""

    headers: Headers
    method: str
    path: str  # without a query
    has_body: bool
    request_body_mode: int
    response_body_mode: int
    only: frozenset[str] | None  # endpoints that the gateway allows

    @classmethod
    def of(cls, message: envoy.ProcessingRequest) -> "Head":
        """Of the message that has the request's headers."""
        told = message.request_headers
        raw = [(one.key.encode().lower(), one.raw_value or one.value.encode()) for one in told.headers.headers]
        headers = Headers(raw=[(name, value) for name, value in raw if not name.startswith(b":")])
        pseudo = {name.decode(): value.decode(errors="replace") for name, value in raw if name.startswith(b":")}
        config, mode = message.protocol_config, envoy.ProcessingMode
        return cls(
            headers=headers,
            method=pseudo.get(":method", ""),
            path=pseudo.get(":path", "").partition("?")[0],
            has_body=not told.end_of_stream,
            # Older gateways do not tell; theirs then is the mode in which all can be answered.
            request_body_mode=config.request_body_mode if message.HasField("protocol_config") else mode.BUFFERED,
            response_body_mode=config.response_body_mode,
            only=subset_of(message),
        )

    @property
    def is_grpc(self) -> bool:
        return self.headers.get("content-type", "").startswith("application/grpc")

    def reader(self, *, refuse_unknown: bool) -> Reader | None:
        """What reads the body of a generation; None for all else, which any router answers, or refuses, as well.

        It raises InvalidArgumentError for a body that is wrong.
        """
        if self.method != "POST" or not self.has_body or self.request_body_mode == envoy.ProcessingMode.NONE:
            return None
        if self.is_grpc:
            return _read_grpc if self.path.endswith(_GENERATE) else None
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        encoding = self.headers.get("content-encoding", "identity").lower()
        parse = next((parse for end, parse in _PARSERS.items() if self.path.endswith(end)), None)
        if parse is None or media_type != "application/json" or encoding != "identity":
            return None
        return partial(self._read_json, parse, refuse_unknown)

    def _read_json(self, parse: Callable[[bytes, Reading], Parsed], refuse_unknown: bool, body: bytes) -> Read:
        reading = Reading(refuse_unknown)
        request = parse(body, reading).request_of(0)  # of several prompts, the first decides
        request.request_id = self.headers.get(REQUEST_ID, "")
        read_profile(self, request)
        return request, reading.names


def _read_grpc(body: bytes) -> Read:
    length = int.from_bytes(body[1:_FRAME_BYTES], "big")
    if len(body) != _FRAME_BYTES + length or body[0] != 0:
        message = f"the body of {len(body)} bytes is no single message of gRPC without compression"
        raise InvalidArgumentError(message, reason="MALFORMED_MESSAGE")
    try:
        return GenerateRequest.FromString(body[_FRAME_BYTES:]), {}
    except DecodeError:
        raise InvalidArgumentError("the message is malformed: no GenerateRequest", reason="MALFORMED_MESSAGE") from None


def subset_of(message: envoy.ProcessingRequest) -> frozenset[str] | None:
    """The endpoints that may be picked, however many; None where nothing is said."""
    value = _field(message, SUBSET_NAMESPACE, SUBSET)
    if value is None:
        return None
    texts = [one.string_value for one in value.list_value.values] or value.string_value.split(",")
    return frozenset(text.strip() for text in texts)


def served_of(message: envoy.ProcessingRequest) -> str:
    """The endpoint that has served the request; empty where nothing is said."""
    value = _field(message, NAMESPACE, SERVED)
    return "" if value is None else value.string_value


def _field(message: envoy.ProcessingRequest, namespace: str, key: str) -> Value | None:
    known = message.metadata_context.filter_metadata
    struct = known[namespace] if namespace in known else Struct()
    return struct.fields.get(key)
