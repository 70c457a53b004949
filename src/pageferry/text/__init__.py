"""Text to tokens and back, and chat templates; no torch, no network."""
