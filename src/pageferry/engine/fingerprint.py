"""Tells whether two workers hold the same model."""

import hashlib
import json
from dataclasses import asdict

from pageferry.core.model_config import ModelConfig
from pageferry.engine.tensors import TensorFiles

_CACHE_GROUPS = ("full",)


def fingerprint(config: ModelConfig, tensors: TensorFiles, page_size: int) -> str:
    """32 hex digits over configuration (without the name), cache groups, page size, and all tensors.

    Of each tensor the name, the shape and the first bytes count. The page format is compared apart.
    """
    facts = asdict(config) | {"name": "", "page_size": page_size, "groups": _CACHE_GROUPS}
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors.shapes):
        digest.update(f"\n{name} {tensors.shapes[name]}\n".encode())
        digest.update(tensors.first_bytes(name))
    return digest.hexdigest()
