"""What a gateway is told: where a request goes, that a part of it may pass, or the answer to a client instead."""

from collections.abc import Iterator, Mapping

from google.protobuf.struct_pb2 import Struct
from grpc import StatusCode

from pageferry.core.errors import PageferryError
from pageferry.ext_proc import external_processor_pb2 as envoy
from pageferry.router.gateway.errors import error_body, error_headers, error_status
from pageferry.router.gateway.strict_json import dump
from pageferry.router.picker_request import ENDPOINT, NAMESPACE, Head
from pageferry.router.picks import Place

MAX_PIECE_BYTES = 62 * 1024  # of a body in duplex; Envoy wants no more than 64 KiB at a time
_DUPLEX = envoy.ProcessingMode.FULL_DUPLEX_STREAMED
_EMPTY = {  # what lets a part pass
    "request_headers": envoy.ProcessingResponse(request_headers=envoy.HeadersResponse()),
    "response_headers": envoy.ProcessingResponse(response_headers=envoy.HeadersResponse()),
    "request_body": envoy.ProcessingResponse(request_body=envoy.BodyResponse()),
    "response_body": envoy.ProcessingResponse(response_body=envoy.BodyResponse()),
    "request_trailers": envoy.ProcessingResponse(request_trailers=envoy.TrailersResponse()),
    "response_trailers": envoy.ProcessingResponse(response_trailers=envoy.TrailersResponse()),
}


def passed(message: envoy.ProcessingRequest, head: Head) -> envoy.ProcessingResponse:
    """Lets a part pass as it is; in duplex, bodies are sent on from here."""
    kind = message.WhichOneof("request") or "request_headers"
    if kind == "request_body" and head.request_body_mode == _DUPLEX:
        return envoy.ProcessingResponse(request_body=_piece(message.request_body))
    if kind == "response_body" and head.response_body_mode == _DUPLEX:
        return envoy.ProcessingResponse(response_body=_piece(message.response_body))
    return _EMPTY[kind]


def sent_by_headers(place: Place, head: Head) -> envoy.ProcessingResponse:
    """Answers the headers."""
    common = envoy.CommonResponse(header_mutation=_destination(place, head))
    response = envoy.ProcessingResponse(request_headers=envoy.HeadersResponse(response=common))
    response.dynamic_metadata.CopyFrom(_metadata(place))
    return response


def sent_by_body(place: Place, head: Head) -> envoy.ProcessingResponse:
    """Answers a whole body, whose headers have been let pass and are still there to be changed."""
    common = envoy.CommonResponse(header_mutation=_destination(place, head))
    response = envoy.ProcessingResponse(request_body=envoy.BodyResponse(response=common))
    response.dynamic_metadata.CopyFrom(_metadata(place))
    return response


def sent_in_duplex(place: Place, head: Head, body: bytes, *, has_trailers: bool) -> Iterator[envoy.ProcessingResponse]:
    """Answers headers, all of the body, and trailers."""
    yield sent_by_headers(place, head)
    for start in range(0, max(1, len(body)), MAX_PIECE_BYTES):
        end = start + MAX_PIECE_BYTES
        piece = envoy.HttpBody(body=body[start:end], end_of_stream=end >= len(body) and not has_trailers)
        yield envoy.ProcessingResponse(request_body=_piece(piece))
    if has_trailers:
        yield _EMPTY["request_trailers"]


def refused(error: PageferryError, head: Head) -> envoy.ProcessingResponse:
    """Answers the client in OpenAI's form, or with a status of gRPC."""
    headers = error_headers(error)
    reply = envoy.ImmediateResponse(status=envoy.HttpStatus(code=error_status(error)), details=error.reason.lower())
    if head.is_grpc:
        reply.grpc_status.status = StatusCode[error.code].value[0]
        reply.body = error.message.encode()
    else:
        headers["content-type"] = "application/json"
        reply.body = dump(error_body(error))
    reply.headers.CopyFrom(_set(headers))
    return envoy.ProcessingResponse(immediate_response=reply)


def _destination(place: Place, head: Head) -> envoy.HeaderMutation:
    headers = {ENDPOINT: ",".join(place.endpoints)}
    if place.traceparent and "traceparent" not in head.headers:
        headers["traceparent"] = place.traceparent  # so that the choice and the request are one trace
    return _set(headers)


def _set(headers: Mapping[str, str]) -> envoy.HeaderMutation:
    """Over what the client has set."""
    action = envoy.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    values = [envoy.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()]
    return envoy.HeaderMutation(
        set_headers=[envoy.HeaderValueOption(header=value, append_action=action) for value in values]
    )


def _metadata(place: Place) -> Struct:
    metadata = Struct()
    metadata.update({NAMESPACE: {ENDPOINT: ",".join(place.endpoints)}})
    return metadata


def _piece(piece: envoy.HttpBody) -> envoy.BodyResponse:
    streamed = envoy.StreamedBodyResponse(body=piece.body, end_of_stream=piece.end_of_stream)
    mutation = envoy.BodyMutation(streamed_response=streamed)
    return envoy.BodyResponse(response=envoy.CommonResponse(body_mutation=mutation))
