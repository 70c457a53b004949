"""A router whose workers replay tokens, asked in every way that clients have; and models of a test's own tokens."""

import json
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
from fake_workers import Rig, Script
from gateway import client_of
from tiny_model import EOS_ID, SPECIAL_TOKENS, byte_characters, tokenizer_json

from pageferry.core.config import ServerConfig
from pageferry.oip import open_inference_pb2 as oip
from pageferry.oip.open_inference_pb2_grpc import (
    GRPCInferenceServiceStub,
    add_GRPCInferenceServiceServicer_to_server,
)
from pageferry.router.gateway.bodies import Bodies
from pageferry.router.oip import OpenInferenceServicer
from pageferry.router.service import InferenceServicer
from pageferry.runtime.server import GrpcServer
from pageferry.v1 import inference_pb2 as pb, types_pb2 as types
from pageferry.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server

WAYS = ("grpc", "oip", "oip stream", "completion", "completion stream", "chat", "chat stream")
VOCABULARY = 1000
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SENTENCEPIECE = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    },
    "pre_tokenizer": None,
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
}


def byte_id(byte: int) -> int:
    """The token of one byte, in either kind of replay model."""
    return len(SPECIAL_TOKENS) + byte


def word_id(number: int) -> int:
    """The token of a word of a replay model, by its place in `words`."""
    return byte_id(256) + number


def write_replay_model(
    directory: Path,
    tiny_model: Path,
    words: Sequence[str],
    *,
    sentencepiece: bool = False,
    eos_ids: Sequence[int] = (EOS_ID,),
) -> Path:
    """A model that is never loaded: its tokens are the tiny one's special ones, one for each byte, and the words.

    Words of a byte-level one are texts; of a SentencePiece-like one, tokens as they stand in its vocabulary.
    """
    directory.mkdir(parents=True)
    for name in ("model.safetensors", "tokenizer_config.json"):
        (directory / name).symlink_to(tiny_model / name)
    characters = byte_characters()
    byte_level = ["".join(characters[byte] for byte in word.encode()) for word in words]
    tokens = [*SPECIAL_TOKENS, *(_BYTES if sentencepiece else characters), *(words if sentencepiece else byte_level)]
    tokens += [f"<unused{index}>" for index in range(VOCABULARY - len(tokens))]
    tokenizer = tokenizer_json(SPECIAL_TOKENS, tokens, [])
    if sentencepiece:
        tokenizer |= _SENTENCEPIECE
        tokenizer["model"] = {**tokenizer["model"], "byte_fallback": True}  # type: ignore[dict-item]
    config = json.loads((tiny_model / "config.json").read_text()) | {"vocab_size": VOCABULARY}
    documents = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": list(eos_ids)},
        "tokenizer.json": tokenizer,
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document), encoding="utf-8")
    return directory


@dataclass
class Said:
    """One answer: its text in the parts that it came in, and why it ended."""

    parts: list[str]
    reason: str
    num_tokens: int

    @property
    def text(self) -> str:
        return "".join(self.parts)


class Replay:
    """Use as a context. Fields of an `ask` are those of a body of /v1/completions."""

    def __init__(self, model_dir: Path | str, **options: Any) -> None:
        self.rig = Rig(str(model_dir), Script([]), **options)

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        router = await self._stack.enter_async_context(self.rig)
        server = await self._stack.enter_async_context(GrpcServer(ServerConfig(), router.log.tracer()))
        server.add(add_InferenceServiceServicer_to_server, InferenceServicer(router.frontend), "x")
        server.add(add_GRPCInferenceServiceServicer_to_server, OpenInferenceServicer(router.frontend), "y")
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{await server.start()}")
        await self._stack.enter_async_context(channel)
        self.stub, self.oip = InferenceServiceStub(channel), GRPCInferenceServiceStub(channel)
        http = client_of(router.frontend, router.metrics.registry, bodies=Bodies(16 * 2**20))
        self.http = await self._stack.enter_async_context(http)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def script(self, token_ids: Sequence[int]) -> None:
        """What workers say from now on."""
        self.rig.prefill.script = self.rig.decode.script = Script([*token_ids])

    async def ask(self, way: str, token_ids: Sequence[int], *, batch: int = 1, **fields: Any) -> Said:
        """What a client gets of the tokens, `batch` in a message between services."""
        self.script(token_ids)
        self.rig.decode.batch = batch
        fields = {"max_tokens": len(token_ids)} | fields
        match way.split():
            case ["grpc"]:
                return await self._grpc(fields)
            case ["oip", *stream]:
                return await self._oip(fields, stream=bool(stream))
            case [kind, *stream]:
                return await self._http(kind, fields, stream=bool(stream))
        raise AssertionError(way)

    async def _grpc(self, fields: dict[str, Any]) -> Said:
        request = pb.GenerateRequest(prompt="Say it.", stop_strings=_listed(fields.get("stop")))
        for name in fields.keys() - {"stop"}:
            fields_of = next(part for part in (request, request.stop, request.sampling) if hasattr(part, name))
            setattr(fields_of, name, fields[name])
        said = Said([], "", 0)
        async for event in self.stub.Generate(request):
            if event.HasField("delta"):
                said.parts.append(event.delta.text)
            elif event.HasField("finished"):
                said.reason = types.FinishReason.Name(event.finished.reason).removeprefix("FINISH_REASON_").lower()
                said.num_tokens = event.finished.usage.completion_tokens
        return said

    async def _oip(self, fields: dict[str, Any], *, stream: bool) -> Said:
        request = oip.ModelInferRequest(model_name="tiny")
        request.parameters["sampling_parameters"].string_param = json.dumps(fields)
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"Say it.")
        if stream:
            responses = [response async for response in self.oip.ModelStreamInfer(iter([request]))]
            answers = [response.infer_response for response in responses]
        else:
            answers = [await self.oip.ModelInfer(request)]
        tensors = {name: [_elements(answer, name) for answer in answers] for name in ("text_output", "finish_reason")}
        num_tokens = answers[-1].parameters["completion_tokens"].int64_param
        return Said(_flat(tensors["text_output"]), _flat(tensors["finish_reason"])[-1], num_tokens)

    async def _http(self, kind: str, fields: dict[str, Any], *, stream: bool) -> Said:
        body: dict[str, Any] = dict(fields)
        if kind == "chat":
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": "Say it."}]
        else:
            path, body["prompt"] = "/v1/completions", "Say it."
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        chunks = _events(response.text) if stream else [response.json()]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        texts = [_text(choice) for choice in choices]
        (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        return Said(texts, reason, chunks[-1]["usage"]["completion_tokens"])


def _text(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta") or {}
    return choice.get("text") or part.get("content") or ""


def _events(body: str) -> list[dict[str, Any]]:
    blocks = [block.removeprefix("data: ") for block in body.split("\n\n") if block]
    assert blocks[-1] == "[DONE]"
    return [json.loads(block) for block in blocks[:-1]]


def _elements(answer: oip.ModelInferResponse, name: str) -> list[str]:
    return [
        element.decode()
        for output in answer.outputs
        if output.name == name
        for element in output.contents.bytes_contents
    ]


def _flat(lists: Iterable[list[str]]) -> list[str]:
    return [element for part in lists for element in part]


def _listed(stop: object) -> list[str]:
    return [stop] if isinstance(stop, str) else [*(stop or ())]  # type: ignore[misc]
