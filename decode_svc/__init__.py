"""Receives pages and generates tokens by continuous batching."""
