"""The prefix cache's keys: one hash for each full page, chained, and equal in every process."""

import hashlib
import struct
from collections.abc import Sequence

HASH_BYTES = 16
_ROOT = bytes(HASH_BYTES)


def page_hashes(
    token_ids: Sequence[int], page_size: int, *, salt: str, layout_key: bytes, known: Sequence[bytes] = ()
) -> list[bytes]:
    """One hash per full page of `token_ids`: blake2b over (parent's hash, token ids as uint32-LE, layout key, salt).

    So equal hashes mean equal tokens from the start on, under one tenant's salt and one page layout. `known` holds the
    hashes of the first pages, computed earlier with the same arguments; they are not computed again.
    """
    num_full = len(token_ids) // page_size
    hashes = list(known[:num_full])
    tail = layout_key + salt.encode()
    pack = struct.Struct(f"<{page_size}I").pack
    for start in range(len(hashes) * page_size, num_full * page_size, page_size):
        parent = hashes[-1] if hashes else _ROOT
        content = parent + pack(*token_ids[start : start + page_size]) + tail
        hashes.append(hashlib.blake2b(content, digest_size=HASH_BYTES).digest())
    return hashes
