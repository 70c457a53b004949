"""Pageferry: language models served from separated prefill and decode over gRPC."""

import os

# Read when gRPC is first imported, so here. Its fork handlers would only be in the way, as nothing here forks; and what
# it logs below errors, such as a peer that closed its connection, is told by our own errors.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__version__ = "0.1.0"
