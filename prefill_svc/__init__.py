"""Computes prompts in chunks and ships their pages."""
