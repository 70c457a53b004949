"""What a request of the Open Inference Protocol asks for: its tensors and parameters as a GenerateRequest.

A parameter is a field of a body of /v1/completions, so that both mean the same and are checked alike. It comes among
the request's `parameters`, as a tensor of one element, or in `sampling_parameters`, a JSON object.
"""

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pageferry.core.errors import InvalidArgumentError, NotFoundError
from pageferry.oip import open_inference_pb2 as oip
from pageferry.router.admission import MAX_MODEL_CHARACTERS
from pageferry.router.gateway.completion_request import read_completion
from pageferry.router.gateway.fields import Fields, Reading
from pageferry.router.gateway.strict_json import Json, decode_json, refuse, shown
from pageferry.v1 import inference_pb2 as pb

VERSION = "1"  # of every model
TEXT_INPUT, TEXT_OUTPUT, FINISH_REASON = "text_input", "text_output", "finish_reason"
_Value = TypeVar("_Value")
_Tensor = oip.ModelInferRequest.InferInputTensor
# The field of the contents, and the form of a raw element, of each datatype but BYTES.
_DATATYPES = {
    "BOOL": ("bool_contents", "<?"),
    "INT8": ("int_contents", "<b"),
    "INT16": ("int_contents", "<h"),
    "INT32": ("int_contents", "<i"),
    "INT64": ("int64_contents", "<q"),
    "UINT8": ("uint_contents", "<B"),
    "UINT16": ("uint_contents", "<H"),
    "UINT32": ("uint_contents", "<I"),
    "UINT64": ("uint64_contents", "<Q"),
    "FP32": ("fp32_contents", "<f"),
    "FP64": ("fp64_contents", "<d"),
}
_LENGTH = struct.Struct("<I")  # before a raw element of BYTES
# Fields of a completion whose value is a text as it stands; that of any other is read as JSON where it is JSON.
_TEXTS = ("profile", "stop")
_NOT_HERE = {
    "logprobs": "is not answered over this protocol; leave it out",
    "prompt_logprobs": "is not answered over this protocol; leave it out",
    "model": "is the request's model_name",
    "prompt": f"is the tensor {TEXT_INPUT}",
    "stream_options": "is not needed: the last answer has the counts",
}


@dataclass(frozen=True, slots=True)
class Inference:
    """A checked request."""

    generate: pb.GenerateRequest
    id: str  # which the client may give to others too, unlike a request id of ours
    stream: bool
    timeout_s: float | None
    outputs: frozenset[str]
    raw: bool  # how tensors came, and are answered


def parse_infer(request: oip.ModelInferRequest, *, streams: bool) -> Inference:
    """Raises InvalidArgumentError, or NotFoundError. `streams`: whether the call could stream, which is its default."""
    check_version(request.model_name, request.model_version)
    fields = _fields(request)
    text = fields.pop(TEXT_INPUT, None)
    if not isinstance(text, str):
        refuse(f"inputs.{TEXT_INPUT}", "must be given, as BYTES")
    stream = _take_flag(fields, "stream", streams)
    if stream and not streams:
        refuse("stream", "needs the call ModelStreamInfer")
    if "exclude_input_in_output" in fields:
        if "echo" in fields:
            refuse("exclude_input_in_output", "is the contrary of echo; give one of them")
        fields["echo"] = not _take_flag(fields, "exclude_input_in_output", True)
    _take_flag(fields, "triton_enable_empty_final_response", False)  # the last answer says that it is, if empty or not
    timeout_s = _take_timeout(fields)
    for name, why in _NOT_HERE.items():
        if name in fields:
            refuse(name, why, reason="UNSUPPORTED_FIELD")
    generate = read_completion(Fields(fields | {"prompt": text}, Reading())).request
    generate.model = request.model_name
    return Inference(generate, request.id, stream, timeout_s, _outputs(request), bool(request.raw_input_contents))


def check_version(model: str, version: str) -> None:
    """Raises NotFoundError."""
    if version not in ("", VERSION):
        name, other = (text[:MAX_MODEL_CHARACTERS] for text in (model, version))
        message = f"version {other!r} of model {name!r} is not served, but {VERSION!r} is"
        raise NotFoundError(message, reason="MODEL_NOT_FOUND")


def bytes_element(data: bytes) -> bytes:
    """A raw element of BYTES."""
    return _LENGTH.pack(len(data)) + data


def _fields(request: oip.ModelInferRequest) -> Json:
    """All that is given, by name, wherever it stands."""
    fields: Json = {}
    for name, value in _given(request):
        if name in fields:
            refuse(shown(name), "is given twice")
        fields[name] = value
    return fields


def _given(request: oip.ModelInferRequest) -> Iterator[tuple[str, object]]:
    for name, parameter in request.parameters.items():
        yield from _named(name, _parameter_value(name, parameter))
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        refuse("raw_input_contents", f"has {len(raw)} entries for {len(request.inputs)} inputs, must have one for each")
    for index, tensor in enumerate(request.inputs):
        yield from _named(tensor.name, _element(f"inputs[{index}]", tensor, raw[index] if raw else None))


def _named(name: str, value: object) -> Iterator[tuple[str, object]]:
    if name == "sampling_parameters":
        yield from _object(value).items()
    elif isinstance(value, str) and name not in (TEXT_INPUT, *_TEXTS):
        yield name, _read(value)
    else:
        yield name, value


def _object(value: object) -> Json:
    if not isinstance(value, str):
        refuse("sampling_parameters", "must be a JSON object, as a string")
    try:
        fields = decode_json(value.encode())
    except InvalidArgumentError as error:
        refuse("sampling_parameters", f"can't be read: {error.message}", reason=error.reason)
    # Triton's clients write numbers as strings here.
    return {
        name: _read(given) if isinstance(given, str) and name not in _TEXTS else given for name, given in fields.items()
    }


def _read(text: str) -> object:
    """The value that a text is as JSON, or else the text."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value


def _parameter_value(name: str, parameter: oip.InferParameter) -> object:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        refuse(f"parameters.{shown(name)}", "must have a value")
    value: object = getattr(parameter, kind)
    return _finite(f"parameters.{shown(name)}", value)


def _finite(field: str, value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        refuse(field, f"is {value}, must be finite")
    return value


def _element(field: str, tensor: _Tensor, raw: bytes | None) -> object:
    """The one element of a tensor; BYTES are text."""
    if tensor.parameters:
        refuse(f"{field}.parameters", "must be empty: shared memory is not taken", reason="UNSUPPORTED_FIELD")
    if any(size != 1 for size in tensor.shape):
        shape = list(tensor.shape[:8])
        refuse(f"{field}.shape", f"is {shape}, must be of one element; send a request for each text")
    if tensor.datatype == "BYTES":
        data = _only(field, tensor.contents.bytes_contents) if raw is None else _raw_bytes(field, raw)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            refuse(field, f"is not UTF-8 at byte {error.start}")
    if tensor.datatype not in _DATATYPES:
        refuse(f"{field}.datatype", f"is {shown(tensor.datatype)}, must be BYTES, {', '.join(_DATATYPES)}")
    contents, form = _DATATYPES[tensor.datatype]
    if raw is None:
        return _finite(field, _only(field, getattr(tensor.contents, contents)))
    if len(raw) != struct.calcsize(form):
        refuse(field, f"has {len(raw)} bytes, must have {struct.calcsize(form)}")
    return _finite(field, struct.unpack(form, raw)[0])


def _only(field: str, elements: Sequence[_Value]) -> _Value:
    if len(elements) != 1:
        refuse(f"{field}.contents", f"has {len(elements)} elements of its datatype, must have 1")
    return elements[0]


def _raw_bytes(field: str, raw: bytes) -> bytes:
    if len(raw) < _LENGTH.size or _LENGTH.unpack_from(raw)[0] != len(raw) - _LENGTH.size:
        refuse(field, "must be the length of one element in 4 bytes, little-endian, and the element")
    return raw[_LENGTH.size :]


def _take_flag(fields: Json, name: str, default: bool) -> bool:
    value = fields.pop(name, default)
    if not isinstance(value, bool):
        refuse(name, "must be true or false")
    return value


def _take_timeout(fields: Json) -> float | None:
    """In microseconds, as Triton has it."""
    value = fields.pop("timeout", 0)
    if type(value) is not int or value < 0:
        refuse("timeout", "must be a whole number of microseconds, at least 0")
    return value / 1e6 if value else None


def _outputs(request: oip.ModelInferRequest) -> frozenset[str]:
    for index, output in enumerate(request.outputs):
        if output.name not in (TEXT_OUTPUT, FINISH_REASON):
            refuse(f"outputs[{index}].name", f"is {shown(output.name)}, must be {TEXT_OUTPUT} or {FINISH_REASON}")
        if output.parameters:
            refuse(f"outputs[{index}].parameters", "must be empty", reason="UNSUPPORTED_FIELD")
    return frozenset(output.name for output in request.outputs) or frozenset((TEXT_OUTPUT, FINISH_REASON))
