"""A request of which only the lengths matter."""

from typing import Any

from pageferry.v1 import inference_pb2 as pb


def ask(num_prompt: int = 40, *, max_tokens: int | None = 5, token_id: int = 200, **fields: Any) -> pb.GenerateRequest:
    """Its prompt is that one token over and over, where `fields` have no other input."""
    request = pb.GenerateRequest(**fields)
    if request.WhichOneof("input") is None:
        request.token_ids.CopyFrom(pb.TokenIds(ids=[token_id] * num_prompt))
    if max_tokens is not None:
        request.stop.max_tokens = max_tokens
    return request
