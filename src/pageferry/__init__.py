"""Pageferry: language models served from separated prefill and decode over gRPC."""

__version__ = "0.1.0"
