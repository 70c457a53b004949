"""Tells whether two workers hold the same model."""

import hashlib
import json
from dataclasses import asdict

from pageferry.core.model_config import ModelConfig
from pageferry.engine.tensors import TensorFiles


def fingerprint(config: ModelConfig, tensors: TensorFiles) -> str:
    """32 hex digits over configuration (without the name) and all tensors.

    Of each tensor the name, the shape and the first bytes count. How pages are laid out is compared apart.
    """
    facts = asdict(config) | {"name": ""}
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors.shapes):
        digest.update(f"\n{name} {tensors.shapes[name]}\n".encode())
        digest.update(tensors.first_bytes(name))
    return digest.hexdigest()
